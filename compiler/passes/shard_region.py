"""The part of a graph that is divided among ranks: grown from one value to all that must be divided with it."""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ingot.runtime.errors import RequestError

from ..ir.graph import Graph, Node
from ..ir.registry import OPS
from ..ir.types import Dim, TensorType, product, split_dim
from ..weights.sharding import Segment


class CannotShard(RequestError):
    """The model cannot be divided among so many ranks."""


@dataclass(frozen=True)
class Split:
    """A value of which each rank holds a part of one axis."""

    axis: int
    segments: tuple[Segment, ...]

    @property
    def extent(self) -> int:
        """Of the axis on one rank."""
        return sum(segment.part for segment in self.segments)

    def local_type(self, whole: TensorType) -> TensorType:
        return TensorType((*whole.shape[:self.axis], self.extent, *whole.shape[self.axis + 1:]), whole.dtype)


@dataclass(frozen=True)
class WeightAxes:
    """Of a matrix product's constant: its operand number, and the axes of its output and input channels; bias: the
    output channels' axis in the next operand."""

    position: int
    rows: int
    columns: int
    bias: int


def weight_axes(node: Node, graph: Graph) -> WeightAxes | None:
    """None if the node is no product with constants."""
    axes = {"linear": WeightAxes(1, 0, 1, 0), "expert_linear": WeightAxes(2, 1, 2, 1)}.get(node.op)
    if axes is None or any(value not in graph.constants for value in node.inputs[axes.position:]):
        return None
    return axes


def column_split(whole: TensorType, num_ranks: int) -> Split:
    """The last axis in equal parts."""
    return Split(len(whole.shape) - 1, (Segment(int(whole.shape[-1]), num_ranks),))


