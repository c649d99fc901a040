"""Engines with their executors: settings resolved, answers right, with a host tier too."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ingot.runtime.errors import IngotError
from ingot.runtime.executor import loading
from ingot.runtime.executor.loading import EngineOptions, LoadedEngine
from ingot.runtime.kv_memory import kv_cache_tokens
from ingot.runtime.scheduler import ChunkingPolicy, SchedulerPolicy
from tests.runtime.executor.null_engine import Sink, request
from tests.runtime.mock_engine import BLOCK_SIZE, reference_greedy


def test_the_engines_own_limits(mock_path: Path) -> None:
    with LoadedEngine(mock_path, EngineOptions(kv_cache_tokens=100, num_workers=1)) as engine:
        assert engine.facts() == {
            "scheduler_policy": "GUARANTEED_NO_EVICT", "context_chunking": "FIRST_COME_FIRST_SERVED",
            "max_batch_size": 4, "max_num_tokens": 16, "max_seq_len": 48, "max_queue_size": 512, "prefix_reuse": True,
                "speculative_tokens": 0,
            "kv_cache_tokens": 100, "kv_cache_bytes": 100 * engine.file.manifest["memory"]["kv_bytes_per_token"],
            "host_kv_tokens": 0, "host_kv_bytes": 0, "guaranteed_requests": 2}
        assert engine.vocab_size == 258 and engine.tokenizer is not None


def test_lowered_limits_are_those_that_count(mock_path: Path) -> None:
    options = EngineOptions(SchedulerPolicy.MAX_UTILIZATION, ChunkingPolicy.EQUAL_PROGRESS, max_batch_size=2,
                            max_num_tokens=8, max_seq_len=20, max_queue_size=3, kv_cache_tokens=100, num_workers=1)
    sink = Sink()
    with LoadedEngine(mock_path, options) as engine:
        facts = engine.facts()
        assert (facts["max_batch_size"], facts["max_num_tokens"], facts["max_seq_len"]) == (2, 8, 20)
        assert (facts["scheduler_policy"], facts["guaranteed_requests"]) == ("MAX_UTILIZATION", 5)
        engine.executor.submit(request("a", [5] * 16, 30), sink)
        assert sink.finished("a").token_ids == reference_greedy([5] * 16, 4)
        with pytest.raises(IngotError, match="sequences of 20 at most"):
            engine.executor.submit(request("b", [5] * 21), sink)


@pytest.mark.parametrize("reuse", [True, False])
def test_prefixes_from_the_host_tier(mock_path: Path, reuse: bool) -> None:
    """The device has room for one request: the first prompt's blocks go to the host, and come back."""
    options = EngineOptions(kv_cache_tokens=48, host_kv_tokens=96, num_workers=1, prefix_reuse=reuse)
    first, second = list(range(10, 34)), list(range(100, 140))
    sink = Sink()
    with LoadedEngine(mock_path, options) as engine:
        assert engine.facts()["host_kv_tokens"] == 96
        for name, prompt in (("a", first), ("b", second), ("c", first)):
            engine.executor.submit(request(name, prompt, 5), sink)
            assert sink.finished(name).token_ids == reference_greedy(prompt, 5)
        stats = engine.kv.stats
    if reuse:
        assert stats.offloaded_blocks > 0 and stats.onboarded_blocks > 0
        assert len(first) - BLOCK_SIZE <= sink.of("c")[0].num_cached_tokens == stats.hit_tokens
    else:
        assert (stats.hit_tokens, sink.of("c")[0].num_cached_tokens) == (0, 0)
        assert stats.miss_tokens["disabled"] == stats.queried_tokens


def test_a_closed_engine_holds_no_memory_of_its_device(mock_path: Path) -> None:
    """Whoever still has the engine, and without the help of the garbage collector, which a server may have frozen."""
    loaded = LoadedEngine(mock_path, EngineOptions(kv_cache_tokens=100, num_workers=1), extent="full")
    program, sink = weakref.ref(loaded._program), Sink()
    loaded.executor.on_health(lambda health: None)
    loaded.executor.submit(request("a", [5] * 16, 3), sink)
    sink.finished("a")
    gc.disable()
    try:
        loaded.close()
        loaded.close()
        assert program() is None and loaded.executor.health == "stopped"
        assert loaded.executor.recorder.steps > 0 and loaded.kv.stats.queried_tokens == 16  # to be added to others'
    finally:
        gc.enable()


@pytest.mark.parametrize("options", [
    {"max_batch_size": 5}, {"max_queue_size": 0}, {"log_requests": "/nowhere/log"}, {"kv_cache_tokens": 0},
])  # fmt: skip
def test_what_cannot_be_loaded_leaves_nothing_open(mock_path: Path, options: dict[str, Any]) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(IngotError):
        LoadedEngine(mock_path, EngineOptions(num_workers=1, **options))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(("device", "taken"), [(None, 0), ("emulator", 6000)])
def test_the_host_tier_beside_what_is_in_the_hosts_memory(monkeypatch: pytest.MonkeyPatch, device: str | None,
                                                          taken: int) -> None:
    """Weights of a GPU engine are not, unless it runs in the emulator."""
    memory = {"weights_bytes": 5000, "arena_bytes": 500, "fixed_bytes": 6000, "kv_bytes_per_token": 10}
    manifest = {"target": {"name": "h200", "kind": "cuda", "isa": "sm_90a"}, "memory": memory}
    engine = SimpleNamespace(manifest=manifest, path="x.engine")
    monkeypatch.setattr(loading, "kv_cache_tokens", lambda manifest, fraction, option: kv_cache_tokens(
        manifest, fraction, option, available_bytes=lambda: 10_000))
    options = EngineOptions(host_cache_fraction=0.5, device=device)
    assert loading._host_kv_tokens(engine, options) == (10_000 - taken) // 20  # type: ignore[arg-type]
