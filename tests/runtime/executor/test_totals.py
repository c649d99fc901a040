"""Counters of several engines as one."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ingot.runtime.executor.recorder import Histogram, Recorder
from ingot.runtime.executor.totals import Totals
from ingot.runtime.kv.stats import KvStats


def filled(factor: int) -> tuple[Recorder, KvStats]:
    """Every counter there is holds something."""
    recorder, kv = Recorder(), KvStats()
    both: tuple[Any, ...] = recorder, kv
    for total in both:
        for number, each in enumerate(fields(total), 1):
            value = getattr(total, each.name)
            if isinstance(value, Histogram):
                value.observe(0.001 * number, factor)
            elif isinstance(value, dict) and value and isinstance(next(iter(value.values())), Histogram):
                for histogram in value.values():
                    histogram.observe(0.01 * number, factor)
            elif isinstance(value, dict):
                value["stop" if total is recorder else "cold"] = number * factor
            else:
                setattr(total, each.name, number * factor)
    return recorder, kv


def test_all_counters_are_added() -> None:
    totals = Totals()
    totals.add(*filled(1))
    totals.add(*filled(2))
    pairs: list[tuple[Any, Any]] = list(zip((totals.recorder, totals.kv), filled(3), strict=True))
    for total, wanted in pairs:
        for each in fields(wanted):
            assert _plain(getattr(total, each.name)) == _plain(getattr(wanted, each.name)), each.name


def test_what_is_added_stays_as_it_was() -> None:
    recorder, kv = filled(1)
    totals = Totals()
    totals.add(recorder, kv)
    copy = totals.copy()
    totals.add(recorder, kv)
    for total, wanted in ((copy.recorder, filled(1)[0]), (recorder, filled(1)[0]), (totals.recorder, filled(2)[0])):
        assert all(_plain(getattr(total, each.name)) == _plain(getattr(wanted, each.name)) for each in fields(wanted))


def test_reasons_that_one_engine_alone_has() -> None:
    one, two = Recorder(), Recorder()
    one.requests_refused["QueueFull"] = 2
    two.requests_refused["NeverFits"] = 3
    totals = Totals()
    totals.add(one, KvStats())
    totals.add(two, KvStats())
    assert dict(totals.recorder.requests_refused) == {"QueueFull": 2, "NeverFits": 3}


def _plain(value: object) -> object:
    if isinstance(value, Histogram):
        return value.bounds, value.counts, value.total, round(value.sum, 9)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value
