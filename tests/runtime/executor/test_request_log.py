"""The recorder and the log: what they tell of requests, by the outputs that the requests gave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.runtime.errors import RequestError
from ingot.runtime.executor.recorder import Histogram, cache_use
from ingot.runtime.executor.request_log import RequestLog
from ingot.runtime.scheduler import SchedulerPolicy
from tests.runtime.executor.null_engine import Sink, gated, null_executor, request


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_for_each_request(tmp_path: Path) -> None:
    sink, path, program = Sink(), tmp_path / "log.jsonl", gated()
    with null_executor(program, log=RequestLog(str(path)), max_batch_size=2) as executor:
        executor.submit(request("a", [1, 2, 3], 5), sink)
        executor.submit(request("b", [1, 2, 3, 4], 3, sampling={"n": 2}), sink)
        executor.submit(request("gone", [9] * 5, 3), sink)
        program.await_launch()
        executor.cancel("gone")
        program.is_open = True
        for name in ("a", "b", "gone"):
            sink.finished(name)
        assert executor.drain()
    a, b, gone = sorted(lines(path), key=lambda line: str(line["request_id"]))
    assert a["adapter"] is None
    assert (a["request_id"], a["prompt_tokens"], a["output_tokens"], a["finish_reasons"]) == ("a", 3, 5, ["length"])
    assert (b["output_tokens"], b["finish_reasons"], b["pauses"], b["error"]) == (6, ["length", "length"], 0, None)
    for line in (a, b):
        assert 0 <= line["queue_s"] <= line["ttft_s"] <= line["total_s"]
        assert 0 <= line["itl_mean_s"] <= line["itl_max_s"]
    assert (gone["finish_reasons"], gone["queue_s"], gone["ttft_s"], gone["itl_mean_s"]) == (
        ["cancelled"], None, None, None)
    assert abs(a["arrival"] - path.stat().st_mtime) < 60


def test_what_the_recorder_counts() -> None:
    sink = Sink()
    with null_executor(num_blocks=16, policy=SchedulerPolicy.MAX_UTILIZATION) as executor:
        for name, prompt in (("a", [1] * 6), ("b", [2] * 6)):
            executor.submit(request(name, prompt, 50), sink)
        for name in "ab":
            sink.finished(name)
        recorder = executor.recorder
    first, gaps = recorder.time_to_first_token, recorder.inter_token_latency
    assert (recorder.requests_received, recorder.generated_tokens, recorder.prompt_tokens) == (2, 100, 12)
    assert sum(histogram.total for histogram in first.values()) == 2 == recorder.queue_time.total
    assert (gaps.total, recorder.request_time.total) == (98, 2)
    assert recorder.steps == recorder.step_phases["device"].total > 0
    assert recorder.requests_paused > 0
    assert recorder.computed_tokens >= 12 + 98


def test_cached_prompts_are_told_apart() -> None:
    sink, prompt = Sink(), list(range(20))
    with null_executor() as executor:
        for name, ids in (("miss", prompt), ("hit", prompt), ("partial", [*prompt[:10], *range(100, 110)])):
            executor.submit(request(name, ids, 2), sink)
            sink.finished(name)
        first = executor.recorder.time_to_first_token
        assert {use: histogram.total for use, histogram in first.items()} == {"hit": 1, "partial": 1, "miss": 1}
        cached = sink.of("hit")[0].num_cached_tokens + sink.of("partial")[0].num_cached_tokens
        assert executor.recorder.cached_prompt_tokens == cached > 0


def test_cache_use() -> None:
    assert [cache_use(100, cached, 16) for cached in (0, 1, 83, 84, 99)] == ["miss", "partial", "partial", "hit", "hit"]


def test_histogram() -> None:
    histogram = Histogram((1.0, 2.0))
    for value, count in ((0.5, 1), (1.0, 2), (1.5, 1), (5.0, 3)):
        histogram.observe(value, count)
    assert (histogram.counts, histogram.total, histogram.sum) == ([3, 1, 3], 7, 19.0)


def test_a_log_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestError, match=r"cannot write the request log .*No such file"):
        RequestLog(str(tmp_path / "none" / "log"))
    sink = Sink()
    with null_executor(log=RequestLog("-")) as executor:
        executor.submit(request("a", [1], 1), sink)
        sink.finished("a")
        executor.drain()
    assert json.loads(capsys.readouterr().err)["request_id"] == "a"
