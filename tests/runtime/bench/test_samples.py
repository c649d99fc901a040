"""Metrics of a server before and after."""

import math

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client import Histogram as ClientHistogram

from ingot.runtime.bench.samples import Samples


def test_what_the_reference_library_writes() -> None:
    registry = CollectorRegistry()
    counter = Counter("c", "", ["reason"], registry=registry)
    counter.labels('a"b\\\n').inc(3)
    counter.labels("other").inc(4)
    Gauge("g", "", registry=registry).set(math.inf)
    samples = Samples.parse(generate_latest(registry).decode())
    assert samples.total("c_total") == 7
    assert samples.total("c_total", reason='a"b\\\n') == 3
    assert samples.by_label("c_total", "reason") == {'a"b\\\n': 3, "other": 4}
    assert samples.total("g") == math.inf and samples.total("missing") is None
    assert samples.labels("missing") == {}


def test_since() -> None:
    before = Samples.parse('c{x="1"} 5\n')
    after = Samples.parse('c{x="1"} 9\nc{x="2"} 2\n')
    assert after.since(before).by_label("c", "x") == {"1": 4, "2": 2}


def test_quantiles_lie_within_their_buckets() -> None:
    registry = CollectorRegistry()
    histogram = ClientHistogram("h", "", buckets=(1, 2, 4), registry=registry)
    for value in (0.5, 1.5, 1.5, 3, 100):
        histogram.observe(value)
    samples = Samples.parse(generate_latest(registry).decode())
    assert samples.quantiles("h", [0.2, 0.4, 0.6, 0.8, 1.0]) == [
        pytest.approx(1), pytest.approx(1.5), pytest.approx(2), pytest.approx(4), 4]
    assert samples.quantiles("missing", [0.5]) is None
    assert Samples.parse('h_bucket{le="+Inf"} 0\n').quantiles("h", [0.5]) is None


def test_lines_that_are_no_samples_are_skipped() -> None:
    assert Samples.parse("<html>\n# c 1\nc one\n\nc 1 1700000000\n").values == {("c", frozenset()): 1.0}
