"""Why prompt tokens had to be computed. In each test the reasons and the hits add up to the tokens asked for."""

from collections.abc import Iterator

import pytest

from ingot.runtime.kv import CacheKey, KvCache, KvSequence
from ingot.runtime.kv.misses import EvictedPrefixes
from ingot.runtime.kv.sequence import DEFAULT_KEY
from tests.runtime.kv.sequences import cache, compute, fill, only_path, release, start

caches: list[KvCache] = []


def make(num_blocks: int = 20, enable_reuse: bool = True, enable_partial_reuse: bool = True) -> KvCache:
    caches.append(KvCache(num_blocks, 4, enable_reuse=enable_reuse, enable_partial_reuse=enable_partial_reuse))
    return caches[-1]


@pytest.fixture(autouse=True)
def counters_add_up() -> Iterator[None]:
    caches.clear()
    yield
    for kv in caches:
        stats = kv.stats
        assert stats.queried_tokens == stats.hit_tokens + sum(stats.miss_tokens.values())
        assert min(stats.miss_tokens.values()) >= 0


def ask(kv: KvCache, tokens: list[int], key: CacheKey = DEFAULT_KEY, limit: int | None = None) -> dict[str, int]:
    """Reasons that a prompt adds, and its hits; it leaves nothing behind."""
    before, hits = dict(kv.stats.miss_tokens), kv.stats.hit_tokens
    seq = KvSequence(tokens, key)
    assert kv.acquire(seq, limit=limit)
    release(kv, seq, publish_tail=False)
    added = {reason: count - before[reason] for reason, count in kv.stats.miss_tokens.items()}
    return {reason: count for reason, count in {**added, "hit": kv.stats.hit_tokens - hits}.items() if count}


def test_cold_and_hit_and_the_last_token() -> None:
    kv = make()
    assert ask(kv, list(range(10))) == {"cold": 10}
    cache(kv, range(10))
    assert ask(kv, list(range(12))) == {"hit": 10, "cold": 2}
    assert ask(kv, list(range(10))) == {"hit": 9, "recomputed_last": 1}


def test_evicted() -> None:
    kv = make(4)
    cache(kv, range(16))
    fill(kv, 2)
    assert ask(kv, [*range(16), 50, 51]) == {"hit": 8, "evicted": 8, "cold": 2}
    assert ask(kv, [*range(12), 50, 51]) == {"hit": 8, "evicted": 4, "cold": 2}
    cache(kv, range(16))
    assert ask(kv, [*range(16), 50]) == {"hit": 16, "cold": 1}


def test_partly_matching_blocks() -> None:
    kv = make(enable_partial_reuse=False)
    cache(kv, range(11))
    assert ask(kv, [*range(10), 50]) == {"hit": 8, "partial_block": 2, "cold": 1}
    assert ask(kv, list(range(8))) == {"hit": 4, "partial_block": 3, "recomputed_last": 1}


def test_salt_and_adapter() -> None:
    kv = make()
    cache(kv, range(9), CacheKey("a"))
    assert ask(kv, list(range(12)), CacheKey("b")) == {"salt": 8, "cold": 4}
    assert ask(kv, list(range(12)), CacheKey("a", 1)) == {"lora": 8, "cold": 4}
    cache(kv, range(5), CacheKey("b", 1))
    assert ask(kv, list(range(12)), CacheKey("b")) == {"salt": 8, "cold": 4}
    assert ask(kv, [*range(3), *range(50, 60)], CacheKey("b")) == {"cold": 13}


def test_disabled() -> None:
    kv = make(enable_reuse=False)
    assert ask(kv, list(range(12))) == {"disabled": 12}
    kv = make()
    cache(kv, range(12))
    assert ask(kv, list(range(12)), limit=0) == {"disabled": 11, "recomputed_last": 1}
    assert ask(kv, list(range(14)), limit=5) == {"hit": 5, "disabled": 7, "cold": 2}


def test_a_look_up_is_counted_once() -> None:
    kv = make(4)
    other = start(kv, range(12))
    seq = KvSequence([50] * 8)
    assert not kv.acquire(seq, num_new=8)
    assert kv.stats.queried_tokens == 12
    release(kv, other)
    assert kv.acquire(seq, num_new=8)
    compute(kv, seq, 8)
    release(kv, seq)
    assert kv.acquire(seq, num_new=8)
    assert kv.stats.queried_tokens == 20


def test_lost_blocks_of_windows_count_as_evicted() -> None:
    kv = KvCache(20, 4, (None, 6))
    caches.append(kv)
    cache(kv, range(16))
    part = only_path(kv)[-1].parts[1]
    assert part is not None
    kv.store.remove(part)
    assert ask(kv, [*range(16), 50]) == {"hit": 12, "evicted": 4, "cold": 1}


def test_evicted_prefixes_are_remembered_up_to_a_number() -> None:
    evicted = EvictedPrefixes(capacity=2)
    for chain in (1, 2, 1, 3):
        evicted.remember(chain)
    assert [chain in evicted for chain in (1, 2, 3)] == [True, False, True]
