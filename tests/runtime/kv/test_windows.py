"""Tables of layers that see a window: blocks are let go behind it, and a prefix needs only the last ones."""

from ingot.runtime.kv import KvCache, KvSequence
from tests.runtime.kv.memory import Memory
from tests.runtime.kv.sequences import cache, compute, generate, num_cached, only_path, release, start


def test_blocks_that_left_the_window_are_let_go() -> None:
    kv = KvCache(40, 4, (None, 6))
    seq = start(kv, range(9))
    # The next position, 9, sees 4 .. 9 through the window.
    assert seq.tables[1][0] == -1 and min(seq.tables[1][1:]) >= 0 and min(seq.tables[0]) >= 0
    generate(kv, seq, range(9, 13))
    # When a block was full last, at 12, the next position saw 7 .. 12.
    assert seq.tables[1][0] == -1 and min(seq.tables[1][1:]) >= 0
    generate(kv, seq, range(13, 20))
    assert seq.tables[1][:3] == [-1, -1, -1] and min(seq.tables[1][3:]) >= 0
    assert min(seq.tables[0]) >= 0
    assert kv.usage().num_used == 5 + 2


def test_what_left_the_window_stays_cached_until_its_room_is_needed() -> None:
    kv = KvCache(12, 4, (None, 6))
    seq = start(kv, range(16))
    assert kv.usage().num_cached == 2
    assert num_cached(kv, range(6)) == 6
    other = start(kv, [50] * 8)
    assert num_cached(kv, range(6)) == 6
    generate(kv, other, [51, 52])
    assert num_cached(kv, range(6)) == 0 and num_cached(kv, range(16)) == 16
    release(kv, seq)


def test_a_prefix_needs_the_blocks_that_its_next_token_sees() -> None:
    kv = KvCache(30, 4, (None, 6))
    cache(kv, range(20))
    part = only_path(kv)[2].parts[1]
    assert part is not None
    kv.store.remove(part)
    kv.check()
    # Position 11 sees 6 .. 11, 18 sees 13 .. 18; what lies between would see the block that is gone.
    assert num_cached(kv, range(8)) == 8
    assert num_cached(kv, range(9)) == 8
    assert num_cached(kv, range(16)) == 8
    assert num_cached(kv, range(17)) == 17
    assert num_cached(kv, range(18)) == 18
    seq = start(kv, range(19), 18)
    assert seq.num_cached == 18 and seq.tables[1][:3] == [-1, -1, -1]


def test_without_full_tables_nodes_outlive_their_blocks() -> None:
    kv = KvCache(5, 4, (5,))
    memory = Memory(kv)
    seq = KvSequence(list(range(40)))
    assert kv.acquire(seq)
    while seq.num_computed < 40:
        assert kv.grow(seq, seq.num_computed + 4)
        memory.step([(seq, 4)])
        kv.check()
    assert seq.tables[0][:9] == [-1] * 9
    release(kv, seq)
    assert num_cached(kv, range(40)) == 40
    assert num_cached(kv, range(8)) == 0
    assert kv.clear() == 5 and not kv.tree.roots


def test_a_private_sequence_frees_what_leaves_its_window() -> None:
    kv = KvCache(40, 4, (None, 6))
    first, second = start(kv, range(16), 0), start(kv, range(16), 0)
    compute(kv, first, 16)
    compute(kv, second, 16)
    assert not second.publishes and second.tables[1][:2] == [-1, -1]
    generate(kv, second, range(16, 24))
    release(kv, second)
    assert num_cached(kv, range(24)) == 24


def test_tables_draw_blocks_from_one_pool() -> None:
    kv = KvCache(12, 4, (None, 6, 6))
    seq = start(kv, range(9))
    blocks = [block for table in seq.tables for block in table if block >= 0]
    assert len(blocks) == len(set(blocks)) == 3 + 2 + 2
    assert kv.needed(100, 4) == 25 + 2 * kv.groups[1].blocks_at_once(100, 4, 4)
