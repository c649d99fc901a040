"""Races in global memory within one launch: between warps of a block, and between blocks.

What one warp writes another may only touch if it comes later in every order: behind a barrier of the block, or behind
an atomic operation that acquires what one of the writer's side has released. So each warp knows, for every other, up to
which barrier of its block it has seen its accesses (vector clocks: Lamport 1978, Mattern 1989). Atomic operations
themselves are no races. Writing what is there already is none either; where several warps have read, a later write is
not looked at.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .instruction import PtxError

if TYPE_CHECKING:
    from .warp import Warps

MOST_WARPS = 2048
"""Of a launch: what they know of each other grows with the square."""

_NOBODY, _SEVERAL = -1, -2


class GlobalRaces:
    def __init__(self, num_bytes: int, num_blocks: int, num_warps: int) -> None:
        """num_warps: of a block."""
        self._num_warps = num_warps
        count = num_blocks * num_warps
        self._known = np.zeros((count, count), np.int32)
        """[who, of whom]: accesses at an earlier time than this have been seen."""
        self._time = np.zeros(num_blocks, np.int32)
        """Of each block: barriers that it has passed."""
        self._released: dict[int, np.ndarray] = {}
        self._writer = np.full(num_bytes, _NOBODY, np.int32)
        self._written = np.zeros(num_bytes, np.int32)
        self._reader = np.full(num_bytes, _NOBODY, np.int32)
        self._read = np.zeros(num_bytes, np.int32)

    def barrier(self, block: int) -> None:
        """All warps of the block have met."""
        mine = slice(block * self._num_warps, (block + 1) * self._num_warps)
        self._time[block] += 1
        self._known[mine] = self._known[mine].max(0)
        self._known[mine, mine] = self._time[block]

    def atomic(self, warp: int, at: int, acquires: bool, releases: bool) -> None:
        """warp: in the launch; at: where the operation is."""
        if acquires and at in self._released:
            np.maximum(self._known[warp], self._released[at], out=self._known[warp])
        if releases:
            seen = self._known[warp].copy()
            seen[warp] = self._time[warp // self._num_warps] + 1
            self._released[at] = np.maximum(seen, self._released.get(at, 0))

    def load(self, warps: Warps, at: np.ndarray, size: int) -> None:
        """at: offsets of the lanes. Of each word the first byte is looked at."""
        place, who = self._accesses(warps, at, size, min(size, 4))
        self._check(place, who, self._writer, self._written, "read", "written", None)
        before = self._reader[place]
        seen = (before == who) | ((before >= 0) & (self._known[who, before] > self._read[place]))
        self._reader[place] = who
        self._read[place] = self._time[who // self._num_warps]
        self._reader[place[(before != _NOBODY) & ~seen | (self._reader[place] != who)]] = _SEVERAL

    def store(self, warps: Warps, at: np.ndarray, data: np.ndarray, memory: np.ndarray) -> None:
        """data: u8 [lanes, size], about to be written to memory."""
        place, who = self._accesses(warps, at, data.shape[1], 1)
        values = (data if warps.mask is True else data[warps.mask]).reshape(-1)
        changes = memory[place] != values
        self._check(place, who, self._writer, self._written, "written", "written", changes)
        self._check(place, who, self._reader, self._read, "written", "read", changes)
        self._writer[place] = who
        self._written[place] = self._time[who // self._num_warps]

    def _accesses(self, warps: Warps, at: np.ndarray, size: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Each byte that is looked at, and which warp of the launch it is of."""
        who = warps.warp_of_launch
        if warps.mask is not True:
            at, who = at[warps.mask], who[warps.mask]
        place = (at.astype(np.int64)[:, None] + np.arange(0, size, step)).reshape(-1)
        return place, np.repeat(who, size // step)

    def _check(self, place: np.ndarray, who: np.ndarray, others: np.ndarray, times: np.ndarray, now: str, before: str,
               changes: np.ndarray | None) -> None:
        other = others[place]
        suspect = (other >= 0) & (other != who)
        if changes is not None:
            suspect &= changes
        if not suspect.any():
            return
        place, who, other = place[suspect], who[suspect], other[suspect]
        unseen = self._known[who, other] <= times[place]
        if unseen.any():
            first = int(np.argmax(unseen))
            mine, theirs = (divmod(int(x[first]), self._num_warps) for x in (who, other))
            raise RaceError(int(place[first]), f"{now} by warp {mine[1]} of block {mine[0]} and was {before} by warp "
                                               f"{theirs[1]} of block {theirs[0]}; nothing puts one behind the other")


class RaceError(PtxError):
    """at: offset in memory."""

    def __init__(self, at: int, text: str) -> None:
        super().__init__(text)
        self.at = at
