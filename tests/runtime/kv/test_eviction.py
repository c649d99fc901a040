"""Who gives way: leaves first, the lowest priority first, then what was used longest ago."""

from ingot.runtime.kv import KvCache, KvSequence, RetentionRange
from ingot.runtime.kv.part import EvictionQueue
from tests.runtime.kv.sequences import Clock, cache, compute, fill, generate, num_cached, prompt, release, start


def test_leaves_go_before_what_they_hang_on() -> None:
    kv = KvCache(4, 4)
    cache(kv, range(16))
    for left in (3, 2, 1, 0):
        fill(kv, 4 - left)
        assert num_cached(kv, range(16)) == 4 * left


def test_the_one_used_longest_ago_goes_first() -> None:
    kv = KvCache(6, 4)
    for token in (1, 2, 3):
        cache(kv, prompt(token))
    release(kv, start(kv, prompt(1), 7))  # used again: 2 is now the oldest
    fill(kv, 2)
    assert [num_cached(kv, prompt(token)) for token in (1, 2, 3)] == [8, 0, 8]
    fill(kv, 4)
    assert [num_cached(kv, prompt(token)) for token in (1, 2, 3)] == [8, 0, 0]


def test_a_lower_priority_goes_before_age() -> None:
    kv = KvCache(6, 4)
    cache(kv, prompt(1), retention=[RetentionRange(0, None, 80)])
    cache(kv, prompt(2))
    cache(kv, prompt(3), retention=[RetentionRange(0, None, 10)])
    fill(kv, 2)
    assert [num_cached(kv, prompt(token)) for token in (1, 2, 3)] == [8, 8, 0]
    fill(kv, 4)
    assert [num_cached(kv, prompt(token)) for token in (1, 2, 3)] == [8, 0, 0]


def test_a_range_covers_the_blocks_whose_first_token_it_covers() -> None:
    kv = KvCache(10, 4)
    ranges = [RetentionRange(1, 9, 90), RetentionRange(0, 6, 70), RetentionRange(13, None, 20)]
    seq = start(kv, range(18), retention=ranges)
    assert [node.priority for node in seq.path] == [70, 90, 90, 35]
    assert seq.tail is not None and seq.tail.priority == 20


def test_the_answer_has_its_own_priority() -> None:
    kv = KvCache(10, 4)
    seq = start(kv, range(4), retention=[RetentionRange(0, None, 90)], decode_priority=5)
    generate(kv, seq, [4, 5, 6, 7, 8])
    path = list(seq.path)
    release(kv, seq)
    assert [node.priority for node in path] == [90, 5]


def test_a_request_sets_the_priority_of_what_it_shares() -> None:
    kv = KvCache(10, 4)
    cache(kv, range(8))
    seq = start(kv, range(9), retention=[RetentionRange(0, 4, 90)])
    assert [node.priority for node in seq.path] == [90, 35]
    release(kv, seq)
    seq = start(kv, range(9))  # asks for nothing
    assert [node.priority for node in seq.path] == [90, 35]


def test_what_is_computed_again_has_the_priority_that_is_asked_for_then() -> None:
    kv = KvCache(10, 4)
    high = [RetentionRange(0, None, 90)]
    first, waiting = start(kv, range(4), 0, retention=high), start(kv, range(9), 0)
    compute(kv, first, 4)
    release(kv, first)
    assert kv.clear() == 1  # the node is still there, as `waiting` is going to compute it
    compute(kv, waiting, 9)
    assert [node.priority for node in waiting.path] == [35, 35]
    release(kv, waiting)
    again = start(kv, range(9), 8, retention=high)
    assert [node.priority for node in again.path] == [90, 90]


def test_a_priority_ends_so_long_after_the_last_use() -> None:
    clock = Clock()
    kv = KvCache(4, 4, clock=clock)
    cache(kv, prompt(1), retention=[RetentionRange(0, None, 90, duration_s=10)])
    cache(kv, prompt(2))
    clock.now = 9
    release(kv, start(kv, prompt(1), 7))
    clock.now = 18
    fill(kv, 2)
    assert [num_cached(kv, prompt(token)) for token in (1, 2)] == [8, 0]
    cache(kv, prompt(2))
    clock.now = 19
    fill(kv, 2)  # 1 has the default priority again, and is older
    assert [num_cached(kv, prompt(token)) for token in (1, 2)] == [0, 8]


def test_a_low_priority_rises_when_its_time_is_over() -> None:
    clock = Clock()
    kv = KvCache(4, 4, clock=clock)
    cache(kv, prompt(1))
    cache(kv, prompt(2), retention=[RetentionRange(0, None, 1, duration_s=10)])
    clock.now = 10
    fill(kv, 2)
    assert [num_cached(kv, prompt(token)) for token in (1, 2)] == [0, 8]


def test_blocks_in_use_are_never_evicted() -> None:
    kv = KvCache(6, 4)
    seq = start(kv, prompt(1))
    cache(kv, [*prompt(1), *prompt(2)])
    other = KvSequence(prompt(3, blocks=5))
    assert not kv.acquire(other, num_new=20)
    assert kv.acquire(other, num_new=16)
    assert num_cached(kv, prompt(1)) == 8
    compute(kv, seq, 8)


def test_the_queue_forgets_entries_that_are_out_of_date() -> None:
    kv = KvCache(4, 4)
    for _ in range(3 * EvictionQueue.MIN_COMPACTION):
        seq = KvSequence(prompt(1))
        assert kv.acquire(seq, num_new=8, limit=4)
        kv.advance(seq, 8)
        kv.release(seq)
    assert len(kv.store.queues[0]._heap) <= EvictionQueue.MIN_COMPACTION
    kv.check()
    assert kv.stats.evicted_blocks == 0
