"""A constant factor of the embedding becomes a part of it."""
from __future__ import annotations

from ..ir.graph import Graph, Node
from .match import Matcher, rewrite


def scale_embedding(graph: Graph) -> Graph:
    """mul(embedding(w, ids), number) -> embedding(w, ids; factor=number)."""
    return rewrite(graph, _scaled)


def _scaled(m: Matcher, node: Node) -> list[Node] | None:
    found = m.split(node, lambda operand: m.number(operand) is not None) if node.op == "mul" else None
    embedding = m.node(found[1], "embedding") if found else None
    if found is None or embedding is None or m.uses(embedding.output) != 1 or "scheme" not in embedding.attrs:
        return None
    factor = m.number(found[0])
    return [Node("embedding", embedding.inputs, node.outputs, {**embedding.attrs, "factor": factor}, node.origin)]
