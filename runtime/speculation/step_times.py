"""What a step takes by its tokens, as measured while the engine runs: whether a draft is worth its time."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque

# Of so many the least counts: on a machine with other work half of the steps may have been held up.
_NUM_KEPT = 16
_MAX_AGE = 512
"""Steps after which what was measured is forgotten: contexts have grown meanwhile, or other work has gone."""
_AGE_OF_ONE = 64
"""Of a single measurement, of two twice as many: it may have been chance, and is tried again."""


def bucket_of(num_tokens: int) -> int:
    """The token count that stands for this one: itself up to 16, from there on eight an octave, rounded up."""
    unit = 1 << max((num_tokens - 1).bit_length() - 4, 0)
    return -(-num_tokens // unit) * unit


class StepTimes:
    """Of steps in which all sequences generate."""

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._measured_at: dict[int, int] = {}
        self._num_steps = 0

    def add(self, num_tokens: int, seconds: float) -> None:
        self._num_steps += 1
        bucket = bucket_of(num_tokens)
        times = self._times.get(bucket)
        if times is None or self._num_steps - self._measured_at[bucket] > _MAX_AGE:
            times = self._times[bucket] = deque(maxlen=_NUM_KEPT)
        times.append(seconds)
        self._measured_at[bucket] = self._num_steps

    def age(self, num_tokens: int) -> float:
        """Steps since one of so many tokens was measured."""
        return self._num_steps - self._measured_at.get(bucket_of(num_tokens), -math.inf)

    def known(self) -> list[tuple[int, float]]:
        """(tokens, seconds) that were measured lately, ascending. Fewer tokens take no longer than more: where they
        did, they were held up."""
        points, most = [], math.inf
        for bucket in sorted(self._times, reverse=True):
            age = self._num_steps - self._measured_at[bucket]
            if age <= min(_AGE_OF_ONE * len(self._times[bucket]), _MAX_AGE):
                most = min(most, *self._times[bucket])
                points.append((bucket, most))
        return points[::-1]


def estimate(points: list[tuple[int, float]], num_tokens: int) -> float | None:
    """Seconds of a step, between the nearest of `known`. Up to twice the last one: as long as that, so that it is tried
    where it may be worth it. None beyond, and below the first."""
    place = bisect_left(points, (bucket_of(num_tokens), 0.0))
    if place == len(points):
        return points[-1][1] if points and num_tokens <= 2 * points[-1][0] else None
    above, seconds = points[place]
    if above == bucket_of(num_tokens):
        return seconds
    if not place:
        return None
    below, least = points[place - 1]
    return least + (seconds - least) * (num_tokens - below) / (above - below)
