"""Room for the KV cache, from what the manifest says and what the machine has."""

from typing import Any

import pytest

from ingot.runtime.errors import WorkFailed
from ingot.runtime.kv_memory import KvCacheSizeError, kv_cache_tokens, most_useful_tokens

LIMITS = {"max_batch_size": 4, "max_num_tokens": 16, "max_seq_len": 48}


def manifest(**memory: int) -> dict[str, Any]:
    return {"limits": LIMITS, "memory": {"weights_bytes": 1000, "arena_bytes": 200, "kv_bytes_per_token": 10, **memory}}


def test_a_fraction_of_what_weights_and_arena_leave() -> None:
    assert kv_cache_tokens(manifest(), 0.5, available_bytes=lambda: 5200) == 200
    assert kv_cache_tokens(manifest(), 1.0, available_bytes=lambda: 5209) == 400


def test_what_else_a_gpu_holds() -> None:
    """Workspace, a step's arrays: the manifest tells the sum."""
    assert kv_cache_tokens(manifest(fixed_bytes=3200), 0.5, available_bytes=lambda: 5200) == 100


def test_no_room() -> None:
    with pytest.raises(WorkFailed, match="1201 bytes are free, weights and arena take 1200, and a token takes 10"):
        kv_cache_tokens(manifest(), 0.5, available_bytes=lambda: 1201)
    with pytest.raises(WorkFailed):
        kv_cache_tokens(manifest(), 0.5, available_bytes=lambda: 100)


@pytest.mark.parametrize("fraction", [0, -0.5, 1.01, float("nan")])
def test_fractions_that_are_none(fraction: float) -> None:
    with pytest.raises(KvCacheSizeError, match=r"--x is .*; expected above 0 and at most 1"):
        kv_cache_tokens(manifest(), fraction, "--x")


def test_where_nothing_is_known_the_largest_batch_counts() -> None:
    assert most_useful_tokens(manifest()) == 192
    assert kv_cache_tokens(manifest(), 0.5, available_bytes=lambda: 0) == 192
    assert kv_cache_tokens(manifest(kv_bytes_per_token=0), 0.5, available_bytes=lambda: 10**9) == 192
