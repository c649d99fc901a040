"""The step that is planned while another one runs."""

import pytest

from ingot.runtime.scheduler import SchedulerPolicy

from .harness import Harness, Plan
from .test_scheduler import prompt


def generating(harness: Harness, count: int = 2, answer: int = 20) -> Plan:
    """Sequences in the generation phase, with a step of them in flight."""
    for index in range(count):
        harness.add(prompt(index, 5), answer)
    while any(not sequence.generates for sequence in harness.sequences):
        harness.step()
    plan = harness.plan()
    harness.launch(plan)
    return plan


def test_steps_follow_each_other() -> None:
    harness = Harness(100)
    plan = generating(harness)
    version = harness.scheduler.version
    for _ in range(10):
        after = harness.scheduler.plan_steady()
        assert after is not None
        harness.wait(plan)
        assert harness.scheduler.version == version
        harness.launch(after)
        plan = after
    harness.wait(plan)
    assert [sequence.num_computed for sequence in harness.sequences] == [16, 16]
    harness.run(20)


def test_not_while_a_prompt_is_computed() -> None:
    harness = Harness(100, max_num_tokens=8)
    harness.add(prompt(0, 3), 20)
    harness.add(prompt(1, 30))
    harness.step()
    harness.launch(plan := harness.plan())
    assert harness.scheduler.plan_steady() is None
    harness.wait(plan)


def test_not_when_nothing_runs() -> None:
    assert Harness(100).scheduler.plan_steady() is None


def test_void_when_somebody_can_start() -> None:
    harness = Harness(100)
    generating(harness)
    assert harness.scheduler.plan_steady() is not None
    version = harness.scheduler.version
    harness.add(prompt(7, 3))
    assert harness.scheduler.version != version
    assert harness.scheduler.plan_steady() is None


@pytest.mark.parametrize(("num_blocks", "max_batch_size"), [(100, 2), (14, 4)])
def test_good_while_nobody_can_start(num_blocks: int, max_batch_size: int) -> None:
    """A full batch, or no blocks: a queue that grows does not end the overlap."""
    harness = Harness(num_blocks, max_batch_size=max_batch_size)
    plan = generating(harness)
    harness.add(prompt(6, 3), 20)
    harness.wait(plan)
    harness.launch(plan := harness.plan())
    assert harness.scheduler.plan_steady() is not None
    version = harness.scheduler.version
    harness.add(prompt(7, 3), 20)
    assert harness.scheduler.version == version
    harness.wait(plan)
    harness.run(100)


def test_void_when_a_sequence_ends() -> None:
    harness = Harness(100)
    plan = generating(harness)
    assert harness.scheduler.plan_steady() is not None
    version = harness.scheduler.version
    harness.finish(harness.sequences[0])
    assert harness.scheduler.version != version
    harness.wait(plan)
    harness.run(30)


def test_an_end_that_is_foreseen_is_left_out() -> None:
    harness = Harness(100)
    short, long = harness.add(prompt(0, 5), 3), harness.add(prompt(1, 5), 20)
    harness.step()
    harness.step()
    harness.launch(plan := harness.plan())
    after = harness.scheduler.plan_steady()
    assert after is not None and after.entries == [(long, 1, 1)]
    version = harness.scheduler.version
    harness.wait(plan)
    assert short in harness.finished and harness.scheduler.version == version
    harness.launch(after)
    harness.wait(after)
    harness.run(30)


def test_an_end_that_is_foreseen_lets_the_next_one_in() -> None:
    harness = Harness(100, max_batch_size=2)
    harness.add(prompt(0, 5), 3)
    harness.add(prompt(1, 5), 20)
    waiting = harness.add(prompt(2, 5))
    harness.step()
    harness.step()
    harness.launch(plan := harness.plan())
    assert harness.scheduler.plan_steady() is None
    harness.wait(plan)
    assert harness.step().admitted == [waiting]


def test_nothing_is_paused_for_it() -> None:
    harness = Harness(6, policy=SchedulerPolicy.MAX_UTILIZATION)
    plan = generating(harness, answer=9)
    while (after := harness.scheduler.plan_steady()) is not None:
        harness.wait(plan)
        harness.launch(after)
        plan = after
    harness.wait(plan)
    assert len(harness.sequences) == 2 and harness.scheduler.num_pauses == 0
    assert len(harness.step().paused) == 1
    harness.run(30)


def test_not_past_a_deadline() -> None:
    harness = Harness(100)
    harness.add(prompt(0, 3), 20, deadline=1.0)
    harness.step()
    harness.launch(harness.plan())
    assert harness.scheduler.plan_steady() is not None
    harness.clock.now = 1.0
    assert harness.scheduler.plan_steady() is None
