"""Fuse the norm behind a block, the block's residual, and the norm before the next block."""
from __future__ import annotations

from dataclasses import replace

from ..ir.graph import Graph, Node
from .match import Matcher


def fuse_norm_add(graph: Graph) -> Graph:
    """s = add(r, rms_norm(x, v)); y = rms_norm(s, w)  ->  y, s = norm_add_norm(x, r, v, w).

    Without a norm that is the first to read the sum, of the same eps: s = norm_add(x, r, v).
    """
    m = Matcher(graph)
    first_reader: dict[str, Node] = {}
    for node in graph.nodes:
        for value in node.values:
            first_reader.setdefault(value, node)
    fused: dict[str, Node] = {}  # output of the add, or of the norm behind it -> the node that takes its place
    gone: set[str] = set()
    for node in graph.nodes:
        norm = _added_norm(m, node)
        if norm is None:
            continue
        x, x_weight = norm.inputs
        residual = next(value for value in node.inputs if value != norm.output)
        gone.add(norm.output)
        inputs, attrs = (x, residual, x_weight), {"eps": norm.attrs["eps"]}
        reader = first_reader.get(node.output)
        if reader is not None and reader.op == "rms_norm" and reader.inputs[0] == node.output \
                and len(reader.inputs) == 2 and reader.attrs == attrs:
            gone.add(node.output)
            fused[reader.output] = Node("norm_add_norm", (*inputs, reader.inputs[1]), (reader.output, node.output),
                                        attrs, reader.origin)
        else:
            fused[node.output] = replace(node, op="norm_add", inputs=inputs, attrs=attrs)
    return graph.rebuilt(fused.get(node.outputs[0], node) for node in graph.nodes if node.outputs[0] not in gone)


def _added_norm(m: Matcher, node: Node) -> Node | None:
    """The weighted norm that an addition adds to another value of the same shape, and nothing else reads."""
    if node.op != "add" or node.inputs[0] == node.inputs[1] or not all(
            isinstance(value, str) and not m.is_constant(value) and m.type(value).shape == m.type(node.output).shape
            for value in node.inputs):
        return None
    for value in node.inputs:
        norm = m.node(value, "rms_norm")
        if norm is not None and len(norm.inputs) == 2 and m.uses(norm.output) == 1:
            return norm
    return None
