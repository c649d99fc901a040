"""The input of one step: which tokens of which sequences, where their KV blocks are, whose logits are asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .sampling_inputs import ArraySpec, SamplingInputs, SamplingStruct, sampling_arrays

if TYPE_CHECKING:
    from .program import Limits

Int32Array = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


_ALIGNMENT = 64
_MERGED_BYTES = 1 << 16
"""Pieces so far apart are copied as one: the start of a copy to a GPU takes as long as these bytes."""


class ArrayPlace(NamedTuple):
    """offset: in bytes, in the memory of a step."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StepLayout:
    """Where each array of a step lies in one piece of memory, on the host and on a device alike.

    places       name -> ArrayPlace: what kernels read, then what they write (StepOutputs); those of SamplingInputs are
                 called "sampling.rows" and so on. Offsets are multiples of 64
    input_bytes  inputs lie before this byte, outputs from it on
    num_bytes    of all
    table_width  entries of a row of a block table
    """

    def __init__(self, limits: Limits, vocab_size: int, block_size: int, num_tables: int) -> None:
        tokens, batch = limits.max_num_tokens, limits.max_batch_size
        self.table_width = table_width(limits.max_seq_len, block_size)
        int32 = np.dtype(np.int32)
        specs = {name: ArraySpec(shape, int32) for name, shape in (
            ("token_ids", (tokens,)), ("positions", (tokens,)), ("token_seq", (tokens,)), ("logit_rows", (batch,)),
            ("query_start", (batch + 1,)), ("context_len", (batch,)), ("adapters", (batch,)), ("sizes", (4,)))}
        sampling = {f"sampling.{name}": spec
                    for name, spec in sampling_arrays(batch, vocab_size, limits.max_seq_len).items()}
        outputs = {f"sampling.{name}" for name in SamplingStruct.OUTPUTS}
        # What every step needs stands first, block tables at its end.
        for name in ("sampling.counts", "sampling.rows"):
            specs[name] = sampling.pop(name)
        specs["block_tables"] = ArraySpec((num_tables, batch, self.table_width), int32)
        places: dict[str, ArrayPlace] = {}
        end = self.input_bytes = 0
        for name, spec in (specs | sampling).items():
            if name in outputs and not self.input_bytes:
                self.input_bytes = end
            places[name] = ArrayPlace(end, *spec)
            end += -(-places[name].size // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = end
        self.places: Mapping[str, ArrayPlace] = MappingProxyType(places)

    def views(self, memory: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays in u8 [num_bytes]."""
        return {name: memory[place.offset : place.offset + place.size].view(place.dtype).reshape(place.shape)
                for name, place in self.places.items()}


def table_width(max_seq_len: int, block_size: int) -> int:
    """Entries of a row of a block table: enough, and a multiple of 4, so that every table begins at a multiple of 16
    bytes, as pointers of GPU kernels must."""
    return -(-max_seq_len // (4 * block_size)) * 4


class StepInputs:
    """The arrays of a step (plugins/cpu/ingot_kernel.h), allocated once, filled anew for each step.

    clear() empties them, add() appends a sequence; the arrays' first elements, as the counts say, are then valid.
    block_tables i32 [num_tables, max_batch_size, table_width]: in each table of KV blocks one row a sequence.
    layout, memory  the arrays are views of memory u8 [layout.num_bytes]
    num_adapted     sequences that have a LoRA adapter
    """

    # The arrays that a plan may bind to a kernel's argument.
    ARRAYS = ("token_ids", "positions", "token_seq", "logit_rows", "query_start", "context_len", "adapters",
              "block_tables")

    def __init__(self, limits: Limits, vocab_size: int, block_size: int, num_tables: int = 1,
                 memory: np.ndarray | None = None) -> None:
        """Of an engine with these limits, KV blocks of block_size tokens and so many tables of them.

        max_blocks: KV blocks of a sequence in a table; sampling: how the tokens of the rows of logits are chosen.
        memory: u8 [StepLayout(…).num_bytes], zeroed, aligned to 16; by default it is allocated here.
        """
        self.max_num_tokens = max_num_tokens = limits.max_num_tokens
        self.max_batch_size = max_batch_size = limits.max_batch_size
        self.num_tables = num_tables
        self.layout = layout = StepLayout(limits, vocab_size, block_size, num_tables)
        self.max_blocks = -(-limits.max_seq_len // block_size)
        self.table_width = layout.table_width
        self.memory = np.zeros(layout.num_bytes, np.uint8) if memory is None else memory
        arrays = layout.views(self.memory)
        self.sampling = SamplingInputs(max_batch_size, vocab_size, limits.max_seq_len, {
            name.removeprefix("sampling."): array for name, array in arrays.items() if name.startswith("sampling.")})
        self.num_tokens = 0
        self.num_seqs = 0
        self.num_logits = 0
        self.num_adapted = 0
        self.token_ids: Int32Array = arrays["token_ids"]
        self.positions: Int32Array = arrays["positions"]
        self.token_seq: Int32Array = arrays["token_seq"]
        self.logit_rows: Int32Array = arrays["logit_rows"]
        self.query_start: Int32Array = arrays["query_start"]
        self.context_len: Int32Array = arrays["context_len"]
        self.adapters: Int32Array = arrays["adapters"]
        self.block_tables: Int32Array = arrays["block_tables"]
        self.block_tables.fill(-1)
        self._sizes = arrays["sizes"]
        self._counting: Int32Array = np.arange(max_num_tokens, dtype=np.int32)
        # Single elements are written through these: half the time of a numpy assignment.
        self._token_ids = self.token_ids.data
        self._positions = self.positions.data
        self._token_seq = self.token_seq.data
        self._logit_rows = self.logit_rows.data
        self._query_start = self.query_start.data
        self._context_len = self.context_len.data
        self._adapters = self.adapters.data
        # Of each row of the block tables: whose blocks it holds, and how many.
        self._keys: list[int | None] = [None] * max_batch_size
        self._num_blocks = [0] * max_batch_size

    def clear(self) -> None:
        """Neither tokens, nor rows of logits, nor any that is sampled."""
        self.num_tokens = self.num_seqs = self.num_logits = self.num_adapted = 0
        self.sampling.clear()

    def add(self, tokens: Sequence[int], position: int, block_tables: Sequence[Sequence[int]], num_logits: int,
            key: int | None = None, adapter: int = -1) -> None:
        """Append `tokens` of a new sequence, the first of which stands at `position`.

        block_tables  the sequence's KV blocks in each table, all of one length: entry p // block_size holds the token
                      at position p, for all up to the last of `tokens`; -1 where it has left the table's window
        num_logits    of how many of these tokens, counted from the end, the logits are asked for
        key           stands for block tables that only grow: from one step to a later one entries are appended or
                      become -1, nothing else. A row that holds the same key as when this buffer was filled last gets
                      the new entries only (what became -1 keeps its old number, which no kernel reads); so keep
                      sequences in their order. Take a new key when a sequence is admitted anew.
        adapter       slot of the sequence's LoRA adapter; -1: none
        """
        begin, seq = self.num_tokens, self.num_seqs
        count = len(tokens)
        end = begin + count
        logits_end = self.num_logits + num_logits
        assert count and end <= self.max_num_tokens and seq < self.max_batch_size, (begin, end, seq)
        assert num_logits <= count and logits_end <= self.max_batch_size, (num_logits, count, logits_end)
        if count == 1:
            self._token_ids[begin] = tokens[0]
            self._positions[begin] = position
            self._token_seq[begin] = seq
            if num_logits:
                self._logit_rows[self.num_logits] = begin
        else:
            self.token_ids[begin:end] = tokens
            np.add(self._counting[:count], position, out=self.positions[begin:end])
            self.token_seq[begin:end] = seq
            np.add(self._counting[:num_logits], end - num_logits, out=self.logit_rows[self.num_logits : logits_end])
        self._query_start[seq] = begin
        self._query_start[seq + 1] = end
        self._context_len[seq] = position + count
        self._adapters[seq] = adapter
        self.num_adapted += adapter >= 0
        known = self._num_blocks[seq] if key is not None and self._keys[seq] == key else 0
        num_blocks = len(block_tables[0])
        if known < num_blocks:
            assert len(block_tables) == self.num_tables, (len(block_tables), self.num_tables)
            for rows, table in zip(self.block_tables, block_tables, strict=True):
                assert len(table) == num_blocks <= self.max_blocks, (len(table), num_blocks, self.max_blocks)
                rows[seq, known:num_blocks] = table[known:]
            self._num_blocks[seq] = num_blocks
        self._keys[seq] = key
        self.num_tokens, self.num_seqs, self.num_logits = end, seq + 1, logits_end

    def pieces(self) -> list[tuple[int, int]]:
        """(offset, size) of what this step's kernels read of `memory`, in ascending order and few; for devices that
        have a copy of it. Writes the counts that kernels read: to be called at launch."""
        self._sizes[:3] = self.num_tokens, self.num_seqs, self.num_logits
        places = self.layout.places
        tables = places["block_tables"]
        row_bytes = 4 * self.table_width
        found = [(0, tables.offset + self.num_seqs * row_bytes)]
        table_bytes = self.max_batch_size * row_bytes
        wanted = [(tables.offset + table * table_bytes, self.num_seqs * row_bytes)
                  for table in range(1, self.num_tables)]
        for name in self.sampling.lists_in_use():
            place = places[f"sampling.{name}"]
            wanted.append((place.offset, self.sampling.num_rows * place.size // place.shape[0]))
        for offset, size in wanted:
            begin, before = found[-1]
            if offset - begin - before <= _MERGED_BYTES:
                found[-1] = begin, offset + size - begin
            else:
                found.append((offset, size))
        return found
