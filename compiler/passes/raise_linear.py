"""Raise products with a constant matrix to linear."""
from __future__ import annotations

from dataclasses import replace

from ..ir.graph import Graph, Node
from ..weights.expr import permute
from .match import Matcher, rebuilt, rewrite


def raise_linear(graph: Graph) -> Graph:
    """matmul(x, c[K, N]) -> linear(x, cᵀ);  add(linear(x, w), c[N]) -> linear(x, w, c)."""
    graph = _transpose_weights(graph)
    return rewrite(graph, _bias)


def _transpose_weights(graph: Graph) -> Graph:
    transposed, nodes = {}, []
    for node in graph.nodes:
        weight = node.inputs[1] if node.op == "matmul" else None
        if isinstance(weight, str) and weight in graph.constants and len(graph.types[weight].shape) == 2:
            transposed[f"{weight}.T"] = permute(graph.constants[weight], (1, 0))
            node = Node("linear", (node.inputs[0], f"{weight}.T"), node.outputs, {}, node.origin)
        nodes.append(node)
    return rebuilt(graph, nodes, constants=transposed)


def _bias(m: Matcher, node: Node) -> list[Node] | None:
    if node.op != "add":
        return None
    for bias, value in (node.inputs, node.inputs[::-1]):
        linear = m.node(value, "linear")
        if linear is not None and len(linear.inputs) == 2 and m.uses(linear.output) == 1 and m.is_row(bias, value):
            row, nodes = m.as_row(bias, node)
            return [*nodes, replace(linear, inputs=(*linear.inputs, row), outputs=node.outputs)]
    return None
