"""Sharing, copying, publishing: what the scheduler and the executor build on."""

import pytest

from ingot.runtime.kv import CacheKey, KvCache, KvSequence
from tests.runtime.kv.memory import Memory
from tests.runtime.kv.sequences import cache, compute, generate, num_cached, release, start


def test_whole_blocks_are_shared_and_the_matching_part_of_a_block_is_copied() -> None:
    kv = KvCache(10, 4)
    first = start(kv, range(10))
    second = KvSequence([0, 1, 2, 3, 4, 5, 9, 9])
    assert kv.acquire(second, num_new=8)
    assert second.num_cached == second.num_computed == 6
    assert second.tables[0][0] == first.tables[0][0]
    assert second.tables[0][1] != first.tables[0][1]
    assert kv.take_copies() == [(first.tables[0][1], second.tables[0][1])]
    assert kv.take_copies() == []
    kv.check()


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    kv = KvCache(10, 4)
    cache(kv, range(8))
    again = start(kv, range(8), 7)
    assert again.num_cached == 7
    assert len(kv.take_copies()) == 1
    single = start(kv, [0], 0)
    assert single.num_cached == 0


def test_without_partial_reuse_only_whole_blocks_are_found() -> None:
    kv = KvCache(10, 4, enable_partial_reuse=False)
    cache(kv, range(11))
    assert num_cached(kv, range(11)) == 8
    assert kv.probe(KvSequence(list(range(8)))).num_cached == 4
    start(kv, range(11))
    assert kv.take_copies() == []


def test_without_reuse_nothing_is_found() -> None:
    kv = KvCache(4, 4, enable_reuse=False)
    cache(kv, range(11))
    assert num_cached(kv, range(11)) == 0
    again = start(kv, range(11))
    assert again.num_cached == 0 and kv.usage().num_used == 3
    release(kv, again)
    assert kv.usage().num_free == 4 and kv.stats.miss_tokens["disabled"] == 22


def test_a_limit_bounds_what_is_reused() -> None:
    kv = KvCache(20, 4)
    cache(kv, range(12))
    for limit, expected in [(0, 0), (4, 4), (6, 6), (99, 11)]:
        seq = KvSequence(list(range(12)))
        assert kv.acquire(seq, limit=limit)
        assert seq.num_cached == expected
        release(kv, seq)


def test_the_partly_filled_block_of_a_finished_sequence_is_reused() -> None:
    kv = KvCache(10, 4)
    seq = start(kv, range(5))
    generate(kv, seq, [5, 6, 7, 8, 9])
    seq.tokens.append(10)  # sampled last, never computed
    release(kv, seq)
    assert num_cached(kv, range(11)) == 10
    assert num_cached(kv, range(9)) == 9


def test_a_longer_block_replaces_the_tails_that_it_begins_with() -> None:
    kv = KvCache(20, 4)
    cache(kv, range(5))
    cache(kv, range(6))
    assert kv.usage().num_cached == 2
    cache(kv, range(8))
    assert kv.usage().num_cached == 2
    cache(kv, range(7))
    assert kv.usage().num_cached == 2 and num_cached(kv, range(8)) == 8


def test_nothing_is_published_before_it_is_written() -> None:
    kv = KvCache(20, 4)
    seq = start(kv, range(11), 0)
    assert num_cached(kv, range(11)) == 0
    compute(kv, seq, 3)
    assert num_cached(kv, range(11)) == 0
    compute(kv, seq, 7)
    assert num_cached(kv, range(11)) == 4
    compute(kv, seq, 11)
    assert num_cached(kv, range(11)) == 11


def test_the_block_being_filled_is_published_as_far_as_the_prompt_went() -> None:
    kv = KvCache(20, 4)
    seq = start(kv, range(6))
    generate(kv, seq, [6])
    assert num_cached(kv, range(8)) == 6
    generate(kv, seq, [7])
    assert num_cached(kv, range(8)) == 8


def test_what_is_not_to_be_kept_is_freed() -> None:
    kv = KvCache(20, 4)
    seq = start(kv, range(6))
    generate(kv, seq, [6])
    release(kv, seq, publish_tail=False)
    assert num_cached(kv, range(8)) == 4
    assert (kv.usage().num_cached, kv.usage().num_free) == (1, 19)


def test_sequences_of_one_prompt_share_its_blocks() -> None:
    """n > 1: the first computes the prompt, the others one token each."""
    kv = KvCache(20, 4)
    memory = Memory(kv)
    sequences = [KvSequence(list(range(10))) for _ in range(4)]
    assert kv.acquire(sequences[0], num_new=10)
    memory.step([(sequences[0], 10)])
    for seq in sequences[1:]:
        assert kv.acquire(seq, num_new=10)
        assert seq.num_cached == 9 and seq.tables[0][:2] == sequences[0].tables[0][:2]
    assert kv.usage().num_used == 2 + 4
    memory.step([(seq, 1) for seq in sequences[1:]])
    for index, seq in enumerate(sequences):
        seq.tokens += [100 + index]
        assert kv.grow(seq, 11)
    memory.step([(seq, 1) for seq in sequences])
    kv.check()


