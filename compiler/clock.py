"""Stages of long work: told to the user as they begin, timed as they end."""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Progress = Callable[[str, str], None]
"""(stage, what it is at)"""


@dataclass
class Clock:
    """seconds: stage -> time, of all its parts together."""

    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str, detail: str) -> Iterator[None]:
        self.progress(name, detail)
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
