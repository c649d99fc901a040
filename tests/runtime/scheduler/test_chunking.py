"""How prompts share a step."""

from typing import Any

import pytest

from ingot.runtime.kv import KvSequence
from ingot.runtime.scheduler import ChunkingPolicy, Sequence
from ingot.runtime.scheduler.chunking import divide, room_for_next

FIRST, EQUAL = ChunkingPolicy.FIRST_COME_FIRST_SERVED, ChunkingPolicy.EQUAL_PROGRESS


def contexts(*pending: int, **options: Any) -> list[Sequence]:
    return [Sequence("", [1] * count, count + 1, KvSequence([1] * count), **options) for count in pending]


@pytest.mark.parametrize(("pending", "room", "expected"), [
    ((10, 50, 5), 100, [10, 50, 5]),
    ((10, 50, 5), 40, [10, 30, 0]),
    ((100, 3), 40, [40, 0]),
])  # fmt: skip
def test_first_come_first_served(pending: tuple[int, ...], room: int, expected: list[int]) -> None:
    assert divide(contexts(*pending), room, 9, FIRST, 4) == expected


@pytest.mark.parametrize(("pending", "room", "expected"), [
    ((10, 50, 5), 100, [10, 50, 5]),
    ((100, 100, 100), 48, [16, 16, 16]),
    # Whole blocks of 4 for each; what cannot be divided goes to the oldest.
    ((100, 100, 100), 46, [16, 16, 14]),
    ((100, 100, 100), 29, [12, 9, 8]),
    # What a short one leaves is divided again.
    ((100, 3, 100), 43, [20, 3, 20]),
    ((100, 100, 100), 6, [4, 2, 0]),
])  # fmt: skip
def test_equal_progress(pending: tuple[int, ...], room: int, expected: list[int]) -> None:
    assert divide(contexts(*pending), room, 9, EQUAL, 4) == expected


def test_the_last_token_waits_for_a_row() -> None:
    assert divide(contexts(5, 5, 5), 15, 2, FIRST, 4) == [5, 5, 4]


def test_scored_prompts_are_cut_to_the_rows() -> None:
    assert divide(contexts(20, prompt_logits=True) + contexts(5), 25, 8, FIRST, 4) == [8, 4]
    assert divide(contexts(5, prompt_logits=True) + contexts(5), 25, 8, FIRST, 4) == [5, 5]


def test_rows_that_were_given_before_a_pause_are_not_given_again() -> None:
    scored, = contexts(20, prompt_logits=True)
    scored.num_scored = 10
    assert scored.num_logits(8) == 0
    assert divide([scored], 25, 8, FIRST, 4) == [18]
    scored.num_computed = 12
    assert scored.num_logits(8) == 8


def test_room_for_one_more() -> None:
    assert room_for_next(contexts(10, 5), 20, FIRST, 4) == 5
    assert room_for_next(contexts(10, 15), 20, FIRST, 4) == 0
    assert room_for_next([], 20, EQUAL, 4) == 20
    assert room_for_next([], 3, EQUAL, 4) == 3
    assert room_for_next(contexts(100), 20, EQUAL, 4) == 8
    assert room_for_next(contexts(100), 8, EQUAL, 4) == 4
    assert room_for_next(contexts(100), 7, EQUAL, 4) == 0
