"""Figures from records, and the tables and the picture made of them."""

from array import array
from pathlib import Path

import pytest

from ingot.runtime.bench.plot import check_plot, draw
from ingot.runtime.bench.recorder import RequestRecord
from ingot.runtime.bench.report import make_report, report_text, summary
from ingot.runtime.bench.samples import Samples
from ingot.runtime.errors import RequestError, WorkFailed

PAGE = """
ingot_prefix_cache_queries_total 40
ingot_prefix_cache_hits_total 10
ingot_prefix_cache_miss_total{reason="cold"} 28
ingot_prefix_cache_miss_total{reason="salt"} 0
ingot_requests_paused_total 2
ingot_draft_tokens_total 50
ingot_draft_tokens_accepted_total 40
ingot_request_queue_time_seconds_bucket{le="0.001"} 3
ingot_request_queue_time_seconds_bucket{le="+Inf"} 4
ingot_request_queue_time_seconds_sum 0.5
ingot_request_queue_time_seconds_count 4
"""


def record(scheduled: float, times: list[float], cached: int | None = 0, prompt: int | None = 20,
           status: str = "finished", error: str | None = None, asked: int | None = None) -> RequestRecord:
    return RequestRecord("s", 0, len(times) if asked is None else asked, 16, scheduled, scheduled + 0.001,
                         times[-1] if times else scheduled + 0.002, prompt, cached, status, error,
                         array("d", times), array("I", [1] * len(times)))


RECORDS = [
    record(0.0, [0.1, 0.2, 0.4]),                    # miss
    record(1.0, [1.3, 1.4], cached=3, asked=5),      # partial, shorter than asked
    record(2.0, [2.05], cached=4),                   # hit: all but one block
    record(3.0, [], None, None, "refused", "full"),
    record(4.0, [4.5], None, None, "failed", "broken"),
]
RUN = {"model": "m", "engine": None, "where": "here", "load": "closed loop", "machine": "a machine"}


def test_figures() -> None:
    report = make_report(RECORDS, 0.0, Samples.parse(PAGE), [0.25, 0.75])
    assert report["requests"] == {"finished": 3, "refused": 1, "failed": 1, "shorter_than_asked": 1,
                                  "errors": {"full": 1, "broken": 1}}
    assert report["duration_s"] == 4.5
    assert report["throughput"] == {"requests_per_s": round(3 / 4.5, 4), "input_tokens_per_s": round(60 / 4.5, 2),
                                    "output_tokens_per_s": round(6 / 4.5, 2)}
    assert report["prefix_cache"] == {"cached_tokens": 7, "prompt_tokens": 60, "hit_rate": round(7 / 60, 4),
                                      "hit": 1, "partial": 1, "miss": 1}
    assert report["kv_usage"] == {"mean": 0.5, "max": 0.75}
    times = report["times"]
    assert times["time to first token"]["count"] == 3
    assert times["time to first token"]["min"] == pytest.approx(0.05)
    assert times["time to first token"]["spread"] == pytest.approx(0.25)
    assert [times[f"time to first token, {name}"]["mean"] for name in ("miss", "partial", "hit")] == [
        pytest.approx(0.1), pytest.approx(0.3), pytest.approx(0.05)]
    assert times["inter-token latency"]["count"] == 3 and times["inter-token latency"]["max"] == pytest.approx(0.2)
    assert times["time per output token"]["mean"] == pytest.approx((0.15 + 0.1) / 2)
    assert times["time to refusal"]["mean"] == pytest.approx(0.001)
    assert times["sent after schedule"]["max"] == pytest.approx(0.001)
    assert times["queue wait"]["mean"] == 0.125 and times["queue wait"]["p50"] == pytest.approx(0.001 * 2 / 3)
    assert report["server"] == {"prefix_cache_queries": 40, "prefix_cache_hits": 10, "hit_rate": 0.25,
                                "misses": {"cold": 28}, "paused": 2, "draft_tokens": 50,
                                "accepted_draft_tokens": 40, "draft_acceptance": 0.8}


def test_percentiles() -> None:
    values = summary(range(1, 101))
    assert values == {"count": 100, "mean": 50.5, "min": 1, "p50": 50.5, "p90": pytest.approx(90.1),
                      "p95": pytest.approx(95.05), "p99": pytest.approx(99.01), "max": 100, "spread": 99}
    assert summary([]) is None


def test_tables() -> None:
    text = report_text({"run": RUN, **make_report(RECORDS, 0.0, Samples.parse(PAGE), [0.25])})
    for expected in ("3 finished, 1 refused, 1 failed", "11.7% of prompt tokens reused (7 of 60)",
                     "1 hit, 1 partial, 1 miss", "25.0% in the mean", "80.0% of 50 drafted tokens", "cold 28",
                     "1 × full", "1 × broken", "1 answers had fewer tokens", "P99", "spread", "exact to its buckets"):
        assert expected in text, text


def test_what_the_server_does_not_tell_is_said() -> None:
    untold = [record(0.0, [0.1], None, None)]
    text = report_text({"run": RUN, **make_report(untold, 0.0, None, [])})
    assert text.count("not told by the server") == 6, text  # engine, input, prefix cache, KV use, paused, queue wait


def test_no_requests_at_all() -> None:
    report = make_report([], 0.0, None, [])
    assert report["throughput"]["requests_per_s"] == 0 and report_text({"run": RUN, **report})


def test_plot(tmp_path: Path) -> None:
    report = {"run": RUN, **make_report(RECORDS, 0.0, None, [])}
    path = tmp_path / "plot.png"
    draw(str(path), RECORDS, report)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    draw(str(path), [], report)
    with pytest.raises(WorkFailed, match="cannot write"):
        draw(str(tmp_path / "missing/plot.png"), RECORDS, report)


def test_plots_are_checked_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    check_plot("a.png")
    with pytest.raises(RequestError, match=r"\.png"):
        check_plot("a.pdf")
    import sys
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RequestError, match=r"ingot-llm\[bench\]"):
        check_plot("a.png")
