"""A sequence waits for a prefix that another one is computing; others may pass it; nobody waits for ever."""

import pytest

from ingot.runtime.kv import CacheKey
from ingot.runtime.scheduler import ChunkingPolicy, SchedulerPolicy
from ingot.runtime.scheduler.admission import MAX_WAITS

from .harness import Harness
from .test_scheduler import prompt

SHARED = prompt(0, 21)


def test_the_prefix_is_computed_once_and_others_pass() -> None:
    harness = Harness(100, max_num_tokens=16)
    first, waits = harness.add([*SHARED, 1, 1, 1], 3), harness.add([*SHARED, 2, 2, 2], 3)
    passes = harness.add(prompt(1, 6), 3)
    assert harness.step().admitted == [first]  # 16 of its 24 tokens
    assert harness.step().admitted == [passes]  # 8 and 6
    assert harness.step().admitted == [waits]
    # Up to the very token at which they part, in the middle of a block.
    assert waits.num_cached == 21
    harness.run(9)


def test_no_wait_for_less_than_a_block() -> None:
    harness = Harness(100, max_num_tokens=16)
    first, second = harness.add([1, 2, 3, 4, 5]), harness.add([1, 2, 3, 5, 4])
    assert harness.step().admitted == [first, second]


def test_no_wait_if_told_so() -> None:
    harness = Harness(100, max_num_tokens=64, wait_for_prefix=False)
    first, second = harness.add(SHARED), harness.add(SHARED)
    assert harness.step().admitted == [first, second]


def test_no_wait_for_another_tenant_s_prefix() -> None:
    harness = Harness(100, max_num_tokens=64)
    first, second = harness.add(SHARED, key=CacheKey("a")), harness.add(SHARED, key=CacheKey("b"))
    assert harness.step().admitted == [first, second]


def test_answers_to_one_prompt_share_all_of_it() -> None:
    harness = Harness(100, max_num_tokens=64)
    answers = [harness.add(SHARED) for _ in range(3)]
    assert harness.step().admitted == answers[:1]
    assert harness.step().admitted == answers[1:]
    assert [answer.num_cached for answer in answers] == [0, 20, 20]  # the last token is computed for its logits


@pytest.mark.parametrize("publish", [True, False])
def test_the_one_it_waits_for_is_cancelled(publish: bool) -> None:
    harness = Harness(100, max_num_tokens=8)
    first, waits = harness.add([*SHARED, 1]), harness.add([*SHARED, 2])
    harness.step()
    assert harness.step().admitted == []
    harness.finish(first, publish)
    assert harness.step().admitted == [waits]
    assert waits.num_cached == 16
    harness.run(9)


def test_the_one_it_waits_for_is_paused() -> None:
    harness = Harness(12, max_num_tokens=8, policy=SchedulerPolicy.MAX_UTILIZATION)
    old = harness.add(prompt(1, 3), 42)
    while harness.kv.num_available > 6:
        harness.step()
    first, waits = harness.add([*SHARED, 1], 4), harness.add([*SHARED, 2], 4)
    plans = harness.run(200)
    assert any(first in plan.paused for plan in plans)
    assert old in harness.finished and waits in harness.finished


def test_waiting_is_not_for_ever() -> None:
    """Who has waited often is not passed any more."""
    harness = Harness(1000, max_num_tokens=16)
    first, waits, other = harness.add([*SHARED, 1, 1, 1]), harness.add([*SHARED, 2]), harness.add(prompt(1, 6))
    waits.num_waits = MAX_WAITS
    assert harness.step().admitted == [first]
    assert harness.step().admitted == []  # there is room for the other one
    assert waits.num_waits == MAX_WAITS + 1
    assert harness.step().admitted == [waits, other]
    harness.run(20)


def test_with_equal_progress() -> None:
    harness = Harness(100, max_num_tokens=16, chunking=ChunkingPolicy.EQUAL_PROGRESS)
    sequences = [harness.add([*SHARED, index, index], 3) for index in range(4)]
    harness.run(30)
    assert [sequence.num_cached for sequence in sequences] == [0, 21, 21, 21]
