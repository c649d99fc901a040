"""What every policy does: filling a step, order, refusal, ends, deadlines."""

import pytest

from ingot.runtime.kv import KvSequence
from ingot.runtime.scheduler import (
    MAX_PRIORITY,
    ChunkingPolicy,
    InvalidPriority,
    NeverFits,
    SchedulerPolicy,
    Sequence,
    SequenceState,
)

from .harness import Harness, Plan


def shares(plan: Plan) -> list[tuple[str, int, int]]:
    return [(sequence.request_id, count, rows) for sequence, count, rows in plan.entries]


def prompt(name: int, length: int) -> list[int]:
    """A prompt that begins as no other does."""
    return [1000 + name] + [name] * (length - 1)


def test_a_long_prompt_in_chunks_beside_generation() -> None:
    harness = Harness(100, max_num_tokens=8)
    harness.add(prompt(0, 3), answer=7)
    harness.add(prompt(1, 20), answer=5)
    plans = [shares(harness.step()) for _ in range(5)]
    # Generation comes first and is never held up by the prompt; only a prompt's last token has a row of logits.
    assert plans == [
        [("0", 3, 1), ("1", 5, 0)], [("0", 1, 1), ("1", 7, 0)], [("0", 1, 1), ("1", 7, 0)], [("0", 1, 1), ("1", 1, 1)],
        [("0", 1, 1), ("1", 1, 1)],
    ]
    harness.run(10)


def test_equal_progress_shares_the_room_in_blocks() -> None:
    harness = Harness(100, max_num_tokens=17, chunking=ChunkingPolicy.EQUAL_PROGRESS)
    for index, length in enumerate((3, 30, 30)):
        harness.add(prompt(index, length))
    # The third starts once there is a block for it.
    assert shares(harness.step()) == [("0", 3, 1), ("1", 8, 0), ("2", 6, 0)]
    assert shares(harness.step()) == [("0", 1, 1), ("1", 8, 0), ("2", 8, 0)]
    harness.run(20)


def test_a_prompt_starts_when_it_gets_tokens_and_not_before() -> None:
    harness = Harness(100, max_num_tokens=8)
    for index in range(3):
        harness.add(prompt(index, 12))
    plan = harness.step()
    assert [sequence.request_id for sequence in plan.admitted] == ["0"]
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (1, 2)
    assert [sequence.request_id for sequence in harness.step().admitted] == ["1"]


def test_no_more_sequences_than_the_batch_has_room_for() -> None:
    harness = Harness(100, max_batch_size=2)
    for index in range(4):
        harness.add(prompt(index, 2), answer=2)
    assert len(harness.step().entries) == 2
    assert [sequence.request_id for sequence, _, _ in harness.step().entries] == ["0", "1"]
    assert [sequence.request_id for sequence in harness.step().admitted] == ["2", "3"]


def test_scored_prompts_take_a_row_for_each_token() -> None:
    harness = Harness(100, max_batch_size=4, max_num_tokens=16)
    harness.add(prompt(0, 2), answer=8)
    harness.add(prompt(1, 7), answer=2, prompt_logits=True)
    harness.add(prompt(2, 6), answer=2)
    assert shares(harness.step()) == [("0", 2, 1), ("1", 3, 3), ("2", 5, 0)]
    # The last token of "2" waits for a row: that is generation's only when all its prompt is computed.
    assert shares(harness.step()) == [("0", 1, 1), ("1", 2, 2), ("2", 1, 1)]
    harness.run(20)


def test_nothing_of_a_scored_prompt_comes_from_the_cache() -> None:
    harness = Harness(100)
    first = harness.add(prompt(0, 12), answer=2)
    harness.run(9)
    second = harness.add(prompt(0, 12), answer=2, prompt_logits=True)
    third = harness.add(prompt(0, 12), answer=2)
    harness.run(9)
    assert (first.num_cached, second.num_cached, third.num_cached) == (0, 0, 11)


