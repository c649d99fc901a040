"""Blocks that give way on the device move to host memory, and come back when they are needed."""

from ingot.runtime.kv import KvCache, KvSequence, RetentionRange
from tests.runtime.kv.memory import Memory
from tests.runtime.kv.sequences import cache, fill, num_cached, prompt, release, start


def test_evicted_blocks_move_to_the_host_and_back() -> None:
    kv = KvCache(4, 4, num_host_blocks=4)
    cache(kv, range(16))
    fill(kv, 3)
    assert kv.take_copies() == [(3, 4), (2, 5), (1, 6)]
    assert kv.usage().num_host_cached == 3 and kv.usage().num_cached == 1
    probe = kv.probe(KvSequence(list(range(14))))
    assert (probe.num_cached, probe.num_host) == (13, 9)
    seq = KvSequence(list(range(14)))
    assert kv.acquire(seq, num_new=1)
    assert seq.num_cached == 13 and max(seq.tables[0]) < 4
    # Two whole blocks come back; the partly matching one is copied straight from the host.
    assert kv.take_copies() == [(6, seq.tables[0][1]), (5, seq.tables[0][2]), (4, seq.tables[0][3])]
    kv.check()
    assert (kv.stats.offloaded_blocks, kv.stats.onboarded_blocks, kv.stats.host_hit_tokens) == (3, 2, 9)
    assert kv.stats.evicted_blocks == 3 and kv.stats.host_evicted_blocks == 0


def test_contents_survive_when_both_tiers_are_full() -> None:
    kv = KvCache(6, 4, num_host_blocks=6)
    memory = Memory(kv)
    prompts = [[token] * 9 + list(range(3)) for token in range(4)]
    for _ in range(3):
        for tokens in prompts:
            seq = KvSequence(list(tokens))
            assert kv.acquire(seq, num_new=12)
            memory.step([(seq, 12 - seq.num_cached)])
            release(kv, seq)
    for tokens in (prompts[3], prompts[2], prompts[3], prompts[2]):
        seq = KvSequence(list(tokens))
        assert kv.acquire(seq, num_new=12)
        assert seq.num_cached > 0
        memory.step([(seq, 12 - seq.num_cached)])
        release(kv, seq)
    assert kv.stats.onboarded_blocks > 0 and kv.stats.host_evicted_blocks > 0


def test_the_host_tier_evicts_by_its_own_order() -> None:
    kv = KvCache(2, 4, num_host_blocks=4)
    cache(kv, prompt(1), retention=[RetentionRange(0, None, 80)])
    cache(kv, prompt(2))
    cache(kv, prompt(3))  # moves 2 to the host, where 1 is
    assert [num_cached(kv, prompt(token)) for token in (1, 2, 3)] == [8, 8, 8]
    cache(kv, prompt(4))
    assert [num_cached(kv, prompt(token)) for token in (1, 2, 3, 4)] == [8, 0, 8, 8]


def test_a_block_does_not_displace_one_of_higher_priority() -> None:
    kv = KvCache(2, 4, num_host_blocks=2)
    cache(kv, prompt(1), retention=[RetentionRange(0, None, 80)])
    cache(kv, prompt(2))
    assert kv.usage().num_host_cached == 2
    cache(kv, prompt(3))
    assert [num_cached(kv, prompt(token)) for token in (1, 2, 3)] == [8, 0, 8]
    cache(kv, prompt(4), retention=[RetentionRange(0, None, 90)])
    cache(kv, prompt(5))
    assert [num_cached(kv, prompt(token)) for token in (1, 3, 4, 5)] == [0, 0, 8, 8]


def test_a_block_computed_again_replaces_its_copy_on_the_host() -> None:
    kv = KvCache(4, 4, num_host_blocks=4)
    cache(kv, prompt(1))
    fill(kv, 4)
    assert kv.usage().num_host_cached == 2
    seq = KvSequence(prompt(1))
    assert kv.acquire(seq, limit=0, num_new=8)
    kv.advance(seq, 8)
    kv.check()
    assert kv.usage().num_host_cached == 0 and kv.usage().num_used == 2


def test_room_for_what_comes_back_is_counted() -> None:
    kv = KvCache(4, 4, num_host_blocks=4)
    cache(kv, range(12))
    other = start(kv, prompt(9, blocks=3))
    kv.take_copies()
    seq = KvSequence(list(range(13)))
    assert kv.probe(seq).num_host == 8
    assert not kv.acquire(seq)  # one block on the device, two to come back, and only one can be had
    assert kv.take_copies() == [] and kv.usage().num_host_cached == 2
    release(kv, other)
    assert kv.acquire(seq, num_new=1) and seq.num_cached == 12
    kv.check()
