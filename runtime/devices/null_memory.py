"""KV blocks of a program that computes nothing but keeps account: each cell knows which context it was written for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np

from ..step import StepInputs

Hash = TypeVar("Hash", int, np.ndarray)

_MASK = (1 << 64) - 1


def mix(state: Hash, token: Hash) -> Hash:
    """A hash of both, of 64 bits: of integers, or of arrays u64 element by element."""
    x = (state * 0x9E3779B97F4A7C15 + token * 0xD6E8FEB86659FD93 + 0xA0761D6478BD642F) & _MASK
    x = ((x ^ (x >> 29)) * 0xBF58476D1CE4E5B9) & _MASK
    return x ^ (x >> 32)


class NullMemory:
    """What a KV cache holds, in one cell a token: position, table, token, and the hash of the context up to it.

    A step finds its context through the block tables, as kernels do, and what it finds must be the context of one and
    the same sequence in every table: an AssertionError says what is wrong. Blocks outside the window are not looked at.
    """

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int,
                 windows: Sequence[int | None]) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._windows = windows
        shape = num_blocks + num_host_blocks, block_size
        self._positions = np.full(shape, -1, np.int64)
        self._tables = np.full(shape, -1, np.int64)
        self._tokens = np.zeros(shape, np.uint64)
        self._states = np.zeros(shape, np.uint64)

    @staticmethod
    def next_token(tokens: Sequence[int], vocab_size: int, start: int = 0) -> int:
        """The token that follows so many, when nothing has gone wrong. start: the hash of the adapter."""
        state = start
        for token in tokens:
            state = mix(state, token)
        return state % vocab_size

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, destination in pairs:
            for cells in (self._positions, self._tables, self._tokens, self._states):
                cells[destination] = cells[source]

    def step(self, inputs: StepInputs, starts: np.ndarray) -> np.ndarray:
        """Writes the cells of the step's tokens; u64 [num_tokens], the hash of each token's context. starts: u64
        [num_seqs], what each sequence's hash begins with."""
        states = np.zeros(inputs.num_tokens, np.uint64)
        written: dict[int, int] = {}
        for seq, (begin, end) in enumerate(pairwise(inputs.query_start[: inputs.num_seqs + 1].tolist())):
            position = int(inputs.positions[begin])
            state = self._context(inputs, seq, position, int(starts[seq]))
            for token in range(begin, end):
                state = mix(state, int(inputs.token_ids[token]))
                states[token] = state
            places = np.arange(position, position + end - begin)
            for table in range(len(self._windows)):
                blocks = self._blocks(inputs, table, seq, places)
                for block in np.unique(blocks).tolist():
                    other = written.setdefault(block, seq)
                    assert other == seq, f"sequences {other} and {seq} of a step write to the same block {block}"
                cells = blocks, places % self._block_size
                self._positions[cells] = places
                self._tables[cells] = table
                self._tokens[cells] = inputs.token_ids[begin:end]
                self._states[cells] = states[begin:end]
        return states

    def _context(self, inputs: StepInputs, seq: int, position: int, start: int) -> int:
        """The hash of what lies before `position`, found alike in every table as far back as its window reaches."""
        found: int | None = None
        for table, window in enumerate(self._windows):
            low = 0 if window is None else max(0, position - window + 1)
            places = np.arange(low, position)
            if not places.size:
                continue
            where = f"sequence {seq} of the step, table {table}"
            cells = self._blocks(inputs, table, seq, places), places % self._block_size
            wrong = (self._positions[cells] != places) | (self._tables[cells] != table)
            assert not wrong.any(), f"{where}: the cell of position {places[wrong][0]} holds something else"
            states, tokens = self._states[cells], self._tokens[cells]
            broken = mix(states[:-1], tokens[1:]) != states[1:]
            assert not broken.any(), f"{where}: positions {places[1:][broken][:1]} and before are of two contexts"
            assert low > 0 or mix(start, int(tokens[0])) == int(states[0]), (
                f"{where}: position 0 begins no context, or that of another adapter")
            assert found in (None, int(states[-1])), f"{where}: holds another context than the tables before it"
            found = int(states[-1])
        return start if found is None else found

    def _blocks(self, inputs: StepInputs, table: int, seq: int, places: np.ndarray) -> np.ndarray:
        blocks = inputs.block_tables[table, seq, places // self._block_size]
        bad = (blocks < 0) | (blocks >= self._num_blocks)
        assert not bad.any(), (f"sequence {seq} of the step, table {table}: position {places[bad][0]} is in block "
                               f"{blocks[bad][0]}; the device has {self._num_blocks}")
        return blocks
