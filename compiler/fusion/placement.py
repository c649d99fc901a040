"""Which values of a graph are in memory, and which are computed where they are read."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..ir.graph import Graph, Node, through_reshapes
from ..ir.registry import OPS
from ..ir.types import Dim, TensorType, product, split_dim

AcceptsStrided = Callable[[Node, int, TensorType], bool]
"""Whether a structured operator takes its operand of that number as a column range of wider rows."""

INDIRECT = ("gather", "take", "gather_rows")
"""Structured operators that loops compute all the same: a load whose index is loaded."""

_COSTLY = {"exp", "expm1", "log", "log1p", "sin", "cos", "tanh", "erf", "sigmoid", "silu", "gelu", "softplus", "pow",
           "rsqrt", "sqrt", "div", "reciprocal", "mod", "floor_div"}
_COSTLY_COST = 8
MAX_REPEATED_COST = 6
"""A value that several loops need is computed in each of them, if that takes no more operations an element. Within one
loop, for all that share it (the heads of a token), unless a costly operator takes part."""
MAX_EXPRESSION = 200
"""Operations of one expression; longer chains are cut, so that generated code stays of readable and compilable size."""
_TYPICAL_EXTENT = 64
"""What estimates take a symbolic extent for."""


@dataclass
class Placement:
    """in_memory   values that a launch computes into memory of their own, inputs and constants
    kept_views  views that stay nodes: other names for memory that is there
    """

    in_memory: set[str] = field(default_factory=set)
    kept_views: set[str] = field(default_factory=set)


def is_fused(node: Node) -> bool:
    """Whether the node becomes part of a loop, or stays as a view."""
    return OPS[node.op].kind != "structured" or node.op in INDIRECT


def place_values(graph: Graph, accepts_strided: AcceptsStrided, multiple: int = 1) -> Placement:
    """In memory are: what structured operators read and write, outputs, probes, reductions; and what is dear to
    compute and needed often. multiple: elements that column ranges and their rows begin at multiples of."""
    forced = _Required(graph, accepts_strided, multiple).placement
    # What one loop alone needs is computed there, however often it reads it. Which loops there are depends on what is
    # in memory: the second round sees those of the first.
    placement = forced
    for _ in range(2):
        placement = _with_dear_values(graph, forced, _evaluations(graph, placement))
    return placement


class _Required:
    """What has to be in memory whatever it costs."""

    def __init__(self, graph: Graph, accepts_strided: AcceptsStrided, multiple: int = 1) -> None:
        self.graph = graph
        self.accepts_strided = accepts_strided
        self.multiple = multiple
        self.producers = graph.producers()
        self.consumers = graph.consumers()
        self.placement = Placement({*graph.inputs, *graph.constants})
        memory, views = self.placement.in_memory, self.placement.kept_views
        for node in graph.nodes:
            if not is_fused(node) or OPS[node.op].kind == "reduce":
                memory.update(node.outputs)
        for value in graph.probes.values():
            memory.add(through_reshapes(value, self.producers))
        for node in graph.nodes:
            if not is_fused(node):
                for number, operand in enumerate(node.inputs):
                    if isinstance(operand, str):
                        self._require(operand, node, number)
        for value in graph.outputs:
            self._require(value, None, 0)
        # A slice that one reader takes in place and another does not is computed for both.
        views -= memory

    def _require(self, value: str, reader: Node | None, operand: int) -> None:
        """Make sure that a reader finds the value in memory, or as a view of what is there."""
        in_place = reader is not None and self.accepts_strided(reader, operand, self.graph.types[value])
        chain, source = [], value  # the views from the value down to the source
        while source not in self.placement.in_memory:
            node = self.producers[source]
            if node.op != "reshape" and not (in_place and self._is_column_range(node)):
                break
            chain.append(node)
            source = node.values[0]
        slices = [number for number, node in enumerate(chain) if node.op == "slice"]
        # Where something has to be computed anyway, the slice is, unless others need its source too.
        computed = source not in self.placement.in_memory and len(self.consumers[source]) == 1
        if slices and (computed or not self._rows_stay(chain)):
            source = chain[slices[0]].output
            chain = chain[:slices[0]]
        self.placement.in_memory.add(source)
        self.placement.kept_views.update(node.output for node in chain)

    def _is_column_range(self, node: Node) -> bool:
        if node.op != "slice" or node.attrs["step"] != 1:
            return False
        axis, shape = node.attrs["dim"], self.graph.types[node.values[0]].shape
        inner = product(shape[axis + 1:])
        aligned = self.multiple == 1 or all(
            isinstance(extent, int) and isinstance(inner, int) and extent * inner % self.multiple == 0
            for extent in (node.attrs["start"], shape[axis]))
        return aligned and sum(dim != 1 for dim in shape[:axis]) == 1

    def _rows_stay(self, chain: Sequence[Node]) -> bool:
        """Whether the reshapes of a chain with a slice leave the dimension of rows alone."""
        rows = {next((dim for dim in self.graph.types[name].shape if dim != 1), 1)
                for node in chain for name in (node.output, node.values[0])}
        return len(rows) == 1


def _evaluations(graph: Graph, placement: Placement) -> dict[str, dict[str, float]]:
    """Value -> {value in memory whose loop reads it: how many elements of it that loop reads}."""
    found: dict[str, dict[str, float]] = {}
    for node in reversed(graph.nodes):
        if not is_fused(node) or node.output in placement.kept_views:
            continue
        shape = graph.types[node.output].shape
        loops = found.get(node.output, {})
        if node.output in placement.in_memory:
            computed = graph.types[node.values[0]].shape if OPS[node.op].kind == "reduce" else shape
            loops = {node.output: _elements(computed)}
        for operand in node.values:
            read = graph.types[operand].shape
            share = 1.0
            if node.op == "cat":
                share = _elements(read) / _elements(shape)
            elif OPS[node.op].kind == "elementwise" or node.op == "expand":
                # What does not change along the innermost dimension is computed once for it.
                share = 1 / _elements(shape[-1:]) if read[-1:] in ((), (1,)) else 1.0
            known = found.setdefault(operand, {})
            for root, number in loops.items():
                known[root] = max(known.get(root, 0.0), number * share)
    return found


def _with_dear_values(graph: Graph, forced: Placement, evaluations: dict[str, dict[str, float]]) -> Placement:
    memory = set(forced.in_memory)
    costs: dict[str, tuple[float, int]] = {}  # operations an element, operations of the expression
    for node in graph.nodes:
        if not is_fused(node) or node.output in memory:
            continue
        parts = [costs.get(value, (0.0, 0)) for value in node.values]
        own = _own_cost(node)
        cost, size = own + sum(c for c, _ in parts), 1 + sum(s for _, s in parts)
        elements = _elements(graph.types[node.output].shape)
        reads = [number / elements for number in evaluations.get(node.output, {}).values()]
        repeats = sum(reads if cost >= _COSTLY_COST else [min(number, 1.0) for number in reads]) - 1
        if (own and cost * repeats > MAX_REPEATED_COST) or size > MAX_EXPRESSION:
            memory.add(node.output)
            cost, size = 0.0, 0
        costs[node.output] = cost, size
    return Placement(memory, set(forced.kept_views))


def _own_cost(node: Node) -> int:
    if OPS[node.op].kind == "view":
        return 0
    by_number = node.op in ("div", "mod", "floor_div") and not isinstance(node.inputs[1], str)
    return _COSTLY_COST if node.op in _COSTLY and not by_number else 1


def _elements(shape: tuple[Dim, ...]) -> float:
    total = 1.0
    for dim in shape:
        factor, symbol = split_dim(dim)
        total *= factor * (_TYPICAL_EXTENT if symbol else 1)
    return max(total, 1.0)
