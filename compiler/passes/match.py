"""What rewriting passes need to look at a graph: producers, use counts, and a few predicates."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

from ..ir.graph import Graph, Node, Operand, through_reshapes
from ..ir.types import TensorType
from ..ir.verify import infer_types
from ..weights.expr import WeightExpr, literal_value


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

    def node(self, value: Operand | None, *ops: str) -> Node | None:
        """The node that makes the value, if it is one of these operators."""
        node = self._producers.get(value) if isinstance(value, str) else None
        return node if node is not None and (not ops or node.op in ops) else None

    @cached_property
    def _order(self) -> dict[str, int]:
        """Value -> its place among all that are made."""
        return {value: number for number, value in enumerate(self._producers)}

    def summand(self, node: Node, accepts: Callable[[Operand, Operand], bool]) -> tuple[str, Operand] | None:
        """Of an addition the value for which accepts(value, the other one), and the other one; None if there is none.

        Of two the one that is made later: the other is there when it is.
        """
        found = [(value, other) for value, other in (node.inputs, node.inputs[::-1])
                 if isinstance(value, str) and accepts(value, other)] if node.op == "add" else []
        return max(found, key=lambda pair: self._order[pair[0]], default=None)

    def type(self, value: Operand) -> TensorType:
        return self.graph.types[value] if isinstance(value, str) else TensorType(())

    def uses(self, value: str) -> int:
        """How often nodes and graph outputs read it."""
        return self._uses.get(value, 0)

    def is_constant(self, value: Operand) -> bool:
        return isinstance(value, str) and value in self.graph.constants

    def number(self, value: Operand) -> float | None:
        """A literal, or a constant of one element that the model computed from its configuration."""
        if not isinstance(value, str):
            return float(value)
        expr = self.graph.constants.get(value)
        if expr is None or expr.op != "literal" or math.prod(expr.shape) != 1:
            return None
        return float(literal_value(expr).reshape(-1)[0])

    def is_row(self, value: Operand, like: Operand) -> bool:
        """Whether the value is a constant [D] or [1, .., 1, D], with the D of `like` [.., D]."""
        shape, whole = self.type(value).shape, self.type(like).shape
        return self.is_constant(value) and len(shape) <= len(whole) and shape[-1:] == whole[-1:] \
            and all(dim == 1 for dim in shape[:-1])

    def as_row(self, value: Operand, node: Node) -> tuple[Operand, list[Node]]:
        """Such a constant as [D], and the nodes that make it so, for a rule that replaces `node`."""
        shape = self.type(value).shape
        if len(shape) == 1:
            return value, []
        name = f"{node.output}.row"
        return name, [Node("reshape", (value,), (name,), {"shape": shape[-1:]}, node.origin)]

    def through_reshapes(self, value: Operand) -> Operand:
        """What the value is a reshape of: the same elements in the same order."""
        return through_reshapes(value, self._producers) if isinstance(value, str) else value

    def split(self, node: Node, test: Callable[[Operand], bool]) -> tuple[Operand, Operand] | None:
        """For a binary node: (the operand that passes the test, the other), whichever side it stands on."""
        first, second = node.inputs
        if test(second):
            return second, first
        return (first, second) if test(first) else None


Rule = Callable[[Matcher, Node], Sequence[Node] | None]


def rewrite(graph: Graph, rule: Rule) -> Graph:
    """One walk over the nodes in order: `rule` returns the nodes that take a node's place, or None to keep it.

    A replacement keeps the names of the outputs that others read; rules look at the graph as it was before the walk.
    """
    matcher = Matcher(graph)
    nodes: list[Node] = []
    for node in graph.nodes:
        replacement = rule(matcher, node)
        nodes.extend([node] if replacement is None else replacement)
    return eliminate_dead_code(rebuilt(graph, nodes))


def rebuilt(graph: Graph, nodes: Iterable[Node], *, constants: Mapping[str, WeightExpr] | None = None,
            inputs: Mapping[str, TensorType] | None = None, outputs: Sequence[str] | None = None,
            probes: Mapping[str, str] | None = None) -> Graph:
    """The graph with other nodes. The types of new values are inferred. constants, inputs: those that are added."""
    nodes = tuple(nodes)
    types = {**graph.types, **(inputs or {}), **{name: expr.type for name, expr in (constants or {}).items()}}
    for node in nodes:
        if any(name not in types for name in node.outputs):
            types.update(zip(node.outputs, infer_types(node, types), strict=True))
    return graph.rebuilt(nodes, types=types, constants=constants, outputs=outputs, probes=probes,
                         inputs=[*graph.inputs, *(inputs or {})])


def eliminate_dead_code(graph: Graph) -> Graph:
    """Drop the nodes whose outputs nobody reads."""
    live = set(graph.outputs)
    kept = []
    for node in reversed(graph.nodes):
        if live.intersection(node.outputs):
            live.update(node.values)
            kept.append(node)
    return graph.rebuilt(reversed(kept))