def test_of_two_that_compute_the_same_one_publishes_and_tables_stay_as_they_are() -> None:
    kv = KvCache(20, 4)
    first, second = start(kv, range(10), 0), start(kv, range(10), 0)
    tables = [list(first.tables[0]), list(second.tables[0])]
    compute(kv, first, 6)
    compute(kv, second, 10)
    assert not second.publishes and first.publishes
    compute(kv, first, 10)
    assert [first.tables[0], second.tables[0]] == tables
    generate(kv, second, [50, 51])
    assert num_cached(kv, [*range(10), 50, 51]) == 10
    release(kv, second)
    assert num_cached(kv, [*range(10), 50, 51]) == 12
    release(kv, first)
    assert kv.usage().num_free == 20 - 3


def test_what_nobody_uses_gives_way_to_the_same_block_of_a_running_sequence() -> None:
    kv = KvCache(20, 4)
    first, second = start(kv, range(9), 0), start(kv, range(9), 0)
    compute(kv, first, 9)
    release(kv, first)
    compute(kv, second, 9)
    assert second.publishes
    assert kv.usage().num_used == 3 and kv.usage().num_cached == 0


def test_a_paused_sequence_finds_what_it_computed() -> None:
    kv = KvCache(20, 4)
    seq = start(kv, range(6))
    generate(kv, seq, [6, 7, 8])
    seq.tokens.append(9)
    release(kv, seq)
    assert kv.acquire(seq, num_new=10)
    assert seq.num_cached == 9 and seq.num_prompt == 6
    assert kv.stats.queried_tokens == 6 and kv.stats.resumed_hit_tokens == 9


def test_a_private_sequence_neither_reuses_nor_publishes() -> None:
    kv = KvCache(20, 4)
    cache(kv, range(8))
    queried = kv.stats.queried_tokens
    seq = KvSequence(list(range(12)))
    assert kv.acquire(seq, num_new=12, private=True)
    assert seq.num_cached == 0
    compute(kv, seq, 12)
    assert num_cached(kv, range(12)) == 8 and kv.stats.queried_tokens == queried
    release(kv, seq)
    assert kv.usage().num_cached == 2


def test_salt_and_adapter_keep_prefixes_apart() -> None:
    kv = KvCache(40, 4)
    keys = [CacheKey(), CacheKey("a"), CacheKey(1), CacheKey("1"), CacheKey("a", 1), CacheKey(None, 1)]
    for key in keys:
        assert num_cached(kv, range(8), key) == 0
        cache(kv, range(8), key)
    for key in keys:
        assert num_cached(kv, range(8), key) == 8


def test_growing_is_all_or_nothing() -> None:
    kv = KvCache(5, 4, (None, None))
    seq = start(kv, range(4))
    assert kv.grow(seq, 8) and [len(table) for table in seq.tables] == [2, 2]
    assert not kv.grow(seq, 9)
    assert [len(table) for table in seq.tables] == [2, 2] and kv.num_available == 1
    kv.check()


def test_admission_is_all_or_nothing_and_leaves_what_must_be_spared() -> None:
    kv = KvCache(5, 4)
    cache(kv, range(8))
    seq = KvSequence([*range(8), *range(50, 62)])
    assert not kv.acquire(seq, num_new=12, spare=1)
    assert not seq.is_active and kv.usage().num_cached == 2 and kv.stats.queried_tokens == 8
    assert kv.acquire(seq, num_new=12)
    assert kv.num_available == 0


def test_a_copy_is_given_up_when_its_source_is_the_last_block() -> None:
    kv = KvCache(3, 4)
    cache(kv, range(4))
    other = start(kv, [9, 9, 9, 9, 9])
    seq = KvSequence([0, 1, 2, 9])
    assert kv.probe(seq).num_cached == 3
    assert kv.acquire(seq, num_new=4)
    assert seq.num_cached == 0 and kv.take_copies() == []
    kv.check()
    release(kv, other)


def test_clear_forgets_what_nobody_uses() -> None:
    kv = KvCache(10, 4, num_host_blocks=2)
    cache(kv, [7] * 9)
    seq = start(kv, range(9))
    assert kv.clear() == 3
    assert kv.usage().num_cached == 0 and num_cached(kv, [7] * 9) == 0 and num_cached(kv, range(9)) == 9
    release(kv, seq)


@pytest.mark.parametrize("reserves_first", [True, False])
def test_all_sequences_reserve_or_none(reserves_first: bool) -> None:
    kv = KvCache(10, 4)
    start(kv, range(4), reserve_tokens=8 if reserves_first else 0)
    with pytest.raises(AssertionError, match="all sequences reserve, or none"):
        kv.acquire(KvSequence([1]), reserve_tokens=0 if reserves_first else 8)
