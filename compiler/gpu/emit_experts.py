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
from .lower import GpuLowering

_BY_EXPERT = "by expert"


def emit_route(low: GpuLowering, node: Node) -> None:
    logits, *bias = node.values
    ids, weights = node.outputs
    attrs = {name: value for name, value in node.attrs.items() if name != "choices"}
    _tokens_alone(low, node, logits)
    problem = experts_tactics.Routing(low.tokens, low.width(logits), node.attrs["choices"], bias=bool(bias), **attrs)
    args = {"logits": low.arg(logits), "ids": low.output(ids), "weights": low.output(weights)}
    if bias:
        args["bias"] = low.arg(bias[0])
    low.request(node, low.candidates(problem, experts_tactics.routing), args, {ids: "ids", weights: "weights"})


def emit_expert_linear(low: GpuLowering, node: Node) -> None:
    x, ids, w, *bias = node.values
    problem = _problem(low, node)
    found = low.candidates(problem, linear_tactics.candidates)
    if problem.quantizes and not found.legal:
        problem = replace(problem, quantizes=False, token_scales=True, x_stride=0)
        found = low.candidates(problem, linear_tactics.candidates)
    apart = problem.gated and not found.legal
    if apart:
        plain = replace(problem, n=2 * problem.n, gated="", y_type="")
        found = low.candidates(plain, linear_tactics.candidates)
    _, args = low.matrix(w, node.attrs["scheme"])
    args |= _by_expert(low, node, ids)
    form = GPU_SCHEMES[node.attrs["scheme"]].quantized
    args |= quantized(low, node, x, form) if problem.token_scales else {"x": low.arg(x)}
    if bias:
        args["bias"] = low.arg(bias[0])
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
    x, weights, *residual = node.values
    _, choices, d = low.type(x).shape
    _tokens_alone(low, node, weights)
    problem = experts_tactics.Sum(low.tokens, int(d), int(choices), low.stored[x], low.stored[node.output],
                                  low.stored[residual[0]] if residual else "")
    args = {"x": low.arg(x), "weights": low.arg(weights)}
    out = None
    if residual:
        args["residual"] = low.arg(residual[0])
        if low.stored[residual[0]] == low.stored[node.output]:
            out = low.in_place(node.output, residual[0], beside=[x, weights])
    args["y"] = out or low.output(node.output)
    low.request(node, low.candidates(problem, experts_tactics.summing), args, {node.output: "y"})


def _problem(low: GpuLowering, node: Node) -> linear_tactics.Problem:
    x, ids, w, *bias = node.values
    _tokens_alone(low, node, ids)
    scheme = low.scheme(node)
    experts, n, k = (int(dim) for dim in low.type(w).shape)
    gated, stored = node.attrs.get("gated", ""), low.stored[node.output]
    quantizes = bool(scheme.quantized) and low.few
    return linear_tactics.Problem(
        low.tokens, n // 2 if gated else n, k, scheme.format, scheme.activation, low.floats, quantizes=quantizes,
        token_scales=bool(scheme.quantized) and not quantizes, scale=scheme.format == "nvfp4", bias=bool(bias),
        gated=gated, y_type="" if stored == low.floats else stored, experts=experts, choices=low.width(ids),
        shared=len(low.type(x).shape) == 2)


def _by_expert(low: GpuLowering, node: Node, ids: str) -> dict[str, Arg]:
    """The rows of all choices by their expert, sorted once for all matrices of a layer."""
    key = low.identity(ids), _BY_EXPERT
    if key not in low.quantized:
        experts, choices = int(low.type(node.values[2]).shape[0]), low.width(ids)
        low.quantized[key] = {"order": low.temporary(f"{ids}.order", 4 * low.tokens * choices),
                              "starts": low.temporary(f"{ids}.starts", 4 * (experts + 1))}
        problem = experts_tactics.Sorting(low.tokens, experts, choices)
        low.request(node, low.candidates(problem, experts_tactics.sorting), {"ids": low.arg(ids), **low.quantized[key]},
                    {}, op="sort_by_expert")
    return dict(low.quantized[key])


def _tokens_alone(low: GpuLowering, node: Node, value: str) -> None:
    if low.rows(value) != "T":
        raise CannotCompile(f"{node.op} of {low.type(value)}: its kernel takes a row for each token\n"
                            f"  in {node.origin}")
