"""The checker must notice what it is there for."""

from collections.abc import Callable

import pytest

from ingot.runtime.kv import KvCache
from tests.runtime.kv.sequences import cache, generate, start


def lose_a_block(kv: KvCache) -> None:
    kv.store.free[0].pop()


def free_a_block_twice(kv: KvCache) -> None:
    kv.store.free[0].append(kv.store.free[0][0])


def free_a_used_block(kv: KvCache) -> None:
    kv.store.free[0][0] = next(iter(kv.sequences)).tables[0][0]


def count_a_reference_too_many(kv: KvCache) -> None:
    part = next(iter(kv.sequences)).path[0].parts[0]
    assert part is not None
    part.refs += 1


def forget_a_reference(kv: KvCache) -> None:
    kv.store.drop(_part(kv))


def miscount_evictable_blocks(kv: KvCache) -> None:
    kv.store.num_evictable[0] += 1


def lose_an_entry_of_the_queue(kv: KvCache) -> None:
    kv.store.queues[0]._heap.clear()


def promise_too_much(kv: KvCache) -> None:
    kv.num_promised += 1


def change_a_table(kv: KvCache) -> None:
    table = next(iter(kv.sequences)).tables[0]
    table[0], table[1] = table[1], table[0]


def miscount_children(kv: KvCache) -> None:
    next(iter(kv.tree.roots.values())).num_device_children += 1


def keep_a_node_that_nothing_needs(kv: KvCache) -> None:
    kv.tree.child(next(iter(kv.tree.roots.values())), (8, 8, 8, 8))


def _part(kv: KvCache):  # type: ignore[no-untyped-def]
    return next(iter(kv.sequences)).path[0].parts[0]


FAULTS = [lose_a_block, free_a_block_twice, free_a_used_block, count_a_reference_too_many, forget_a_reference,
          miscount_evictable_blocks, lose_an_entry_of_the_queue, promise_too_much, change_a_table, miscount_children,
          keep_a_node_that_nothing_needs]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_noticed(fault: Callable[[KvCache], None]) -> None:
    kv = KvCache(20, 4)
    cache(kv, [5] * 9)
    seq = start(kv, range(9))
    generate(kv, seq, [9])
    kv.check()
    fault(kv)
    with pytest.raises(AssertionError):
        kv.check()
