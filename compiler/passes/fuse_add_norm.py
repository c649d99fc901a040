"""Fuse the residual addition into the norm that follows it."""
from __future__ import annotations

from ..ir.graph import Graph, Node
from .match import Matcher


def fuse_add_norm(graph: Graph) -> Graph:
    """norm(add(x, r), …) -> (y, s) = add_norm(x, r, …) for rms_norm and layer_norm.

    s = x + r stays an output: it is the next block's residual. Saves one [T, D] read and one launch. The norm must be
    the first to read the sum, which is made only where the norm stands.
    """
    m = Matcher(graph)
    first_reader: dict[str, Node] = {}
    for node in graph.nodes:
        for value in node.values:
            first_reader.setdefault(value, node)
    fused: dict[str, Node] = {}  # output of the norm -> the node that makes the sum too
    sums: set[str] = set()
    for node in graph.nodes:
        add = m.node(node.inputs[0], "add") if node.op in ("rms_norm", "layer_norm") else None
        if add is not None and first_reader[add.output] is node \
                and all(m.type(operand).shape == m.type(add.output).shape for operand in add.inputs):
            sums.add(add.output)
            fused[node.output] = Node(f"add_{node.op}", (*add.inputs, *node.inputs[1:]), (node.output, add.output),
                                      node.attrs, node.origin)
    return graph.rebuilt(fused.get(node.outputs[0], node) for node in graph.nodes if node.outputs[0] not in sums)