@dataclass
class Region:
    """splits  value -> how it is divided
    kinds   output of a matrix product or an attention that is divided -> "column" (each rank makes a part), "row" (each
            rank sums a part, the result is to be summed over ranks), "heads"
    """

    graph: Graph
    num_ranks: int
    producers: Mapping[str, Node]
    consumers: Mapping[str, list[Node]]
    splits: dict[str, Split] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    _todo: list[str] = field(default_factory=list)
    _pieces: dict[str, dict[tuple[int, int], tuple[Segment, ...]]] = field(default_factory=dict)

    @classmethod
    def empty(cls, graph: Graph, num_ranks: int) -> Region:
        return cls(graph, num_ranks, graph.producers(), graph.consumers())

    def copy(self) -> Region:
        return replace(self, splits=dict(self.splits), kinds=dict(self.kinds), _todo=[], _pieces={})

    def grow(self, value: str, split: Split) -> None:
        """Divide a value, and with it all that has to be. Raises CannotShard with the operator in the way."""
        self._assign(value, split)
        while self._todo:
            value = self._todo.pop()
            for node in (self.producers[value], *self.consumers[value]):
                self._visit(node)
        if self._pieces:
            raise CannotShard(f"{next(iter(self._pieces))} is divided only in part")

    def constant_split(self, node: Node, position: int) -> Split | None:
        """How the constant in this place is divided."""
        axes = weight_axes(node, self.graph)
        if axes is not None and position >= axes.position:
            kind = self.kinds.get(node.output)
            if kind == "column":
                return Split(axes.rows if position == axes.position else axes.bias, self.splits[node.output].segments)
            if kind == "row" and position == axes.position:
                return Split(axes.columns, self.splits[node.values[0]].segments)
            return None
        if node.op == "attention":
            return Split(0, self.splits[node.output].segments) if node.output in self.kinds else None
        if OPS[node.op].kind == "elementwise" and node.output in self.splits:
            return _operand_split(self.splits[node.output], self.graph.types[node.output],
                                  self.graph.types[str(node.inputs[position])])
        return None

    def local_attrs(self, node: Node) -> Mapping[str, Any]:
        """The node's attributes for one rank's sizes."""
        split = self.splits.get(node.outputs[0])
        if split is None:
            return node.attrs
        if node.op in ("reshape", "expand"):
            return {**node.attrs, "shape": split.local_type(self.graph.types[node.output]).shape}
        source = self.splits.get(node.values[0]) if node.values else None
        if node.op == "slice" and source is not None and node.attrs["dim"] == source.axis:
            if node.attrs.get("step", 1) > 1:
                return {**node.attrs, "stop": source.extent}
            at = start = 0
            for segment in source.segments:
                if at == node.attrs["start"]:
                    break
                at, start = at + segment.size, start + segment.part
            return {**node.attrs, "start": start, "stop": start + split.extent}
        return node.attrs

    # --- growing ---

    def _assign(self, value: str, split: Split) -> None:
        if value in self.splits:
            if self.splits[value] != split:
                raise CannotShard(f"{value} would have to be divided in two ways")
            return
        if value in self.graph.inputs or value in self.graph.outputs or value in self.graph.constants \
                or value in self.graph.probes.values():
            raise CannotShard(f"{value} is needed whole")
        extent = self.graph.types[value].shape[split.axis]
        if extent != sum(segment.size for segment in split.segments) or any(
                segment.size % segment.ways for segment in split.segments):
            raise CannotShard(f"{extent} channels or heads of {value} cannot be divided in {self.num_ranks} equal "
                              "parts")
        self.splits[value] = split
        self._todo.append(value)

    def _visit(self, node: Node) -> None:
        """What the divided values of a node ask of its others."""
        rule = _RULES.get(node.op)
        if rule is None and OPS[node.op].kind == "elementwise":
            rule = Region._elementwise
        if rule is None:
            raise CannotShard(f"{node.op} takes its operands whole")
        rule(self, node)

    def _elementwise(self, node: Node) -> None:
        whole = self.graph.types[node.output]
        for value in (node.output, *node.values):
            if value in self.splits:
                split, rank = self.splits[value], len(self.graph.types[value].shape)
                split = Split(split.axis + len(whole.shape) - rank, split.segments)
                break
        self._assign(node.output, split)
        for value in node.values:
            if value not in self.graph.constants and (
                    part := _operand_split(split, whole, self.graph.types[value])) is not None:
                self._assign(value, part)

    def _reshape(self, node: Node) -> None:
        source, result = node.values[0], node.output
        if source in self.splits:
            self._assign(result, _reshaped(self.splits[source], self.graph.types[source], self.graph.types[result]))
        if result in self.splits:
            self._assign(source, _reshaped(self.splits[result], self.graph.types[result], self.graph.types[source]))

    def _slice(self, node: Node) -> None:
        source, result, axis, step = node.values[0], node.output, node.attrs["dim"], node.attrs.get("step", 1)
        known = self.splits.get(result) or self.splits[source]
        if known.axis != axis:
            self._assign(source, known)
            self._assign(result, known)
        elif step > 1:
            self._every_nth(node, axis, step)
        elif source in self.splits:
            self._assign(result, Split(axis, _between(self.splits[source].segments, node.attrs["start"],
                                                      node.attrs["stop"])))
        else:
            self._piece(source, axis, (node.attrs["start"], node.attrs["stop"]), self.splits[result].segments)

    def _every_nth(self, node: Node, axis: int, step: int) -> None:
        """Every n-th channel of the whole axis, such as interleaved gates."""
        source, result = node.values[0], node.output
        size = int(self.graph.types[source].shape[axis])
        if node.attrs["stop"] != size or size % step or node.attrs["start"] >= step:
            raise CannotShard(f"a slice {node.attrs['start']}:{node.attrs['stop']}:{step} of {size} channels")
        if result in self.splits:
            wide = tuple(Segment(segment.size * step, segment.ways) for segment in self.splits[result].segments)
            self._assign(source, Split(axis, wide))
        narrow = tuple(Segment(segment.size // step, segment.ways) for segment in self.splits[source].segments)
        self._assign(result, Split(axis, narrow))

    def _piece(self, source: str, axis: int, place: tuple[int, int], segments: tuple[Segment, ...]) -> None:
        """A part of an axis is to be divided; the axis is when all its parts are. Reshapes may stand before."""
        tail = self.graph.types[source].shape[axis:]
        while (made := self.producers[source]).op == "reshape" \
                and self.graph.types[made.values[0]].shape[-len(tail):] == tail:
            source = made.values[0]
        axis = len(self.graph.types[source].shape) - len(tail)
        pieces = self._pieces.setdefault(source, {})
        pieces[place] = segments
        at, joined = 0, list[Segment]()
        for (begin, end), found in sorted(pieces.items()):
            if begin != at:
                return
            at, joined = end, [*joined, *found]
        if at == self.graph.types[source].shape[axis]:
            del self._pieces[source]
            self._assign(source, Split(axis, tuple(joined)))

    def _same_axis(self, node: Node) -> None:
        """rope and norms: rows apart from each other; the last axis stays whole."""
        values = [node.output, node.values[0]]
        split = next(self.splits[value] for value in values if value in self.splits)
        if split.axis == len(self.graph.types[node.output].shape) - 1:
            raise CannotShard(f"{node.op} needs whole rows")
        if any(value in self.splits for value in node.values[1:]):
            raise CannotShard(f"{node.op} needs its parameters whole")
        for value in values:
            self._assign(value, split)

    def _attention(self, node: Node) -> None:
        q_heads = int(self.graph.types[node.output].shape[1])
        kv_heads = int(self.graph.types[node.values[1]].shape[1])
        group = q_heads // kv_heads
        ways = math.gcd(kv_heads, self.num_ranks)
        if kv_heads % self.num_ranks and (ways != kv_heads or group % (self.num_ranks // ways)):
            raise CannotShard(f"{kv_heads} heads of keys and values of {group} query heads each")
        for value in (node.output, node.values[0]):
            self._assign(value, Split(1, (Segment(q_heads, self.num_ranks),)))
        for value in node.values[1:3] if ways > 1 else ():
            self._assign(value, Split(1, (Segment(kv_heads, ways),)))
        self.kinds[node.output] = "heads"

    def _product(self, node: Node) -> None:
        axes = weight_axes(node, self.graph)
        if axes is None:
            raise CannotShard(f"{node.op} of values that are both computed")
        x, y = node.values[0], node.output
        last = len(self.graph.types[y].shape) - 1
        if x in self.splits:
            split = self.splits[x]
            if split.axis != len(self.graph.types[x].shape) - 1 or y in self.splits:
                raise CannotShard(f"{node.op} with rows that are divided")
            if any(segment.ways != self.num_ranks for segment in split.segments):
                raise CannotShard(f"{node.op} would sum channels that several ranks hold")
            self.kinds[y] = "row"
        elif self.splits[y].axis == last and not (node.op == "expert_linear" and node.values[1] in self.splits):
            self.kinds[y] = "column"
        else:
            raise CannotShard(f"{node.op} makes whole rows")


def _operand_split(split: Split, whole: TensorType, operand: TensorType) -> Split | None:
    """The same axis of an operand that is broadcast; None if it has no or one element there."""
    axis = split.axis - len(whole.shape) + len(operand.shape)
    return Split(axis, split.segments) if axis >= 0 and operand.shape[axis] != 1 else None


def _reshaped(split: Split, old: TensorType, new: TensorType) -> Split:
    """The axis of a reshape's other side that the same parts of memory make."""
    inner = _elements(old.shape[split.axis + 1:])
    outer = inner * int(old.shape[split.axis])
    for axis in reversed(range(len(new.shape))):
        new_inner = _elements(new.shape[axis + 1:])
        if split_dim(new.shape[axis])[1] is not None or new_inner * int(new.shape[axis]) > outer:
            break
        if new_inner * int(new.shape[axis]) == outer and int(new.shape[axis]) > 1:
            sizes = [segment.size * inner for segment in split.segments]
            if any(size % (new_inner * segment.ways) for size, segment in zip(sizes, split.segments, strict=True)):
                break
            return Split(axis, tuple(Segment(size // new_inner, segment.ways)
                                     for size, segment in zip(sizes, split.segments, strict=True)))
    raise CannotShard(f"a reshape from {old} to {new} mixes what ranks hold")


def _elements(dims: tuple[Dim, ...]) -> int:
    count = product(dims)
    if not isinstance(count, int):
        raise CannotShard(f"a division within the tokens of a step: {list(dims)}")
    return count


def _between(segments: tuple[Segment, ...], start: int, stop: int) -> tuple[Segment, ...]:
    """The segments that lie in [start, stop)."""
    at, found = 0, list[Segment]()
    for segment in segments:
        if start <= at and at + segment.size <= stop:
            found.append(segment)
        elif at < stop and start < at + segment.size:
            raise CannotShard(f"a slice {start}:{stop} cuts through what ranks hold")
        at += segment.size
    return tuple(found)


_RULES = {
    "reshape": Region._reshape, "slice": Region._slice, "rope": Region._same_axis, "rms_norm": Region._same_axis,
    "layer_norm": Region._same_axis, "attention": Region._attention, "linear": Region._product,
    "expert_linear": Region._product,
}
