"""More adapters than slots: who starts, who waits, and for how long."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.runtime.adapters.adapter import Adapter
from ingot.runtime.adapters.loaded import LoadedAdapter
from ingot.runtime.adapters.slots import AdapterSlots
from ingot.runtime.kv import CacheKey
from ingot.runtime.scheduler import Scheduler, SchedulerPolicy, Sequence, SequenceState
from tests.runtime.scheduler.harness import Harness, Plan

ADAPTERS = [LoadedAdapter(f"adapter {number}", number, Adapter("", "", {}), np.zeros(0, np.uint8))
            for number in range(10)]
POLICIES = list(SchedulerPolicy)


class AdapterHarness(Harness):
    """written: (slot, number of the adapter) in order. Every step is checked to find each sequence's own adapter."""

    def __init__(self, num_slots: int, num_blocks: int = 400, **options: Any) -> None:
        super().__init__(num_blocks, **options)
        self.written: list[tuple[int, int]] = []
        slots = AdapterSlots(num_slots, lambda slot, adapter: self.written.append((slot, adapter.number)))
        self.scheduler = Scheduler(self.kv, self.scheduler.settings, self.clock, slots=slots)

    def ask(self, number: int | None, length: int = 6, answer: int = 4, **options: Any) -> Sequence:
        """Of an adapter, or of the model itself; each prompt is new."""
        tokens = [self.num_steps % 7, len(self.sequences) + 10, len(self.finished), *range(length - 3)]
        adapter = None if number is None else ADAPTERS[number]
        return self.add(tokens, answer, CacheKey(None, number), adapter=adapter, **options)

    def launch(self, plan: Plan) -> None:
        super().launch(plan)
        held = dict(self.written)
        for sequence, _, _ in plan.entries:
            if sequence.adapter is None:
                assert sequence.slot == -1
            else:
                assert held[sequence.slot] == sequence.adapter.number, "the slot holds another adapter"


def running(sequences: list[Sequence]) -> list[bool]:
    return [sequence.state is SequenceState.RUNNING for sequence in sequences]


def test_a_slot_is_written_once_while_it_is_used_again() -> None:
    harness = AdapterHarness(2)
    for number in (0, 1, 0, 1, 1, 0):
        harness.ask(number)
        harness.run(20)
    assert harness.written == [(0, 0), (1, 1)]


def test_the_least_recently_used_adapter_gives_way() -> None:
    harness = AdapterHarness(2)
    for number in (0, 1, 0, 2, 0, 1):
        harness.ask(number)
        harness.run(20)
    assert harness.written == [(0, 0), (1, 1), (1, 2), (1, 1)]


def test_a_running_adapter_keeps_its_slot() -> None:
    harness = AdapterHarness(2)
    asked = [harness.ask(0, answer=20), harness.ask(1, answer=4), harness.ask(2, answer=4)]
    harness.step()
    assert running(asked) == [True, True, False]
    while asked[1].state is not SequenceState.FINISHED:
        harness.step()
    harness.step()
    assert running(asked) == [True, False, True] and harness.written == [(0, 0), (1, 1), (1, 2)]


def test_others_pass_who_waits_for_a_slot() -> None:
    """The model itself, and adapters that are there: but not those whose slot the waiting one is to get."""
    harness = AdapterHarness(2, max_batch_size=8)
    harness.ask(0, answer=4)
    harness.ask(1, answer=20)
    harness.step()
    waiting, base, same, other = harness.ask(2), harness.ask(None), harness.ask(0), harness.ask(1)
    harness.step()
    assert running([waiting, base, same, other]) == [False, True, False, True]
    harness.run(60)


def test_those_who_wait_for_the_same_adapter_claim_one_slot() -> None:
    harness = AdapterHarness(3, max_batch_size=8)
    for number, answer in enumerate((4, 20, 30)):
        harness.ask(number, answer=answer)
    harness.step()
    harness.step()
    asked = [harness.ask(number) for number in (3, 3, 0, 1, 2)]
    harness.step()
    harness.step()
    assert running(asked) == [False, False, False, True, True]
    harness.run(60)


