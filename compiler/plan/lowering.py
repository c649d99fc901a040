"""What lowering to launches has in common for all targets: every value of the graph placed in memory.

Views take no launch: a reshape is another name for the same memory, a slice of the last dimension is a column range
that kernels read in place by its row stride.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import CannotCompile
from ..ir.graph import Graph, Node
from ..ir.ops_lora import SLOTS
from ..ir.types import Dim, TensorType, concrete, extent, product, split_dim
from ..weights.packed import RAW, Packing, WeightTable
from .kv_cache import KvCache, KvSlot
from .memory import Arena, Life, plan_arena
from .plan import Arg, Output


@dataclass(frozen=True)
class Place:
    """Where a value lies: rows of contiguous elements in the memory that `arg` names.

    offset  of its first element from there, in elements
    stride  elements from one row to the next, where the value is a column range of wider rows; else None
    """

    arg: Arg
    offset: int = 0
    stride: int | None = None


@dataclass(kw_only=True)
class BaseLowering:
    """One token bucket on its way to launches. A target's own lowering says how a node is emitted.

    bindings     symbol -> its number in the largest step of the bucket
    places       value -> where it lies, as far as launches have been made
    sizes        buffer -> bytes
    last_reader  buffer -> number of the last node that reads it
    """

    graph: Graph
    tokens: int
    bindings: Mapping[str, int]
    limits: Mapping[str, int]
    weights: WeightTable
    kv: KvCache
    places: dict[str, Place] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    last_reader: dict[str, int] = field(default_factory=dict)
    position: int = 0
    _deferred: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._users = self.graph.consumers()
        self._kv_slots = {slot.slot: slot for slot in self.kv.slots}

    def emit(self, node: Node) -> None:
        """Make the launches of a node that is no view. Raises CannotCompile."""
        raise NotImplementedError

    def emit_all(self) -> None:
        """Every node in order."""
        for number, node in enumerate(self.graph.nodes):
            self.last_reader.update({self.buffer(value): number for value in node.values})
            for name in node.outputs:
                self._alias(node, name)
        self.last_reader.update({self.buffer(name): len(self.graph.nodes) for name in self.graph.outputs})
        self.places = {}
        for number, node in enumerate(self.graph.nodes):
            self.position = number
            if not self._is_view(node):
                self.emit(node)
            for name in node.outputs:
                self._alias(node, name)

    def element_bytes(self, value: str) -> int:
        """Of an element of the value as it lies in memory."""
        return self.type(value).dtype.size_bytes

    # --- what emitters ask ---

    def type(self, value: str) -> TensorType:
        return self.graph.types[value]

    def rows(self, value: str) -> Dim:
        """The product of all dimensions but the last: "T", "L", "9*T"."""
        return product(self.type(value).shape[:-1])

    def width(self, value: str) -> int:
        return int(self.type(value).shape[-1])

    def place(self, value: str) -> Place:
        """The place of an input, a constant as it is, or a value that an earlier launch has made."""
        if value in self.graph.constants:
            return Place(self.weight(value, RAW))
        if value in self.graph.inputs:
            return Place(Arg("input", value))
        return self.places[value]

    def arg(self, value: str) -> Arg:
        """The pointer to a value's first element."""
        place = self.place(value)
        offset = place.offset * self.element_bytes(value)
        return Arg(place.arg.kind, place.arg.name, place.arg.offset + offset, place.arg.part)

    def rows_of_tokens(self, value: str) -> Dim:
        """How many elements of the value belong to one token, if it has some for each; else a symbol."""
        factor, symbol = split_dim(product(self.type(value).shape))
        return factor if symbol == "T" else product(self.type(value).shape)

    def stride(self, value: str) -> int:
        """Elements from one row (of the last dimension) to the next."""
        stride = self.place(value).stride
        assert stride is None or sum(dim != 1 for dim in self.type(value).shape) <= 2, (
            f"{value} {self.type(value)}: rows within rows that are {stride} elements apart")
        return stride or self.width(value)

    def token_stride(self, value: str) -> int:
        """Elements from one token to the next, for a value [T, …]."""
        inner = product(self.type(value).shape[1:])
        assert isinstance(inner, int)
        return self.place(value).stride or inner

    def row_group(self, value: str) -> tuple[int, int]:
        """(rows side by side, elements from one such group to the next): the heads of a token in wider rows."""
        stride = self.place(value).stride
        if stride is None:
            return 1, self.width(value)
        inner = product(tuple(dim for dim in self.type(value).shape if dim != 1)[1:])
        assert isinstance(inner, int)
        return inner // self.width(value), stride

    def count(self, rows: Dim) -> int:
        """The number of rows in the largest step of this bucket."""
        return extent(rows, dict(self.bindings))

    def weight(self, value: str, packing: Packing) -> Arg:
        return Arg("weight", self.weights.name(self.graph.constants[value], packing, value))

    def output(self, value: str) -> Arg:
        """Reserve arena memory for a value that the launch being made will write."""
        self.sizes[value] = self._bytes(value)
        self.places[value] = Place(Arg("value", value))
        return Arg("value", value)

    def in_place(self, value: str, source: str, beside: Sequence[str] = ()) -> Arg | None:
        """Let `value` take over the memory of `source` if nothing reads that any more, and it is as large.

        beside: what else the launch reads, in another order than it writes; it must lie elsewhere.
        """
        place = self.places.get(source)
        if place is None or place != Place(Arg("value", place.arg.name)) \
                or self.last_reader.get(place.arg.name, -1) > self.position \
                or any(self.buffer(other) == place.arg.name for other in beside) \
                or self.sizes.get(place.arg.name) != self._bytes(value):
            return None
        self.places[value] = place
        self.last_reader[place.arg.name] = max(self.last_reader[place.arg.name],
                                               self.last_reader.get(value, self.position))
        return place.arg

    def onto(self, node: Node) -> Arg:
        """Of lora_expand: the memory of its first operand, which becomes that of its result. It must be there, since a
        step without adapters leaves the launch out. Raises CannotCompile."""
        value, source = node.output, node.values[0]
        arg = self.in_place(value, source, beside=node.values[1:])
        if arg is None:
            raise CannotCompile(f"lora_expand onto {source}, which something else reads or is a part of\n"
                                f"  in {node.origin}")
        return arg

    def is_of_adapters(self, value: str) -> bool:
        """Whether nothing but low-rank products read a value."""
        users = self.users(value)
        return bool(users) and value not in self.graph.outputs and all(user.op == "lora_shrink" for user in users)

    def require_same_rows(self, node: Node) -> None:
        """Of scatter: raises CannotCompile unless all operands but a lone element have the same rows."""
        x, index, source = node.values
        rows = [self.type(value).shape[:-1] for value in node.values if self.type(value).shape]
        if any(shape != rows[0] for shape in rows):
            raise CannotCompile(f"scatter into {self.type(x)} of {self.type(source)} by {self.type(index)}: the kernel "
                                f"takes all of them with the same rows\n  in {node.origin}")

    def users(self, value: str) -> list[Node]:
        """The nodes that read a value, through views."""
        found = []
        for node in self._users[value]:
            found += self.users(node.output) if self._is_view(node) else [node]
        return found

    def defer(self, value: str, source: str) -> None:
        """Make no `value`: its readers take `source`, which has to live as long, and compute it themselves."""
        self._deferred[value] = source
        self.last_reader[self.buffer(source)] = max(self.last_reader[self.buffer(source)], self.last_reader[value])

    def deferred(self, value: str) -> str | None:
        """What to read in the place of a value that was not made."""
        return self._deferred.get(value)

    @property
    def slot_bytes(self) -> int:
        """Of a slot for adapters."""
        return int(self.type(SLOTS).shape[1])

    def kv_slot(self, slot: int) -> KvSlot:
        return self._kv_slots[slot]

    def table_offset(self, slot: int) -> int:
        """Where the block table of a slot begins in the step's tables, in bytes."""
        return self.kv.table_offset(self._kv_slots[slot].table, self.limits["max_batch_size"],
                                    self.limits["max_seq_len"])

    # --- inside ---

    def buffer(self, value: str) -> str:
        """The arena buffer that a value lies in, or the value's own name."""
        place = self.places.get(value)
        return place.arg.name if place is not None else value

    def _is_view(self, node: Node) -> bool:
        return node.op == "reshape" or (node.op == "slice" and _is_column_range(self.type(node.values[0]).shape, node))

    def _alias(self, node: Node, name: str) -> None:
        if not self._is_view(node):
            self.places.setdefault(name, Place(Arg("value", name)))
            return
        source = node.values[0]
        place = self.place(source)
        if node.op == "reshape":
            assert place.stride is None or _rows_kept(self.type(source).shape, self.type(name).shape), (
                f"reshape of a column range from {self.type(source)} to {self.type(name)}: {node.origin}")
            self.places[name] = place
            return
        axis, shape = node.attrs["dim"], self.type(source).shape
        inner = 1
        for dim in shape[axis + 1:]:
            inner *= int(dim)
        stride = place.stride or int(shape[axis]) * inner
        self.places[name] = Place(place.arg, place.offset + int(node.attrs["start"]) * inner, stride)

    def _bytes(self, value: str) -> int:
        size = self.element_bytes(value)
        for dim in concrete(self.type(value).shape, dict(self.bindings)):
            size *= dim
        return size

    def plan_arena(self, uses: Sequence[Sequence[str]]) -> Arena:
        """Offsets for all buffers. uses: the buffers that each launch reads or writes, in order."""
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for number, names in enumerate(uses):
            for name in names:
                first.setdefault(name, number)
                last[name] = number
        for name in self.graph.outputs:
            last[self.places[name].arg.name] = len(uses)
        return plan_arena(Life(name, self.sizes[name], first[name], last[name]) for name in first)

    def outputs(self, arena: Arena) -> dict[str, Output]:
        """The graph's outputs in the arena; the first is called "logits"."""
        labels = dict(zip(self.graph.outputs, ["logits", *self.graph.outputs[1:]], strict=True))
        return {labels[name]: Output(arena.offsets[self.places[name].arg.name], self.width(name),
                                     self.type(name).dtype.value) for name in self.graph.outputs}


def _is_column_range(shape: tuple[Dim, ...], node: Node) -> bool:
    """A slice over the first dimension after the row dimension: rows stay whole pieces of memory."""
    before = shape[:node.attrs["dim"]]
    return node.attrs.get("step", 1) == 1 and sum(dim != 1 for dim in before) <= 1 \
        and not isinstance(node.attrs["start"], str)


def _rows_kept(old: tuple[Dim, ...], new: tuple[Dim, ...]) -> bool:
    return [dim for dim in old if dim != 1][:1] == [dim for dim in new if dim != 1][:1]
