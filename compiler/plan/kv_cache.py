"""The layout of the KV cache: which layers share a block table, and where each one lies in a block.

A table holds layers that look back equally far, so that it can give up the blocks that have left their window. All
tables draw blocks of one size from one pool: how much of the memory falls to windows and how much to full attention
follows from what runs, and nothing has to be guessed. To that end the layers of the kinds that take more bytes are
divided over several tables, each of as many bytes as the smallest kind.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ingot.runtime.step import table_width

from ..ir.graph import Graph, Node
from .memory import aligned

WRITES = ("kv_write", "rope_kv_write")
"""Operators whose last two results are the keys and values of a slot."""

_DTYPE_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "fp8": 1, "i8": 1}

_SCALED = ("i8",)
"""Element types with a scale for each head and token. Those of fp8 are constants of the layer, or none."""


@dataclass(frozen=True)
class KvSlot:
    """One layer's keys and values. In each block of the slot's table K lies as [heads, block_size, key_dim] at
    key_offset, V likewise with value_dim at value_offset; in bytes, multiples of the planner's alignment.

    dtype   "f32", "bf16", "f16", "fp8" (e4m3), or "i8": an element is its integer times the scale of its row, and the
            scales lie as f32 [heads, block_size] at key_scale_offset and value_scale_offset, behind their part.
            Without scales these offsets are None
    """

    slot: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: str
    table: int = 0
    key_offset: int = 0
    value_offset: int = 0
    key_scale_offset: int | None = None
    value_scale_offset: int | None = None

    def part_bytes(self, block_size: int) -> tuple[int, int]:
        """Of K and V in a block, with their scales."""
        scales = self._scale_bytes(block_size)
        return self._row_bytes(block_size, self.key_dim) + scales, self._row_bytes(block_size, self.value_dim) + scales

    def placed(self, table: int, begin: int, block_size: int) -> KvSlot:
        """The slot in the blocks of that table, from byte `begin` on."""
        key_bytes, _ = self.part_bytes(block_size)
        value = begin + key_bytes
        scales: tuple[int | None, int | None] = None, None
        if self.dtype in _SCALED:
            scales = (begin + self._row_bytes(block_size, self.key_dim),
                      value + self._row_bytes(block_size, self.value_dim))
        return replace(self, table=table, key_offset=begin, value_offset=value, key_scale_offset=scales[0],
                       value_scale_offset=scales[1])

    def to_json(self) -> dict[str, Any]:
        """Its entry in plan.json; scales that it does not have are left out."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def _row_bytes(self, block_size: int, dim: int) -> int:
        return aligned(self.heads * block_size * dim * _DTYPE_BYTES[self.dtype])

    def _scale_bytes(self, block_size: int) -> int:
        return aligned(4 * self.heads * block_size) if self.dtype in _SCALED else 0


@dataclass(frozen=True)
class KvCache:
    """windows      for each table the positions that its layers look back over, the token's own included; None: all
    block_size   tokens of a block
    block_bytes  from one block to the next, the same for all tables
    slots        in the order of their numbers
    """

    block_size: int
    block_bytes: int
    windows: tuple[int | None, ...]
    slots: tuple[KvSlot, ...]

    @property
    def bytes_per_token(self) -> int:
        """Of a sequence that is no longer than any window."""
        return len(self.windows) * self.block_bytes // self.block_size

    @property
    def bytes_per_token_beyond_windows(self) -> int:
        """Of each further token of a sequence that is longer than all windows."""
        return self.windows.count(None) * self.block_bytes // self.block_size

    def table_offset(self, table: int, max_batch_size: int, max_seq_len: int) -> int:
        """Where a table begins in the step's block_tables i32 [num_tables, max_batch_size, table_width], in bytes."""
        return 4 * table * max_batch_size * table_width(max_seq_len, self.block_size)


def plan_kv_cache(graph: Graph, block_size: int, max_seq_len: int) -> KvCache:
    """The layout for the graph's attentions. A window that no sequence outgrows is none."""
    reaches = _reaches(graph)
    kinds: dict[int | None, list[KvSlot]] = {}
    for slot in sorted(_slots(graph), key=lambda slot: slot.slot):
        reach = reaches.get(slot.slot)
        kinds.setdefault(None if reach is None or reach >= max_seq_len else reach, []).append(slot)
    order = sorted(kinds, key=lambda window: (window is not None, window or 0))
    sizes = {window: sum(sum(slot.part_bytes(block_size)) for slot in kinds[window]) for window in order}
    windows: list[int | None] = []
    placed: list[KvSlot] = []
    block_bytes = 0
    for window in order:
        loads = [0] * min(-(-sizes[window] // min(sizes.values())), len(kinds[window]))
        for slot in kinds[window]:
            table = min(range(len(loads)), key=lambda number: loads[number])
            placed.append(slot.placed(len(windows) + table, loads[table], block_size))
            loads[table] += sum(slot.part_bytes(block_size))
        windows += [window] * len(loads)
        block_bytes = max(block_bytes, *loads)
    placed.sort(key=lambda slot: slot.slot)
    return KvCache(block_size, block_bytes, tuple(windows) or (None,), tuple(placed))


def _slots(graph: Graph) -> Iterator[KvSlot]:
    for node in graph.nodes:
        if node.op in WRITES:
            k, v = (graph.types[name].shape for name in node.outputs[-2:])
            yield KvSlot(node.attrs["slot"], int(k[1]), int(k[2]), int(v[2]), node.attrs["dtype"].value)


def _reaches(graph: Graph) -> dict[int, int | None]:
    """Slot -> how many positions at most, its own included, a token looks back over in any attention that reads it."""
    reaches: dict[int, int | None] = {}
    for node in graph.nodes:
        if node.op == "attention":
            slot, reach = node.attrs["slot"], _reach(node)
            known = reaches.get(slot, 0)
            reaches[slot] = None if reach is None or known is None else max(reach, known)
    return reaches


def _reach(attention: Node) -> int | None:
    """In chunks of so many positions nothing lies further back than that either."""
    limits = [value for name in ("window", "chunk") if (value := attention.attrs.get(name, 0))]
    return min(limits) if limits else None
