"""The pool of KV blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.runtime.kv_blocks import KvBlocks


def test_all_or_none() -> None:
    blocks = KvBlocks(5, 16)
    first = blocks.allocate(3)
    assert first is not None
    assert blocks.allocate(3) is None
    assert blocks.num_free == 2
    rest = blocks.allocate(2)
    assert rest is not None
    assert sorted(first + rest) == [0, 1, 2, 3, 4]
    assert blocks.allocate(0) == []
    assert blocks.allocate(1) is None


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)])
def test_needed(tokens: int, expected: int) -> None:
    assert KvBlocks(1, 16).needed(tokens) == expected


def test_a_block_is_released_once() -> None:
    blocks = KvBlocks(2, 16)
    got = blocks.allocate(1)
    assert got is not None
    blocks.release(got)
    with pytest.raises(AssertionError, match="is free already"):
        blocks.release(got)


@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_no_block_is_owned_twice_or_lost(num_blocks: int, actions: list[tuple[bool, int]]) -> None:
    blocks, owned = KvBlocks(num_blocks, 4), []
    for allocates, number in actions:
        if allocates:
            free = blocks.num_free
            got = blocks.allocate(number)
            assert (got is None) == (number > free)
            owned += [got] if got else []
        elif owned:
            blocks.release(owned.pop(number % len(owned)))
        held = [block for table in owned for block in table]
        assert len(held) == len(set(held)) == num_blocks - blocks.num_free
        assert all(0 <= block < num_blocks for block in held)