def test_an_unused_slot_is_no_reason_to_wait() -> None:
    harness = AdapterHarness(3, max_batch_size=8)
    asked = [harness.ask(number) for number in (0, 0, 1, 2, 2)]
    harness.step()
    harness.step()
    assert running(asked) == [True] * 5


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_waits_for_ever(policy: SchedulerPolicy) -> None:
    """Two adapters are asked for in every step. A third starts when those have ended that ran when it came first."""
    harness = AdapterHarness(2, policy=policy, num_blocks=200)
    late = None
    for step in range(120):
        for number in (0, 1):
            harness.ask(number, answer=6)
        if step == 20:
            late = harness.ask(2, priority=5)
        harness.step()
        harness.clock.now += 0.01
        if late is not None and late.state is SequenceState.FINISHED:
            break
    assert late is not None and late.state is SequenceState.FINISHED and step < 60
    for sequence in list(harness.sequences):
        harness.finish(sequence)


def test_the_model_itself_does_not_wait_for_slots() -> None:
    """However many wait for one, and for how long."""
    harness = AdapterHarness(1, max_batch_size=4)
    harness.ask(0, answer=200)
    harness.step()
    for number in range(1, 8):
        harness.ask(number)
    for _ in range(20):
        base = harness.ask(None, answer=2)
        for _ in range(4):
            harness.step()
        assert base.state is SequenceState.FINISHED


def test_a_step_ahead_is_planned_past_those_who_wait() -> None:
    """They change nothing until a slot is free."""
    harness = AdapterHarness(1)
    harness.ask(0, answer=8)
    harness.step()
    version = harness.scheduler.version
    harness.ask(1)
    plan = harness.plan()
    harness.launch(plan)
    assert harness.scheduler.version == version and harness.scheduler.plan_steady() is not None
    harness.wait(plan)
    harness.run(30)


def test_a_static_batch_holds_more_adapters_than_slots() -> None:
    """Its members take turns; the next batch begins when all have ended."""
    harness = AdapterHarness(1, policy=SchedulerPolicy.STATIC_BATCH, max_batch_size=3)
    asked = [harness.ask(number) for number in (0, 1, 2, 0)]
    order = []
    while harness.sequences:
        order += [asked.index(sequence) for sequence in harness.step().admitted]
        assert sum(running(asked)) <= 1
    assert order == [0, 1, 2, 3]


def test_a_paused_sequence_gets_its_adapter_again() -> None:
    harness = AdapterHarness(1, num_blocks=12, policy=SchedulerPolicy.MAX_UTILIZATION)
    asked = [harness.ask(number, length=8, answer=20) for number in (0, 0, 1)]
    harness.run(200)
    assert harness.scheduler.num_pauses > 0 and {sequence.adapter for sequence in asked} == set(ADAPTERS[:2])
    assert harness.written[0] == (0, 0) and (0, 1) in harness.written


@settings(max_examples=60)
@given(st.data())
def test_any_mix_ends(data: st.DataObject) -> None:
    policy = data.draw(st.sampled_from(POLICIES))
    num_slots = data.draw(st.integers(1, 3))
    harness = AdapterHarness(num_slots, num_blocks=data.draw(st.sampled_from([10, 24, 100])), policy=policy)
    numbers = st.one_of(st.none(), st.integers(0, 5))
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["ask", "ask", "step", "finish"]))
        if action == "ask":
            harness.ask(data.draw(numbers), data.draw(st.integers(3, 12)), data.draw(st.integers(1, 12)),
                        priority=data.draw(st.integers(-1, 1)))
        elif action == "step" or not harness.sequences:
            harness.step()
        else:
            harness.finish(data.draw(st.sampled_from(harness.sequences)))
        harness.clock.now += 0.05
        used = {sequence.adapter for sequence in harness.sequences
                if sequence.state is SequenceState.RUNNING and sequence.adapter is not None}
        assert len(used) <= num_slots
    harness.run(2000)
    harness.kv.check()
