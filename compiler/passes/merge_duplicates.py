"""Common subexpression elimination: what is computed twice from the same values is computed once."""
from __future__ import annotations

from ..ir.graph import Graph, Node, Operand, Renamer
from .match import eliminate_dead_code

Key = tuple[str, tuple[tuple[str, Operand], ...], tuple[tuple[str, object], ...]]


def merge_duplicates(graph: Graph) -> Graph:
    """Nodes of the same operator, inputs and attributes become the first of them.

    The rotary factors of all layers, and the reshapes that passes put around what they raise.
    """
    renames, nodes = Renamer(), []
    first: dict[Key, Node] = {}
    for original in graph.nodes:
        node = renames.node(original)
        key = _key(node)
        if key in first:
            for old, new in zip(node.outputs, first[key].outputs, strict=True):
                renames.set(old, new)
            continue
        first[key] = node
        nodes.append(node)
    return eliminate_dead_code(graph.rebuilt(
        nodes, outputs=[renames.name(name) for name in graph.outputs],
        probes={label: renames.name(value) for label, value in graph.probes.items()}))


def _key(node: Node) -> Key:
    # 1, 1.0 and True are equal to Python and different to an operator.
    inputs = tuple((type(operand).__name__, operand) for operand in node.inputs)
    return node.op, inputs, tuple(sorted(node.attrs.items()))
