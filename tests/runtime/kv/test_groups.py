from hypothesis import given
from hypothesis import strategies as st

from ingot.runtime.kv import KvCache
from ingot.runtime.kv.groups import Group, make_groups


@given(st.integers(1, 12), st.integers(0, 60), st.integers(1, 5))
def test_blocks_held_are_those_that_the_next_token_sees(window: int, num_tokens: int, block_size: int) -> None:
    cache = KvCache(100, block_size, (None, window, window))
    whole = -(-num_tokens // block_size)
    visible = {position // block_size for position in range(num_tokens + 1) if position > num_tokens - window}
    assert cache.held(num_tokens) == whole + 2 * len(visible & set(range(whole)))


def test_full_tables_come_first_then_the_longer_windows() -> None:
    groups = make_groups((8, None, 4, 8, None))
    assert [(group.window, group.tables) for group in groups] == [(None, (1, 4)), (8, (0, 3)), (4, (2,))]
    assert [group.index for group in groups] == [0, 1, 2]


@given(st.integers(1, 40), st.integers(0, 100), st.integers(1, 8))
def test_first_needed_is_the_block_of_the_first_visible_position(window: int, position: int, block_size: int) -> None:
    visible = [q for q in range(position + 1) if q > position - window]
    assert Group(0, window, (0,)).first_needed(position, block_size) == visible[0] // block_size
    assert Group(0, None, (0,)).first_needed(position, block_size) == 0


@given(st.integers(1, 30), st.integers(1, 80), st.integers(1, 30), st.integers(1, 6), st.data())
def test_blocks_at_once_bounds_every_course_and_some_reach_it(window: int, num_tokens: int, max_chunk: int,
                                                              block_size: int, data: st.DataObject) -> None:
    """Windows are left when a chunk is done or a block is full, and the token after that may be planned before."""
    group = Group(0, window, (0,))
    bound = group.blocks_at_once(num_tokens, max_chunk, block_size)
    told = 0
    while told < num_tokens:
        step = data.draw(st.integers(1, max(max_chunk, block_size)))
        ahead = min(told + step + 1, num_tokens)
        held = -(-ahead // block_size) - group.first_needed(told, block_size)
        assert held <= bound
        told += step


def test_blocks_at_once_is_tight() -> None:
    # Positions 15 .. 31 of a window of 16 behind 31, a chunk of 16 and one token ahead: 31 - 16 + 1 = 16 .. 47.
    group = Group(0, 16, (0,))
    assert group.blocks_at_once(1000, 1, 16) == 3
    assert group.first_needed(30, 16) == 0
    assert group.blocks_at_once(20, 1, 16) == 2
    assert group.blocks_at_once(1000, None, 16) == 63
    assert Group(0, None, (0,)).blocks_at_once(1000, 1, 16) == 63
