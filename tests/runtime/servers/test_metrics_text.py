"""The page /metrics: well formed, complete, and the document tells of each metric."""

import re
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ingot.runtime.executor.recorder import Histogram
from ingot.runtime.servers.metrics_text import CONTENT_TYPE, Family, _lines
from tests.runtime.servers.scripted_engine import ScriptedRunner

DOCUMENT = Path(__file__).parents[3] / "docs/metrics.md"
# What the design promises by name.
PROMISED = {
    "ingot_prefix_cache_queries_total", "ingot_prefix_cache_hits_total", "ingot_prefix_cache_miss_total",
    "ingot_time_to_first_token_seconds", "ingot_inter_token_latency_seconds", "ingot_request_queue_time_seconds",
    "ingot_kv_cache_usage_ratio", "ingot_requests_running", "ingot_requests_waiting", "ingot_requests_paused",
    "ingot_requests_paused_total", "ingot_guided_mask_wait_seconds", "ingot_step_seconds", "ingot_kernel_fallbacks",
    "ingot_engine_info",
}


def page(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as response:
        assert response.headers["Content-Type"] == CONTENT_TYPE
        text: str = response.read().decode()
    return text


def samples(text: str) -> dict[str, float]:
    return {f"{sample.name}{sorted(sample.labels.items())}": sample.value
            for family in text_string_to_metric_families(text) for sample in family.samples}


def names(text: str) -> list[str]:
    return re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)


def test_every_promised_metric_is_there(address: str) -> None:
    text = page(address)
    assert set(names(text)) >= PROMISED
    assert len(set(names(text))) == len(names(text))
    parsed = list(text_string_to_metric_families(text))
    assert all(family.type != "unknown" and family.documentation for family in parsed)
    # Each has a value from the start, so that rates are right from the first event on.
    assert not [family.name for family in parsed if not family.samples]


def test_the_document_tells_of_the_same_metrics(address: str) -> None:
    documented = re.findall(r"^\| `(ingot_\w+)", DOCUMENT.read_text(), re.MULTILINE)
    assert documented == names(page(address))


def test_values_follow_the_recorder(address: str, runner: ScriptedRunner) -> None:
    before = samples(page(address))
    recorder = runner.recorder
    recorder.requests_finished["stop"] += 2
    recorder.requests_refused["QueueFull"] += 1
    recorder.generated_tokens += 7
    recorder.time_to_first_token["partial"].observe(0.003)
    recorder.queue_time.observe(1000)
    after = samples(page(address))
    changed = {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}
    # Whatever cumulative buckets contain the two observations, sums and counts are exact.
    counts = {name: value for name, value in changed.items() if "_bucket" not in name}
    assert counts == {
        "ingot_requests_finished_total[('reason', 'stop')]": 2,
        "ingot_requests_refused_total[('error', 'QueueFull')]": 1,
        "ingot_generated_tokens_total[]": 7,
        "ingot_time_to_first_token_seconds_count[('cache', 'partial')]": 1,
        "ingot_time_to_first_token_seconds_sum[('cache', 'partial')]": pytest.approx(0.003),
        "ingot_request_queue_time_seconds_count[]": 1,
        "ingot_request_queue_time_seconds_sum[]": 1000,
    }
    first_token = [name for name in changed if "first_token_seconds_bucket" in name]
    assert len(first_token) == sum(bound >= 0.003 for bound in recorder.time_to_first_token["partial"].bounds) + 1
    assert [name for name in changed if "queue_time_seconds_bucket" in name] == [
        "ingot_request_queue_time_seconds_bucket[('le', '+Inf')]"]
    assert after["ingot_kv_cache_usage_ratio[]"] == 0.25
    assert after["ingot_prefix_cache_miss_total[('reason', 'evicted')]"] == 10


def test_health_is_told(address: str, runner: ScriptedRunner) -> None:
    for health, values in (("serving", (1, 0)), ("draining", (1, 1)), ("failed", (0, 0))):
        runner.health = health  # type: ignore[assignment]
        told = samples(page(address))
        assert (told["ingot_engine_healthy[]"], told["ingot_engine_draining[]"]) == values


def test_histograms_and_names_of_any_kind() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    strange = 'a"b\\c\nd'
    lines = list(_lines(Family("x_seconds", "histogram", strange, [({"model": strange}, histogram)])))
    family, = text_string_to_metric_families("\n".join(lines) + "\n")
    assert [(sample.labels.get("le"), sample.value) for sample in family.samples] == [
        ("0.1", 2), ("1.0", 3), ("+Inf", 4), (None, pytest.approx(7.65)), (None, 4)]
    assert all(sample.labels["model"] == strange for sample in family.samples)
