"""Mixtures of experts on a GPU: the choice, the matrices of the chosen, and the weighted sum."""
from __future__ import annotations

from dataclasses import replace

from ingot.plugins.expert_linear import tactics as experts_tactics
from ingot.plugins.linear import tactics as linear_tactics
from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES
from ingot.plugins.quantize import tactics as quantize_tactics

from ..errors import CannotCompile
from ..ir.graph import Node
from ..plan.plan import Arg
from .emit_linear import quantized
from .emit_router import BY_EXPERT, lists, norm_behind, num_experts, request_route, wanted, write_wanted
from .lower import GpuLowering


def emit_route(low: GpuLowering, node: Node) -> None:
    """Of logits that something else than a router alone has made."""
    logits, *bias = node.values
    _tokens_alone(low, node, logits)
    problem = experts_tactics.Routing(low.tokens, num_experts(low, node), bias=bool(bias), **node.attrs)
    args = {"x": low.arg(logits)} | ({"bias": low.arg(bias[0])} if bias else {})
    request_route(low, node, problem, args, {})


def emit_expert_linear(low: GpuLowering, node: Node) -> None:
    x, ids = node.values[:2]
    if sums_choices(low, node):  # by the launch of the sum
        low.absorbed[node.output] = node
        for value in (x, ids):
            low.defer(node.output, value)
        return
    norm = low.absorbed.get(low.buffer(x))
    problem = expert_problem(low, node, norm)
    found = low.candidates(problem, linear_tactics.candidates)
    if problem.quantizes and not found.legal:
        problem = replace(problem, quantizes=False, token_scales=True, x_stride=0)
        found = low.candidates(problem, linear_tactics.candidates)
    apart = problem.gated and not found.legal
    if apart:
        plain = replace(problem, n=2 * problem.n, gated="", y_type="")
        found = low.candidates(plain, linear_tactics.candidates)
    args = _matrix(low, node, problem, norm)
    if not apart:
        args["y"] = low.output(node.output)
        low.request(node, found, args, {node.output: "y"}, problem.precision, native=True)
        return
    both = low.temporary(f"{node.output}.halves",
                         problem.num_rows * 2 * problem.n * int(quantize_tactics.BYTES[low.floats]))
    low.request(node, found, {**args, "y": both}, {}, problem.precision, native=True)
    gate = quantize_tactics.Problem(problem.m, problem.n, low.floats, low.stored[node.output], gated=problem.gated,
                                    group=problem.choices)
    low.request(node, low.candidates(gate, quantize_tactics.candidates), {"x": both, "y": low.output(node.output)},
                {node.output: "y"}, op="gate")


def emit_combine(low: GpuLowering, node: Node) -> None:
    """For few tokens with the matrix before it, for many with the norm behind it, where they may be one launch."""
    x, weights, *residual = node.values
    _, choices, d = low.type(x).shape
    _tokens_alone(low, node, weights)
    down = low.absorbed.get(low.buffer(x))
    args = {"weights": low.arg(weights)} | ({"residual": low.arg(residual[0])} if residual else {})
    read = [down.values[0] if down else x, weights]
    out = None
    if residual and low.stored[residual[0]] == low.stored[node.output]:
        out = low.in_place(node.output, residual[0], beside=read)
    args["y"] = out or low.output(node.output)
    writes = {node.output: "y"}
    if down is not None:
        problem = _sum_problem(low, down, node)
        low.request(node, low.candidates(problem, linear_tactics.candidates), args | _matrix(low, down, problem, None),
                    writes, problem.precision, native=True, op=down.op)
        return
    total = experts_tactics.Sum(low.tokens, int(d), int(choices), low.stored[x], low.stored[node.output],
                                low.stored[residual[0]] if residual else "")
    args["x"] = low.arg(x)
    norm = norm_behind(low, node)
    if norm is not None:
        normed, form = wanted(low, norm.output)
        whole = replace(total, norm_eps=norm.attrs["eps"], normed=normed, normed_form=form)
        found = low.candidates(whole, experts_tactics.summing)
        if found.legal:
            args["norm_weight"] = low.arg(norm.values[1])
            args |= write_wanted(low, norm.output, normed, form, "normed")
            low.made.add(norm.output)
            low.request(node, found, args, writes | ({norm.output: "normed"} if normed else {}))
            return
    low.request(node, low.candidates(total, experts_tactics.summing), args, writes)


