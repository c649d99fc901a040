"""Memory while two engines are there: the KV cache and host tier beside the old engine, which is freed at the end."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from ingot.runtime.executor.overlap import NoRoom, kv_beside
from ingot.runtime.kv_memory import kv_cache_tokens
from ingot.runtime.store.store import Store
from tests.runtime.mock_engine import LIMITS, manifest
from tests.runtime.servers.swap_server import OPTIONS, Swapping, answer_of, refusal, swapping, swaps, until_freed


@pytest.fixture
def server(filled: tuple[Store, dict[str, str]]) -> Iterator[Swapping]:
    with swapping(*filled) as running:
        yield running


def test_the_host_tier_of_a_new_engine(filled: tuple[Store, dict[str, str]]) -> None:
    with swapping(*filled, replace(OPTIONS, host_kv_tokens=96)) as server:
        block = server.info().kv_cache.block_size
        assert server.info().kv_cache.num_host_blocks == 96 // block
        server.load("b")
        assert server.info().kv_cache.num_host_blocks == 96 // block
        server.load("c", host_kv_tokens=48)
        assert server.info().kv_cache.num_host_blocks == 48 // block
        assert server.load("a", host_kv_tokens=0).hash == server.hashes["a"]
        assert server.info().kv_cache.num_host_blocks == 0


def test_the_old_engine_is_freed(server: Swapping) -> None:
    """All of it: weights, KV cache, threads, descriptors."""
    folder = Path("/proc/self/fd")
    threads, descriptors = threading.active_count(), len(list(folder.iterdir()))
    freed = []
    for name in ("b", "a", "c", "a"):
        program = server.context.current.engine._executor._loop._program  # type: ignore[attr-defined]
        freed.append(weakref.ref(program))
        del program
        server.load(name)
        server.ask()
        until_freed(server)
    end = time.monotonic() + 20
    while any(each() is not None for each in freed):
        assert time.monotonic() < end, "a replaced engine is still there"
        time.sleep(0.01)
    gc.collect()
    assert threading.active_count() <= threads + 4 and len(list(folder.iterdir())) <= descriptors + 2


def test_kv_memory_beside_the_old_engine(filled: tuple[Store, dict[str, str]]) -> None:
    facts = manifest()
    token = facts["memory"]["kv_bytes_per_token"]
    fixed = facts["memory"]["weights_bytes"] + facts["memory"]["arena_bytes"]

    def bytes_for(tokens: int) -> int:
        return int((fixed + tokens * token) / 0.95) + 2

    with swapping(*filled) as server:
        server.available[0] = bytes_for(1000)
        assert (server.load("b").kv_cache_tokens, server.info().kv_cache.num_blocks) == (192, 48)
        server.available[0] = bytes_for(120)  # less than 192, more than half of it
        done = server.load("a")
        assert 96 <= done.kv_cache_tokens <= 120 and done.wanted_kv_tokens == 192
        assert server.ask() == (server.hashes["a"], answer_of("a"))
        server.available[0] = bytes_for(80)
        code, message = refusal(lambda: server.load("b"))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED and "at least 96 are wanted (50% of 192)" in message
        assert f"{server.available[0]:,} bytes are free" in message and "80 tokens" in message
        assert server.load("b", kv_cache_tokens=64).kv_cache_tokens == 64
        assert refusal(lambda: server.load("a", kv_cache_tokens=96))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refusal(lambda: server.load("a", kv_cache_tokens=0))[0] == grpc.StatusCode.INVALID_ARGUMENT
        server.available[0] = bytes_for(1000)
        assert server.load("a").kv_cache_tokens == 192, "it does not shrink for good"
        assert swaps(server) == {"done": 4, "no_room": 2}


def test_the_sums_of_memory() -> None:
    sizes = {"memory": {"weights_bytes": 1000, "arena_bytes": 100, "kv_bytes_per_token": 10}, "limits": LIMITS}
    assert kv_beside(sizes, 50, 0, 0.5, "x", lambda: 2000) == 50
    assert kv_beside(sizes, 100, 0, 0.5, "x", lambda: 2000) == (2000 - 100 - 1100) // 10 == 80
    assert kv_beside(sizes, 100, 20, 0.5, "x", lambda: 2000) == 60
    with pytest.raises(NoRoom, match="60 tokens of KV cache; at least 90 are wanted"):
        kv_beside(sizes, 100, 20, 0.9, "x", lambda: 2000)
    roomy = {**sizes, "memory": {**sizes["memory"], "lora_bytes": 300}}
    assert kv_beside(roomy, 100, 0, 0.5, "x", lambda: 2000) == 50
    with pytest.raises(NoRoom, match="300 for LoRA adapters, 0 for 0 tokens"):
        kv_beside(roomy, 100, 0, 0.9, "x", lambda: 2000)
    with pytest.raises(NoRoom, match="0 tokens"):
        kv_beside(sizes, 100, 0, 0.5, "x", lambda: 500)
    assert kv_beside(sizes, 100, 0, 0.5, "x", lambda: 0) == 100  # a system that does not tell
    assert kv_cache_tokens(sizes, 0.5, available_bytes=lambda: 2000) == 45


def test_every_engine_gets_its_own_prefix_cache(server: Swapping) -> None:
    prompt = list(range(40, 60))
    for name in ("a", "b", "a"):
        server.load(name)
        for _ in range(2):
            assert server.ask(prompt, 5) == (server.hashes[name], answer_of(name, prompt, 5))
