"""Matrices on a GPU, and how their inputs come to them: floating, quantized by a launch, or prepared by the kernel."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ingot.plugins.linear import tactics as linear_tactics
from ingot.plugins.linear.gpu_formats import BLOCK, GROUP
from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES
from ingot.plugins.quantize import tactics as quantize_tactics

from ..ir.graph import Node
from ..plan.plan import Arg
from .lower import GpuLowering

MATRICES = ("linear", "expert_linear")


def emit_linear(low: GpuLowering, node: Node) -> None:
    x, w, *rest = node.values
    residual = rest.pop() if node.attrs.get("residual") else ""
    norm = low.absorbed.get(low.buffer(x))
    problem = linear_problem(low, node, norm)
    if problem.gated and not low.candidates(problem, linear_tactics.candidates).legal:
        _gate_apart(low, node, problem)
        return
    _, args = low.matrix(w, node.attrs["scheme"])
    args |= inputs(low, node, problem, norm)
    writes = {node.output: "y"}
    if problem.post_norm:
        assert norm is not None
        writes[norm.outputs[1]] = "total"
    if rest:
        args["bias"] = low.arg(rest[0])
    if residual:
        args["residual"] = low.arg(residual)
        args["y"] = low.in_place(node.output, residual, beside=[x]) or low.output(node.output)
    else:
        args["y"] = low.output(node.output)
    low.request(node, low.candidates(problem, linear_tactics.candidates), args, writes, problem.precision, native=True)


def linear_problem(low: GpuLowering, node: Node, norm: Node | None = None) -> linear_tactics.Problem:
    """Of a linear node. norm: whose result it reads, if it has to make that itself."""
    x, w, *rest = node.values
    scheme = low.scheme(node)
    rows = low.row_symbol(x, node)
    n, k = (int(dim) for dim in low.type(w).shape)
    gated, residual = node.attrs.get("gated", ""), bool(node.attrs.get("residual"))
    source = norm.values[0] if norm else x
    quantizes = bool(scheme.quantized) and low.few
    stored = low.stored[node.output]
    return linear_tactics.Problem(
        low.count(rows), n // 2 if gated else n, k, scheme.format, scheme.activation, low.floats, rows,
        quantizes=quantizes, token_scales=bool(scheme.quantized) and not quantizes, scale=scheme.format == "nvfp4",
        bias=len(rest) > residual, residual=residual, norm_eps=norm.attrs["eps"] if norm else None,
        post_norm=norm is not None and norm.op == "norm_add_norm", gated=gated,
        y_type="" if stored == low.floats else stored,
        x_stride=low.x_stride(source) if quantizes or not scheme.quantized else 0)


def inputs(low: GpuLowering, node: Node, problem: linear_tactics.Problem, norm: Node | None) -> dict[str, Arg]:
    """x and what comes with it."""
    x = node.values[0]
    if norm is not None and problem.post_norm:
        names = ("x", "added", "added_weight", "norm_weight")
        return {**dict(zip(names, map(low.arg, norm.values), strict=True)), "total": low.arg(norm.outputs[1])}
    if norm is not None:
        return {"x": low.arg(norm.values[0]), "norm_weight": low.arg(norm.values[1])}
    form = GPU_SCHEMES[node.attrs["scheme"]].quantized
    if problem.quantizes or not form:
        return {"x": low.arg(x)}
    return quantized(low, node, x, form)


def wanted_form(low: GpuLowering, value: str, readers: Sequence[Node] | None = None) -> str:
    """What all readers of a value want it quantized to; "" if one wants it floating, or they differ. readers: those
    that count, if not all."""
    if value in low.graph.outputs or low.few:
        return ""
    forms = {GPU_SCHEMES[user.attrs["scheme"]].quantized if user.op in MATRICES else ""
             for user in (low.users(value) if readers is None else readers)}
    return forms.pop() if len(forms) == 1 else ""


def write_quantized(low: GpuLowering, value: str, form: str) -> dict[str, Arg]:
    """Reserve memory for a value in a quantized form: parameters of the launch that makes it. Readers find it."""
    rows, k = low.elements(value) // low.width(value), low.width(value)
    sizes = {"": rows * k // (2 if form == "nvfp4" else 1),
             "_scale": rows * {"nvfp4": k // BLOCK, "fp8_block": 4 * (k // GROUP)}.get(form, 4)}
    if form == "nvfp4":
        sizes["_factor"] = 4 * rows
    if group := quantize_tactics.split_form(form)[1]:
        sizes["_sum"] = 2 * rows * -(-k // group)
    places = {part: low.temporary(f"{value}.{form}{part}", size) for part, size in sizes.items()}
    low.quantized[low.identity(value), form] = {f"x{part}": place for part, place in places.items()}
    return {f"y{part}": place for part, place in places.items()}


def quantized(low: GpuLowering, node: Node, x: str, form: str) -> dict[str, Arg]:
    """x and its scales, made by a launch unless they are there."""
    key = low.identity(x), form
    if key not in low.quantized:
        symbol = str(low.rows(x)).rpartition("*")[2]
        problem = quantize_tactics.Problem(low.count(symbol), low.width(x), low.stored[x], form, symbol,
                                           x_stride=low.x_stride(x), group=low.rows_a_token(x))
        args = {"x": low.arg(x), **write_quantized(low, x, form)}
        low.request(node, low.candidates(problem, quantize_tactics.candidates), args, {}, op="quantize")
    return dict(low.quantized[key])


def _gate_apart(low: GpuLowering, node: Node, problem: linear_tactics.Problem) -> None:
    """Where no kernel takes the gate in: the matrix, then the gate."""
    x, w, *bias = node.values
    n, floats = problem.n, low.floats
    plain = replace(problem, n=2 * n, gated="", y_type="")
    both = low.temporary(f"{node.output}.halves", plain.m * 2 * n * int(quantize_tactics.BYTES[floats]))
    _, args = low.matrix(w, node.attrs["scheme"])
    args |= inputs(low, node, plain, low.absorbed.get(low.buffer(x))) | {"y": both}
    if bias:
        args["bias"] = low.arg(bias[0])
    low.request(node, low.candidates(plain, linear_tactics.candidates), args, {}, plain.precision, native=True)
    gate = quantize_tactics.Problem(plain.m, n, floats, floats, plain.rows, gated=problem.gated)
    low.request(node, low.candidates(gate, quantize_tactics.candidates), {"x": both, "y": low.output(node.output)},
                {node.output: "y"}, op="gate")