def test_what_never_fits_is_refused_with_the_numbers() -> None:
    harness = Harness(4)
    harness.add(prompt(0, 3), answer=14)  # the last token needs no KV
    with pytest.raises(NeverFits) as caught:
        harness.add(prompt(1, 3), answer=15)
    assert str(caught.value) == (
        "a prompt of 3 tokens with its answer, 18 tokens together, needs 5 KV blocks of 4 tokens; there are 4 "
        "(16 tokens).\n  Lower max_tokens, shorten the prompt, or raise kv_cache_tokens to 20.")
    harness.scheduler.check(3, 17)
    with pytest.raises(NeverFits):
        harness.scheduler.check(3, 18)
    assert harness.scheduler.num_waiting == 1
    harness.run(20)


@pytest.mark.parametrize("priority", [-MAX_PRIORITY - 1, MAX_PRIORITY + 1])
def test_priorities_are_bounded(priority: int) -> None:
    harness = Harness(4)
    with pytest.raises(InvalidPriority, match=f"priority must be -100 to 100, not {priority}") as caught:
        harness.add([1], priority=priority)
    assert caught.value.field == "priority"
    harness.add([1], priority=MAX_PRIORITY)


@pytest.mark.parametrize("policy", SchedulerPolicy)
def test_urgent_requests_don_t_starve_the_others(policy: SchedulerPolicy) -> None:
    harness = Harness(8, max_batch_size=2, ageing_s=1.0, policy=policy)
    patient = harness.add(prompt(0, 3), priority=-1)
    for step in range(1, 100):
        harness.clock.now = step * 0.1
        harness.add(prompt(step, 5), answer=10, priority=2)
        harness.step()
        if patient not in harness.sequences:
            break
    # Those that came within 3 seconds go first: 30 requests of 10 steps, two at a time. Nobody after them does.
    overtakers = [sequence for sequence in harness.finished if sequence.num_cached is not None]
    assert patient in overtakers
    assert all(sequence.arrival < 3 for sequence in overtakers)


def test_finish_in_every_state() -> None:
    harness = Harness(100, max_batch_size=1)
    running, waiting = harness.add(prompt(0, 6)), harness.add(prompt(1, 6))
    harness.step()
    version = harness.scheduler.version
    harness.finish(waiting)
    harness.finish(running)
    assert harness.scheduler.version > version
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (0, 0)
    version = harness.scheduler.version
    harness.scheduler.finish(running)
    assert harness.scheduler.version == version
    assert harness.plan().entries == []
    assert harness.kv.num_available == 100


def test_cancelled_while_its_step_runs() -> None:
    harness = Harness(100)
    cancelled, other = harness.add(prompt(0, 6)), harness.add(prompt(1, 6))
    plan = harness.plan()
    harness.launch(plan)
    harness.finish(cancelled)
    harness.wait(plan)
    assert (cancelled.num_computed, other.num_computed) == (0, 6)
    harness.run(9)


def test_what_failed_is_not_shared() -> None:
    harness = Harness(100)
    failed = harness.add(prompt(0, 6))
    plan = harness.plan()
    harness.launch(plan)
    harness.finish(failed, publish=False)
    harness.wait(plan)
    again = harness.add(prompt(0, 6))
    harness.run(9)
    assert again.num_cached == 0


def test_deadlines() -> None:
    harness = Harness(100, max_batch_size=1)
    running = harness.add(prompt(0, 6), answer=50, deadline=5.0)
    waiting = harness.add(prompt(1, 6), answer=50, deadline=4.0)
    behind = harness.add(prompt(2, 6))
    assert harness.step().expired == []
    harness.clock.now = 4.0
    assert harness.step().expired == [waiting]
    harness.clock.now = 5.5
    plan = harness.step()
    assert (plan.expired, plan.admitted) == ([running], [behind])
    assert running.state is SequenceState.FINISHED
    harness.run(9)


def test_one_at_a_time_is_the_same_list_of_tokens() -> None:
    """A sequence's tokens and the cache's are one list: nothing has to be told twice."""
    tokens = [1, 2, 3]
    sequence = Sequence("", tokens, 5, KvSequence(tokens))
    sequence.tokens.append(4)
    assert sequence.kv.tokens == [1, 2, 3, 4]
    assert (sequence.num_pending, sequence.generates) == (4, False)
    sequence.num_computed = 3
    assert sequence.generates