def expert_problem(low: GpuLowering, node: Node, norm: Node | None = None) -> linear_tactics.Problem:
    """Of an expert_linear node. norm: whose result it reads, if it has to make that itself."""
    x, ids, w, *bias = node.values
    _tokens_alone(low, node, ids)
    scheme = low.scheme(node)
    experts, n, k = (int(dim) for dim in low.type(w).shape)
    gated, stored = node.attrs.get("gated", ""), low.stored[node.output]
    quantizes = bool(scheme.quantized) and low.few
    return linear_tactics.Problem(
        low.tokens, n // 2 if gated else n, k, scheme.format, scheme.activation, low.floats, quantizes=quantizes,
        token_scales=bool(scheme.quantized) and not quantizes, scale=scheme.format == "nvfp4", bias=bool(bias),
        norm_eps=norm.attrs["eps"] if norm else None, gated=gated, y_type="" if stored == low.floats else stored,
        experts=experts, choices=low.width(ids), shared=len(low.type(x).shape) == 2)


def sums_choices(low: GpuLowering, node: Node) -> bool:
    """Whether the launch of an expert_linear adds up the choices of each token."""
    users = low.users(node.output)
    if not low.few or len(users) != 1 or users[0].op != "combine" or node.attrs.get("gated") \
            or node.output in low.graph.outputs or low.buffer(node.values[0]) in low.absorbed:
        return False
    total = users[0]
    if low.root(total.values[0]) != node.output or low.type(total.values[0]) != low.type(node.output) \
            or any(low.stored[value] != low.floats for value in (total.output, *total.values[2:])):
        return False
    return bool(low.candidates(_sum_problem(low, node, total), linear_tactics.candidates).legal)


def _sum_problem(low: GpuLowering, down: Node, total: Node) -> linear_tactics.Problem:
    return replace(expert_problem(low, down), y_type="", sum_choices=True, residual=len(total.values) > 2)


def _matrix(low: GpuLowering, node: Node, problem: linear_tactics.Problem, norm: Node | None) -> dict[str, Arg]:
    """Weights, inputs, bias, and which rows are whose."""
    x, ids, _, *bias = node.values
    _, args = low.matrix(node.values[2], node.attrs["scheme"])
    args |= _by_expert(low, node, ids)
    if norm is not None:
        args |= {"x": low.arg(norm.values[0]), "norm_weight": low.arg(norm.values[1])}
    elif problem.token_scales:
        args |= quantized(low, node, x, GPU_SCHEMES[node.attrs["scheme"]].quantized)
    else:
        args["x"] = low.arg(x)
    return args | ({"bias": low.arg(bias[0])} if bias else {})


def _by_expert(low: GpuLowering, node: Node, ids: str) -> dict[str, Arg]:
    """The rows of each expert: made with the choice, or once for all matrices that follow a choice of another kind."""
    key = low.identity(ids), BY_EXPERT
    if key not in low.quantized:
        experts, choices = int(low.type(node.values[2]).shape[0]), low.width(ids)
        low.quantized[key] = lists(low, ids, experts)
        problem = experts_tactics.Sorting(low.tokens, experts, choices)
        low.request(node, low.candidates(problem, experts_tactics.sorting), {"ids": low.arg(ids), **low.quantized[key]},
                    {}, op="sort_by_expert")
    return dict(low.quantized[key])


def _tokens_alone(low: GpuLowering, node: Node, value: str) -> None:
    if low.rows(value) != "T":
        raise CannotCompile(f"{node.op} of {low.type(value)}: its kernel takes a row for each token\n"
                            f"  in {node.origin}")
