"""Groups of block tables: all tables whose layers see equally far back.

The query at position p of a layer with a window w sees the positions p - w < q <= p; with window None it sees all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Group:
    """Tables (by their indexes) with the same window. Their blocks of the same tokens are cached and evicted together.

    index  place in make_groups' result, and in Node.parts
    """

    index: int
    window: int | None
    tables: tuple[int, ...]

    def first_needed(self, position: int, block_size: int) -> int:
        """The first block that a query at `position`, or behind it, can see."""
        if self.window is None or position < self.window:
            return 0
        return (position - self.window + 1) // block_size

    def blocks_at_once(self, num_tokens: int, max_chunk: int | None, block_size: int) -> int:
        """Blocks of one table that a sequence of num_tokens tokens holds at most at a time.

        max_chunk  tokens that a step computes of it, at most; None: as many as there are. KvCache.advance may be
                   called as late as when a block is full, and one token ahead of it may have been planned already
        """
        whole = -(-num_tokens // block_size)
        if self.window is None or max_chunk is None:
            return whole
        span = self.window - 1 + max(max_chunk, block_size) + 1
        # At worst the first token of the span is the last one of its block.
        return min(whole, (span + block_size - 2) // block_size + 1)


def make_groups(windows: Sequence[int | None]) -> tuple[Group, ...]:
    """One group a window, full attention first, then by falling window. `windows`: one entry a table."""
    order = sorted(set(windows), key=lambda window: -window if window is not None else float("-inf"))
    return tuple(
        Group(index, window, tuple(t for t, other in enumerate(windows) if other == window))
        for index, window in enumerate(order)
    )
