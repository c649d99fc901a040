"""What rewriting passes need to look at a graph: producers, use counts, and a few predicates."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from ..ir.graph import Graph, Node, Operand, Renamer
from ..ir.types import TensorType


class Matcher:
    """Read-only view of a graph for pattern matching, made once at the start of a pass."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._producers = graph.producers()
        self._uses: dict[str, int] = {}
        for node in graph.nodes:
            for value in node.values:
                self._uses[value] = self._uses.get(value, 0) + 1
        for value in graph.outputs:
            self._uses[value] = self._uses.get(value, 0) + 1

    def node(self, value: Operand, *ops: str) -> Node | None:
        """The node that makes the value, if it is one of these operators."""
        node = self._producers.get(value) if isinstance(value, str) else None
        return node if node is not None and (not ops or node.op in ops) else None

    def type(self, value: Operand) -> TensorType:
        return self.graph.types[value] if isinstance(value, str) else TensorType(())

    def uses(self, value: str) -> int:
        """How often nodes and graph outputs read it."""
        return self._uses.get(value, 0)

    def is_constant(self, value: Operand) -> bool:
        return isinstance(value, str) and value in self.graph.constants

    def split(self, node: Node, test: Callable[[Operand], bool]) -> tuple[Operand, Operand] | None:
        """For a binary node: (the operand that passes the test, the other), whichever side it stands on."""
        first, second = node.inputs
        if test(second):
            return second, first
        return (first, second) if test(first) else None


def rewrite(graph: Graph, rule: Callable[[Matcher, Node], Iterable[Node] | None]) -> Graph:
    """One walk over the nodes in order: `rule` returns the nodes that take a node's place, or None to keep it.

    A replacement keeps the names of the outputs that others read; rules look at the graph as it was before the walk.
    New values carry their types in the replacing node's attrs under "_types" (see `typed`).
    """
    matcher = Matcher(graph)
    nodes: list[Node] = []
    types: dict[str, TensorType] = {}
    for node in graph.nodes:
        replacement = rule(matcher, node)
        for new in [node] if replacement is None else replacement:
            new_types = new.attrs.get("_types")
            if new_types:
                types.update(new_types)
                new = replace(new, attrs={k: v for k, v in new.attrs.items() if k != "_types"})
            nodes.append(new)
    return eliminate_dead_code(graph.rebuilt(nodes, types=types))


def typed(node: Node, **types: TensorType) -> Node:
    """The node, with the types of values that it introduces."""
    return node.with_attrs(_types=types)


def substitute(graph: Graph, renames: Renamer) -> Graph:
    """The graph with every use of a renamed value replaced; definitions stay until dead code goes."""
    probes = {label: renames.name(value) for label, value in graph.probes.items()}
    outputs = [renames.name(value) for value in graph.outputs]
    return graph.rebuilt([renames.node(node) for node in graph.nodes], outputs=outputs, probes=probes)


def eliminate_dead_code(graph: Graph) -> Graph:
    """Drop the nodes whose outputs nobody reads."""
    live = set(graph.outputs)
    kept = []
    for node in reversed(graph.nodes):
        if live.intersection(node.outputs):
            live.update(node.values)
            kept.append(node)
    return graph.rebuilt(reversed(kept))
