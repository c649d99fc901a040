"""Raise products with a constant matrix to linear."""
from __future__ import annotations

from dataclasses import replace

from ..ir.graph import Graph, Node
from ..weights.expr import permute
from .match import Matcher, rewrite


def raise_linear(graph: Graph) -> Graph:
    """matmul(x, c[K, N]) -> linear(x, cᵀ);  add(linear(x, w), c[N]) -> linear(x, w, c)."""
    graph = _transpose_weights(graph)
    return rewrite(graph, _bias)


def _transpose_weights(graph: Graph) -> Graph:
    constants, types, nodes = dict(graph.constants), dict(graph.types), []
    for node in graph.nodes:
        weight = node.inputs[1] if node.op == "matmul" else None
        if isinstance(weight, str) and weight in constants and len(types[weight].shape) == 2:
            name = f"{weight}.T"
            constants[name] = permute(constants[weight], (1, 0))
            types[name] = replace(types[weight], shape=types[weight].shape[::-1])
            node = Node("linear", (node.inputs[0], name), node.outputs, {}, node.origin)
        nodes.append(node)
    return graph.rebuilt(nodes, constants=constants, types=types)


def _bias(m: Matcher, node: Node) -> list[Node] | None:
    if node.op != "add":
        return None
    for bias, value in (node.inputs, node.inputs[::-1]):
        linear = m.node(value, "linear")
        if linear is not None and len(linear.inputs) == 2 and m.uses(linear.output) == 1 and m.is_constant(bias) \
                and m.type(bias).shape == m.type(value).shape[-1:]:
            return [replace(linear, inputs=(*linear.inputs, bias), outputs=node.outputs)]
    return None
