"""The KV cache as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Sequence

from .sequence import KvSequence, Probe


class KvCache:
    """Blocks of KV for sequences, and the prefixes that were computed before.

    First interface: blocks are handed out and taken back, nothing is reused yet.
    """

    def __init__(self, num_blocks: int, block_size: int, windows: Sequence[int | None] = (None,), *,
                 max_chunk: int | None = None) -> None:
        """windows: one entry a table; max_chunk: the most tokens of one sequence in a step."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = tuple(windows)
        self.max_chunk = max_chunk
        self._free = list(range(num_blocks))[::-1]
        self._reserved = 0

    @property
    def num_available(self) -> int:
        """Blocks that are free or could be made free, without those that are reserved."""
        return len(self._free) - self._reserved

    def needed(self, num_tokens: int, max_chunk: int | None = None) -> int:
        """Blocks over all tables that a sequence of so many tokens occupies at once at most."""
        return -(-num_tokens // self.block_size) * len(self.windows)

    def probe(self, seq: KvSequence) -> Probe:
        """What the cache could give the sequence now. No side effect."""
        return Probe(0)

    def acquire(self, seq: KvSequence, *, limit: int | None = None, num_new: int = 0, reserve_tokens: int = 0,
                spare: int = 0) -> bool:
        """Start a sequence: sets tables, num_cached, num_computed, capacity. False, and nothing changed: no room.

        limit           reuse at most so many tokens
        num_new         take blocks for so many tokens behind the cached ones at once (at most all there are)
        reserve_tokens  keep blocks back so that grow() up to so many tokens cannot fail. Either all or none of the
                        active sequences reserve
        spare           blocks that must be left over (num_available afterwards), without reservations
        """
        blocks = self.needed(max(reserve_tokens, min(num_new, len(seq.tokens))))
        if blocks + spare > self.num_available:
            return False
        seq.tables = [[] for _ in self.windows]
        seq.num_cached = seq.num_computed = seq.capacity = 0
        seq.is_active = True
        seq.max_blocks = -(-reserve_tokens // self.block_size)
        self._reserved += seq.max_blocks * len(self.windows)
        grown = self.grow(seq, min(num_new, len(seq.tokens)))
        assert grown
        return True

    def grow(self, seq: KvSequence, num_tokens: int) -> bool:
        """Blocks for so many tokens in every table, or none at all (False)."""
        if num_tokens <= seq.capacity:
            return True
        count = -(-(num_tokens - seq.capacity) // self.block_size)
        total = count * len(self.windows)
        if total > (len(self._free) if seq.max_blocks else self.num_available):
            return False
        for table in seq.tables:
            table += [self._free.pop() for _ in range(count)]
        seq.capacity += count * self.block_size
        self._reserved -= total if seq.max_blocks else 0
        return True

    def advance(self, seq: KvSequence, num_computed: int) -> None:
        """The KV of the first num_computed tokens is written: publish whole blocks, drop what left the window."""
        seq.num_computed = num_computed

    def release(self, seq: KvSequence, *, publish_tail: bool = True) -> None:
        """The sequence is finished, cancelled or paused. What it published stays cached, the rest is free."""
        for table in seq.tables:
            self._free += table
        if seq.max_blocks:
            self._reserved -= (seq.max_blocks - seq.capacity // self.block_size) * len(self.windows)
        seq.tables, seq.capacity, seq.is_active = [], 0, False

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, destination) block copies to run, in this order, before the next launch."""
        return []
