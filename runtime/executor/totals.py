"""Sums of counters over several engines, so that a server's counters only grow when one engine follows another."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from ..kv.stats import KvStats
from .recorder import Histogram, Recorder


@dataclass(eq=False)
class Totals:
    recorder: Recorder = field(default_factory=Recorder)
    kv: KvStats = field(default_factory=KvStats)

    def add(self, recorder: Recorder, kv: KvStats) -> None:
        """The counters may be written meanwhile; what is counted while they are read may be missed."""
        _add(self.recorder, recorder)
        _add(self.kv, kv)

    def copy(self) -> Totals:
        other = Totals()
        other.add(self.recorder, self.kv)
        return other


def _add(total: Any, more: Any) -> None:
    """Adds all counters of a dataclass to those of another of its kind."""
    for each in fields(total):
        setattr(total, each.name, _sum(getattr(total, each.name), getattr(more, each.name)))


def _sum(total: Any, more: Any) -> Any:
    if isinstance(total, Histogram):
        assert total.bounds == more.bounds
        total.counts = [a + b for a, b in zip(total.counts, more.counts, strict=True)]
        total.total += more.total
        total.sum += more.sum
        return total
    if isinstance(total, dict):
        for name, value in list(more.items()):
            total[name] = _sum(total[name], value) if name in total else value
        return total
    return total + more
