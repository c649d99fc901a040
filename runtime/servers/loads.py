"""Tokens a second, from a counter that only grows."""

import time
from collections.abc import Callable

_WINDOW_S = 1.0


class Throughput:
    """The rate since the last look that is at least a second old: whoever asks often gets no noise."""

    def __init__(self, count: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._count = count
        self._clock = clock
        self._begin = clock()
        self._begin_count = count()
        self._rate = 0.0

    def per_second(self) -> float:
        now, count = self._clock(), self._count()
        elapsed = now - self._begin
        if elapsed >= _WINDOW_S:
            self._rate = (count - self._begin_count) / elapsed
            self._begin, self._begin_count = now, count
        return self._rate
