"""Static memory planning: offsets in one arena for all values of a step.

A value lives from the launch that writes it to the last launch that reads it. Values whose lives overlap must not
overlap in memory. Finding the smallest arena is NP-hard (dynamic storage allocation). First-fit over a few orders,
largest first foremost (cf. Pisarchyk & Lee 2020, "Efficient Memory Management for Deep Neural Net Inference"), comes
within a tenth of the lower bound on the graphs of language models. Where that is not enough, the buffers that stick
out above the bound are placed first in the next attempt, which on these graphs meets it after a few rounds.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

ALIGNMENT = 64  # bytes: one cache line, and the widest vector of any CPU target
_GOOD_ENOUGH = 1.01
_ROUNDS = 24
"""Attempts for each order, as long as the arena is larger than _GOOD_ENOUGH times the bound."""


@dataclass(frozen=True)
class Life:
    """A buffer of `size` bytes that is in use during the launches first .. last, both included."""

    name: str
    size: int
    first: int
    last: int

    def overlaps(self, other: Life) -> bool:
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Arena:
    """offsets        buffer -> offset in bytes, a multiple of ALIGNMENT
    size           bytes of the arena
    bound          the largest sum of sizes alive at one launch: no plan can be smaller
    unshared       the sum of all sizes: what it would take without reuse
    """

    offsets: dict[str, int]
    size: int
    bound: int
    unshared: int


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def plan_arena(lives: Iterable[Life]) -> Arena:
    """Offsets for all buffers, none overlapping another that is alive at the same time."""
    lives = [Life(b.name, aligned(b.size), b.first, b.last) for b in lives]
    bound = lower_bound(lives)
    unshared = sum(b.size for b in lives)
    best = unshared + 1, dict[str, int]()
    for order in _ORDERS:
        attempt = sorted(lives, key=order)
        for _ in range(_ROUNDS):
            offsets = _first_fit(attempt)
            size = max((offsets[b.name] + b.size for b in lives), default=0)
            above = {b.name for b in lives if offsets[b.name] + b.size > bound}
            best = min(best, (size, offsets), key=lambda found: found[0])
            if best[0] <= _GOOD_ENOUGH * bound:
                return Arena(best[1], best[0], bound, unshared)
            attempt = [b for b in attempt if b.name in above] + [b for b in attempt if b.name not in above]
    return Arena(best[1], best[0], bound, unshared)


def lower_bound(lives: Iterable[Life]) -> int:
    """The largest live set in bytes, by a sweep over the opening and closing of lives."""
    events: dict[int, int] = {}
    for life in lives:
        events[life.first] = events.get(life.first, 0) + life.size
        events[life.last + 1] = events.get(life.last + 1, 0) - life.size
    alive = most = 0
    for _, change in sorted(events.items()):
        alive += change
        most = max(most, alive)
    return most


# Names break ties, so that the plan depends on nothing but the program.
_ORDERS: tuple[Callable[[Life], tuple[Any, ...]], ...] = (
    lambda b: (-b.size, b.first, b.name),
    lambda b: (b.first, -b.size, b.name),
    lambda b: (-(b.last - b.first), -b.size, b.name),
    lambda b: (-b.size * (b.last - b.first + 1), b.first, b.name),
    lambda b: (-b.last, -b.size, b.name),
)


def _first_fit(lives: list[Life]) -> dict[str, int]:
    """Each buffer at the lowest offset that is free during its whole life."""
    offsets: dict[str, int] = {}
    taken: dict[int, set[tuple[int, int]]] = {}  # launch -> (start, end) of what is alive then
    for life in lives:
        launches = range(life.first, life.last + 1)
        offset = 0
        for start, end in sorted(set().union(*(taken.get(launch, ()) for launch in launches))):
            if offset + life.size <= start:
                break
            offset = max(offset, end)
        offsets[life.name] = offset
        for launch in launches:
            taken.setdefault(launch, set()).add((offset, offset + life.size))
    return offsets
