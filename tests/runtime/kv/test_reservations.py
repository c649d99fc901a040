"""What is promised to a sequence can always be had, whatever is shared."""

import random

import pytest

from ingot.runtime.kv import KvCache, KvSequence
from tests.runtime.kv.memory import Memory
from tests.runtime.kv.sequences import cache, compute, generate, release, start

WINDOWS = [(None,), (None, None), (None, 6), (5,), (None, 3, 9, 9)]


def test_what_is_promised_is_not_available() -> None:
    kv = KvCache(10, 4)
    seq = start(kv, range(6), reserve_tokens=20)
    assert kv.num_available == 5 and kv.usage().num_reserved == 3
    assert not kv.acquire(KvSequence([1]), reserve_tokens=21)
    generate(kv, seq, range(6, 20))
    assert kv.num_available == 5 and kv.usage().num_reserved == 0
    release(kv, seq)
    assert kv.num_available == 10 and kv.num_promised == 0


def test_a_shared_block_is_promised_once() -> None:
    kv = KvCache(10, 4)
    first = start(kv, range(16), reserve_tokens=20)
    second = start(kv, [*range(16), 50], 16, reserve_tokens=24)
    assert kv.num_available == 10 - 5 - 2
    release(kv, first)
    assert kv.num_available == 10 - 6
    release(kv, second)


def test_a_cached_block_that_is_held_again_is_no_longer_available() -> None:
    kv = KvCache(6, 4)
    cache(kv, range(12))
    start(kv, [50] * 4, reserve_tokens=16)
    assert kv.num_available == 2
    # Three cached blocks and a new one: one more than there is although only one is new.
    assert not kv.acquire(KvSequence(list(range(13))), reserve_tokens=13)
    kv.check()
    assert kv.acquire(KvSequence(list(range(8))), reserve_tokens=8)
    kv.check()


def test_a_shared_block_of_a_window_is_promised_to_each() -> None:
    """Both leave it at different times: as long as one holds it, the other may need one more."""
    kv = KvCache(100, 4, (8,))
    first = start(kv, range(9), reserve_tokens=100)
    claim = first.claims
    second = start(kv, [*range(9), 50], 9, reserve_tokens=100)
    assert second.tables[0][0] == first.tables[0][0] and kv.store.num_windowed < 6
    assert kv.num_available == 100 - claim - second.claims


def test_a_context_needs_more_of_a_window_than_the_answer() -> None:
    kv = KvCache(100, 4, (8,), max_chunk=20)
    seq = start(kv, range(40), 0, reserve_tokens=100)
    before = kv.num_available
    assert seq.claims == kv.needed(100, 20)
    compute(kv, seq, 20)
    assert kv.num_available == before
    compute(kv, seq, 40)
    assert seq.claims == kv.needed(100, 1) < kv.needed(100, 20)
    assert kv.num_available == 100 - seq.claims


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("num_host_blocks", [0, 8])
def test_growing_never_fails(windows: tuple[int | None, ...], num_host_blocks: int) -> None:
    """Full pools of sequences that share prefixes, every one of them taken to its end; contents are checked too."""
    max_len, max_chunk, size = 36, 7, 4
    needed = KvCache(1, size, windows, max_chunk=max_chunk).needed(max_len)
    for seed in range(12):
        rng = random.Random(seed)
        kv = KvCache(needed * rng.randint(1, 3) + rng.randint(0, 5), size, windows, max_chunk=max_chunk,
                     num_host_blocks=num_host_blocks)
        memory, refused = Memory(kv), 0
        running: list[KvSequence] = []
        for _ in range(120):
            while len(running) < 8:
                seq = KvSequence([rng.randint(0, 1) for _ in range(rng.randint(1, 3))] + [7] * rng.randint(0, 20))
                if rng.random() < 0.7:
                    seq = KvSequence([7] * rng.randint(1, 30) + [rng.randint(0, 1)])
                if not kv.acquire(seq, num_new=rng.randint(0, max_chunk), reserve_tokens=max_len):
                    refused += 1
                    assert running
                    break
                running.append(seq)
            plan = []
            for seq in rng.sample(running, rng.randint(0, len(running))):
                if len(seq.tokens) == seq.num_computed:
                    seq.tokens.append(rng.randint(0, 1))
                count = min(len(seq.tokens) - seq.num_computed, rng.randint(1, max_chunk))
                assert kv.grow(seq, min(seq.num_computed + count + rng.randint(0, 1), max_len))
                plan.append((seq, count))
            memory.step(plan)
            kv.check()
            for seq in [seq for seq in running if len(seq.tokens) == max_len or rng.random() < 0.02]:
                running.remove(seq)
                kv.release(seq)
                kv.check()
        assert refused > 20


@pytest.mark.parametrize("windows", WINDOWS)
def test_what_fits_the_pool_alone_is_always_admitted_alone(windows: tuple[int | None, ...]) -> None:
    max_len, max_chunk = 36, 7
    kv = KvCache(KvCache(1, 4, windows).needed(max_len, max_chunk), 4, windows, max_chunk=max_chunk)
    rng = random.Random(1)
    for _ in range(60):
        seq = KvSequence([7] * rng.randint(1, 30) + [rng.randint(0, 1)])
        assert kv.acquire(seq, reserve_tokens=max_len)
        while seq.num_computed < max_len:
            if len(seq.tokens) == seq.num_computed:
                seq.tokens.append(rng.randint(0, 1))
            count = min(len(seq.tokens) - seq.num_computed, rng.randint(1, max_chunk))
            compute(kv, seq, seq.num_computed + count)
        release(kv, seq)


def test_more_than_what_was_reserved_is_a_fault() -> None:
    kv = KvCache(10, 4)
    seq = start(kv, range(4), reserve_tokens=8)
    with pytest.raises(AssertionError, match="more tokens than were reserved"):
        kv.grow(seq, 9)
