"""Merge linear layers that read the same input: q/k/v, gate/up."""
from __future__ import annotations

import numpy as np

from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES

from ..ir.graph import Graph, Node
from ..weights.carried import carried
from ..weights.expr import WeightExpr, concat, literal
from .match import rebuilt
from .matrices import routers, shared_gates


def merge_linears(graph: Graph, routers_apart: bool = False) -> Graph:
    """linear(x, a), linear(x, b), … -> slices of linear(x, concat(a, b, …)).

    Only layers of the same precision merge, and of a quantized checkpoint only where that rounds nothing. One launch
    and one quantization of x instead of several; the slices are views that the following kernels read in place.
    routers_apart: what experts are chosen by, or a shared expert is weighed by, stays a matrix of its own, which a
    launch computes with the choice.
    """
    groups: dict[tuple[str, str], list[Node]] = {}
    apart = routers(graph) | shared_gates(graph) if routers_apart else set()
    for node in graph.nodes:
        if node.op == "linear" and node.output not in apart and all(
                value in graph.constants for value in node.values[1:]):
            groups.setdefault((node.values[0], node.attrs.get("scheme", "")), []).append(node)
    merged: dict[str, list[Node]] = {}  # output of the first member -> nodes that take its place
    gone: set[str] = set()
    constants: dict[str, WeightExpr] = {}
    for (_, scheme), members in groups.items():
        if len(members) < 2 or _rounds_together([graph.constants[node.values[1]] for node in members], scheme):
            continue
        merged[members[0].output] = _merge(graph, members, constants)
        gone.update(node.output for node in members[1:])
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.outputs[0] in merged:
            nodes.extend(merged[node.outputs[0]])
        elif node.outputs[0] not in gone:
            nodes.append(node)
    return rebuilt(graph, nodes, constants=constants)


def _rounds_together(weights: list[WeightExpr], scheme: str) -> bool:
    """Whether weights that the checkpoint holds as the scheme does would have to be rounded to lie in one matrix."""
    if scheme not in GPU_SCHEMES:
        return False
    form = GPU_SCHEMES[scheme].format
    return any(carried(weight, form) for weight in weights) and carried(concat(weights, 0), form) is None


def _merge(graph: Graph, members: list[Node], constants: dict[str, WeightExpr]) -> list[Node]:
    """The nodes that replace the members; `constants` gains the merged matrix and bias."""
    first = members[0]
    stem = "+".join(node.values[1] for node in members)
    widths = [int(graph.types[node.output].shape[-1]) for node in members]
    inputs = [first.values[0], stem]
    constants[stem] = concat([graph.constants[node.values[1]] for node in members], 0)
    if any(len(node.values) > 2 for node in members):
        bias = f"{stem}.bias"
        constants[bias] = concat([
            graph.constants[node.values[2]] if len(node.values) > 2 else literal(np.zeros(width, np.float32))
            for node, width in zip(members, widths, strict=True)], 0)
        inputs.append(bias)
    shape = graph.types[first.output].shape
    output = "+".join(node.output for node in members)
    nodes = [Node("linear", tuple(inputs), (output,), first.attrs, first.origin)]
    start = 0
    for node, width in zip(members, widths, strict=True):
        attrs = {"dim": len(shape) - 1, "start": start, "stop": start + width, "step": 1}
        nodes.append(Node("slice", (output,), (node.output,), attrs, node.origin))
        start += width
    return nodes
