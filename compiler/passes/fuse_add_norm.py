"""Fuse the residual addition into the norm that follows it."""
from __future__ import annotations

from ..ir.graph import Graph, Node
from .match import Matcher


def fuse_add_norm(graph: Graph) -> Graph:
    """norm(add(x, r), …) -> (y, s) = add_norm(x, r, …) for rms_norm and layer_norm.

    s = x + r stays an output: it is the next block's residual. Saves one [T, D] read and one launch.
    Where several norms read the sum, the first takes it in.
    """
    m = Matcher(graph)
    fused: dict[str, Node] = {}  # output of the add -> the node that now makes it
    norm_of: dict[str, Node] = {}
    for node in graph.nodes:
        if node.op in ("rms_norm", "layer_norm") and (add := m.node(node.inputs[0], "add")):
            same_shape = all(isinstance(i, str) and m.type(i).shape == m.type(add.output).shape for i in add.inputs)
            if same_shape and add.output not in norm_of and not _reads_between(graph, add, node):
                norm_of[add.output] = node
                fused[node.output] = Node(f"add_{node.op}", (*add.inputs, *node.inputs[1:]),
                                          (node.output, add.output), node.attrs, node.origin)
    nodes = []
    for node in graph.nodes:
        if node.op == "add" and node.output in norm_of:
            continue
        nodes.append(fused.get(node.outputs[0], node))
    return graph.rebuilt(nodes)


def _reads_between(graph: Graph, add: Node, norm: Node) -> bool:
    """Whether a node between the two reads the sum: the sum is made only where the norm stands."""
    start, stop = graph.nodes.index(add), graph.nodes.index(norm)
    return any(add.output in node.values for node in graph.nodes[start + 1:stop])
