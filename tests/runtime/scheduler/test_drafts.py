"""Drafts take what is left over, and nothing of what is rejected stays."""

import pytest

from ingot.runtime.kv import CacheKey
from ingot.runtime.scheduler import SchedulerPolicy, Sequence

from .harness import Harness
from .test_scheduler import prompt


def counts(harness: Harness) -> list[tuple[int, int]]:
    return [(count, rows) for _, count, rows in harness.step().entries]


def test_a_draft_that_is_right_is_taken_with_the_token_behind_it() -> None:
    harness = Harness(100, speculative_tokens=3)
    sequence = harness.add(prompt(0, 5), 20)
    harness.step()
    assert counts(harness) == [(4, 4)]
    assert len(sequence.tokens) == 5 + 1 + 4 and sequence.num_computed == 9
    harness.run(20)


@pytest.mark.parametrize("num_right", [0, 1, 2])
def test_what_is_rejected_is_computed_again(num_right: int) -> None:
    harness = Harness(100, speculative_tokens=3)
    sequence = harness.add(prompt(0, 5), 20)
    harness.guess = lambda sequence, limit: (limit, min(num_right, limit))
    harness.step()
    harness.step()
    assert len(sequence.tokens) == 5 + 1 + num_right + 1 and sequence.num_pending == 1
    harness.run(30)


def test_no_draft_goes_beyond_the_end() -> None:
    harness = Harness(100, speculative_tokens=9)
    sequence = harness.add(prompt(0, 5), 4)
    harness.step()
    assert counts(harness) == [(3, 3)]  # two drafted, and what follows them is the last
    assert len(sequence.tokens) == sequence.max_len


def test_no_draft_for_the_last_token() -> None:
    harness = Harness(100, speculative_tokens=9)
    harness.add(prompt(0, 5), 2)
    harness.step()
    assert counts(harness) == [(1, 1)]


def test_rows_are_shared() -> None:
    harness = Harness(100, max_batch_size=5, speculative_tokens=4)
    harness.add(prompt(0, 3), 20)
    harness.add(prompt(1, 3), 20)
    harness.step()
    assert counts(harness) == [(4, 4), (1, 1)]
    harness.run(30)


def test_prompts_keep_their_tokens() -> None:
    harness = Harness(100, max_num_tokens=8, speculative_tokens=4)
    harness.add(prompt(0, 3), 20)
    harness.step()
    harness.add(prompt(1, 12), 4)
    assert counts(harness) == [(1, 1), (7, 0)]
    assert counts(harness) == [(3, 3), (5, 1)]  # what the end of the prompt leaves, of tokens and rows
    harness.run(30)


@pytest.mark.parametrize("policy", [SchedulerPolicy.GUARANTEED_NO_EVICT, SchedulerPolicy.STATIC_BATCH])
def test_reservations_hold(policy: SchedulerPolicy) -> None:
    """Exactly the blocks that all need until their ends."""
    harness = Harness(8, policy=policy, max_num_tokens=20, speculative_tokens=9)
    for index in range(2):
        harness.add(prompt(index, 5), 12)
    while harness.sequences:
        harness.step()
        harness.kv.check()


def test_nobody_is_paused_for_a_draft() -> None:
    """Two fill the cache at their ends: a draft that took a block early would take the other one's."""
    pauses = []
    for drafts in (0, 9):
        harness = Harness(5, policy=SchedulerPolicy.MAX_UTILIZATION, speculative_tokens=drafts)
        harness.guess = lambda sequence, limit: (limit, 0)
        for index in range(2):
            harness.add(prompt(index, 5), 6)
        harness.run(60)
        pauses.append(harness.scheduler.num_pauses)
    assert pauses[0] == pauses[1] >= 1


@pytest.mark.parametrize("windows", [(6,), (None, 6), (None, 5, 5)])
def test_windows_have_room_for_drafts(windows: tuple[int | None, ...]) -> None:
    """The blocks of a window are kept until its sequence has really gone past them, and enough are reserved."""
    for num_right in range(4):
        harness = Harness(60, windows=windows, max_num_tokens=20, max_batch_size=12, speculative_tokens=9)
        harness.guess = lambda sequence, limit, right=num_right: (limit, min(right, limit))  # type: ignore[misc]
        harness.add([1], 40)
        while harness.sequences:
            plan = harness.plan()
            harness.draft(plan)
            harness.kv.check()
            harness.launch(plan)
            harness.wait(plan)
            harness.kv.check()


def test_nothing_rejected_is_found_by_others() -> None:
    harness = Harness(100, speculative_tokens=3)
    harness.guess = lambda sequence, limit: (limit, 1)
    first = harness.add(prompt(0, 5), 20)
    harness.run(30)
    again = harness.add([*first.tokens, 1, 2], 4)  # the harness compares what it reads
    harness.run(10)
    assert again.num_cached == len(first.tokens) - 1


def test_no_step_is_prepared_behind_a_draft() -> None:
    harness = Harness(100, speculative_tokens=3)
    harness.add(prompt(0, 5), 20)
    harness.step()
    plan = harness.plan()
    assert harness.draft(plan)
    harness.launch(plan)
    assert harness.scheduler.plan_steady() is None
    harness.wait(plan)
    harness.run(20)


def test_a_steady_plan_takes_drafts() -> None:
    harness = Harness(100, speculative_tokens=3)
    harness.guess = lambda sequence, limit: (0, 0)
    sequence = harness.add(prompt(0, 5), 20)
    harness.step()
    harness.launch(plan := harness.plan())
    after, version = harness.scheduler.plan_steady(), harness.scheduler.version
    assert after is not None
    harness.wait(plan)
    harness.guess = lambda sequence, limit: (limit, limit)
    assert harness.draft(after) and harness.scheduler.version == version
    assert after.entries == [(sequence, 4, 4)]
    harness.launch(after)
    harness.wait(after)
    assert len(sequence.tokens) == 5 + 2 + 4
    harness.run(20)


def test_a_cancelled_draft() -> None:
    """Its blocks are given back while the step runs, and what it writes there is nobody's."""
    harness = Harness(100, speculative_tokens=3)
    sequence: Sequence = harness.add(prompt(0, 5), 20, CacheKey("tenant"))
    harness.step()
    plan = harness.plan()
    harness.draft(plan)
    harness.launch(plan)
    harness.finish(sequence)
    harness.wait(plan)
    harness.kv.check()
    assert harness.kv.num_available == harness.kv.num_blocks
