"""What a sequence learns about others that are just computing its prefix."""

from ingot.runtime.kv import CacheKey, KvCache, KvSequence
from tests.runtime.kv.sequences import cache, compute, generate, release, start


def test_waiting_gains_what_a_running_sequence_computes() -> None:
    kv = KvCache(30, 4)
    owner = start(kv, range(16), 0)
    waiting = KvSequence([*range(10), 50, 51, 52])
    probe = kv.probe(waiting)
    assert (probe.num_cached, probe.num_pending, probe.owner, probe.until) == (0, 10, owner, 8)
    assert not probe.ready
    compute(kv, owner, 7)
    assert not probe.ready
    compute(kv, owner, 8)
    assert probe.ready
    probe = kv.probe(waiting)
    assert (probe.num_cached, probe.num_pending, probe.owner, probe.until) == (8, 2, owner, 12)
    compute(kv, owner, 16)
    probe = kv.probe(waiting)
    assert (probe.num_cached, probe.num_pending, probe.owner) == (10, 0, None)
    assert probe.ready


def test_an_identical_prompt_does_not_wait_for_its_last_token() -> None:
    kv = KvCache(30, 4)
    owner = start(kv, range(9), 0)
    assert kv.probe(KvSequence(list(range(9)))).num_pending == 8
    compute(kv, owner, 8)
    assert kv.probe(KvSequence(list(range(9)))).num_pending == 0
    owner = start(kv, [7] * 8, 0)
    probe = kv.probe(KvSequence([7] * 8))
    assert (probe.num_pending, probe.until) == (7, 4)
    compute(kv, owner, 4)
    assert kv.probe(KvSequence([7] * 8)).num_pending == 3


def test_part_of_a_prompts_last_block_is_pending_too() -> None:
    kv = KvCache(30, 4)
    owner = start(kv, range(6), 0)
    compute(kv, owner, 4)
    waiting = KvSequence(list(range(9)))
    probe = kv.probe(waiting)
    assert (probe.num_cached, probe.num_pending, probe.owner, probe.until) == (4, 2, owner, 6)
    compute(kv, owner, 6)
    assert probe.ready and kv.probe(waiting).num_cached == 6


def test_what_is_pending_counts_beyond_what_is_cached() -> None:
    kv = KvCache(30, 4)
    cache(kv, [0, 1, 2, 9])
    start(kv, range(8), 0)
    probe = kv.probe(KvSequence([*range(8), 50]))
    assert (probe.num_cached, probe.num_pending) == (3, 5)
    # Where the cached part matches as far as the pending one, waiting gains nothing.
    assert kv.probe(KvSequence([0, 1, 2, 50])).num_pending == 0


def test_without_partial_reuse_only_whole_blocks_are_worth_waiting_for() -> None:
    kv = KvCache(30, 4, enable_partial_reuse=False)
    start(kv, range(12), 0)
    assert kv.probe(KvSequence([*range(7), 50])).num_pending == 4
    assert kv.probe(KvSequence([*range(3), 50])).num_pending == 0


def test_a_sequence_that_ends_early_is_not_waited_for() -> None:
    kv = KvCache(30, 4)
    owner = start(kv, range(16), 4)
    waiting = KvSequence([*range(12), 50])
    probe = kv.probe(waiting)
    assert probe.num_pending == 8
    release(kv, owner)
    assert probe.ready
    assert kv.probe(waiting).num_pending == 0 and kv.probe(waiting).num_cached == 4


def test_another_takes_over_what_is_pending() -> None:
    kv = KvCache(30, 4)
    first, second = start(kv, range(16), 0), start(kv, range(16), 0)
    assert kv.probe(KvSequence([*range(12), 50])).owner is first
    release(kv, first)
    probe = kv.probe(KvSequence([*range(12), 50]))
    assert probe.owner is second and probe.num_pending == 12


def test_a_sequence_that_became_private_is_not_waited_for() -> None:
    kv = KvCache(30, 4)
    first, second = start(kv, range(8), 0), start(kv, [*range(8), *range(50, 58)], 0)
    waiting = KvSequence([*range(8), *range(50, 58)])
    probe = kv.probe(waiting)
    assert probe.num_pending == 15 and probe.owner is first
    compute(kv, first, 8)
    assert kv.probe(waiting).owner is second
    compute(kv, second, 8)
    assert not second.publishes and kv.probe(waiting).num_pending == 0


def test_other_keys_are_not_waited_for() -> None:
    kv = KvCache(30, 4)
    start(kv, range(16), 0)
    assert kv.probe(KvSequence(list(range(16)), CacheKey("a"))).num_pending == 0


def test_an_answer_is_not_pending() -> None:
    kv = KvCache(30, 4)
    owner = start(kv, range(6))
    generate(kv, owner, [6])
    assert kv.probe(KvSequence([*range(7), 50])).num_pending == 0


def test_probing_changes_nothing() -> None:
    kv = KvCache(30, 4)
    cache(kv, range(8))
    usage, stats = kv.usage(), str(kv.stats)
    for key in (CacheKey(), CacheKey("new")):
        kv.probe(KvSequence(list(range(12)), key))
    assert (kv.usage(), str(kv.stats), len(kv.tree.roots)) == (usage, stats, 1)
    kv.check()
