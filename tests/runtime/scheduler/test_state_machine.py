"""Pool, index and scheduler together, driven at random over tiny pools.

After every step the cache counts its blocks and references (KvCache.check), and the harness has compared what every
block holds with what the sequences that read it expect. When the load stops, everybody ends within a bound.
"""

import sys
from random import Random
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ingot.runtime.kv import CacheKey, RetentionRange
from ingot.runtime.scheduler import ChunkingPolicy, NeverFits, SchedulerPolicy, Sequence

from .harness import Harness, Plan

NUM_STEPS = 20_000  # at least, of the machine and of the scheduler, with all policies together
NUM_EXAMPLES = 80  # of each policy
NUM_RULES = 100  # of an example

KEYS = st.sampled_from([CacheKey(), CacheKey(), CacheKey(), CacheKey("tenant"), CacheKey(None, 1)])
# Tables with and without windows; both in one model.
WINDOWS = st.sampled_from([(None,), (None,), (6,), (None, 6), (None, 5, 5)])
RETENTION = st.one_of(st.just(()), st.builds(
    lambda begin, priority, duration: (RetentionRange(begin, None, priority, duration),),
    st.integers(0, 9), st.sampled_from([0, 50, 100]), st.sampled_from([None, 3.0])))


class Serving(RuleBasedStateMachine):
    """Rules are what clients, time and the executor do; `step` stands for most of them."""

    policy: ClassVar[SchedulerPolicy]
    num_rules: ClassVar[int] = 0
    num_steps: ClassVar[int] = 0
    num_pauses: ClassVar[int] = 0
    num_cached: ClassVar[int] = 0
    num_drafted: ClassVar[int] = 0
    num_accepted: ClassVar[int] = 0

    harness: Harness
    flying: Plan | None

    @initialize(blocks=st.integers(3, 14), host_blocks=st.sampled_from([0, 0, 5]), windows=WINDOWS,
                batch=st.integers(2, 5), tokens=st.integers(5, 20),
                chunking=st.sampled_from(ChunkingPolicy), waits=st.sampled_from([True, True, False]),
                drafts=st.sampled_from([0, 0, 1, 3, 9]), guesses=st.randoms(use_true_random=False))
    def start(self, blocks: int, host_blocks: int, windows: tuple[int | None, ...], batch: int, tokens: int,
              chunking: ChunkingPolicy, waits: bool, drafts: int, guesses: Random) -> None:
        self.harness = Harness(blocks * len(windows), 4, batch, tokens, windows, host_blocks, policy=self.policy,
                               chunking=chunking, wait_for_prefix=waits, speculative_tokens=drafts)
        self.flying = None  # the step that runs

        def guess(_: Sequence, limit: int) -> tuple[int, int]:
            count = guesses.randint(0, limit)
            return count, guesses.randint(0, count)

        self.harness.guess = guess

    @rule(data=st.data(), length=st.integers(1, 20), answer=st.integers(1, 25), key=KEYS, priority=st.integers(-2, 2),
          deadline=st.sampled_from([None, None, None, 4.0]), scored=st.sampled_from([False, False, False, True]),
          count=st.integers(1, 3), retention=RETENTION)
    def submit(self, data: st.DataObject, length: int, answer: int, key: CacheKey, priority: int,
               deadline: float | None, scored: bool, count: int, retention: tuple[RetentionRange, ...]) -> None:
        """`count` answers to one prompt, which may go on from what another request had."""
        harness = self.harness
        prompt: list[int] = []
        others = harness.sequences + harness.finished[-6:]
        goes_on = data.draw(st.booleans())
        if others and goes_on:
            other = others[data.draw(st.integers(0, len(others) - 1))].tokens
            prompt = other[: data.draw(st.integers(1, len(other)))]
        prompt = prompt + [data.draw(st.integers(0, 2))] * max(length - len(prompt), 1)
        for _ in range(count):
            try:
                harness.add(prompt, answer, key, retention, priority=priority, prompt_logits=scored,
                            deadline=None if deadline is None else harness.clock.now + deadline)
            except NeverFits:
                assert harness.kv.needed(len(prompt) + answer - 1) > harness.kv.num_blocks

    @rule(data=st.data(), publish=st.booleans())
    @precondition(lambda self: self.harness.sequences)
    def cancel(self, data: st.DataObject, publish: bool) -> None:
        sequences = self.harness.sequences
        self.harness.finish(sequences[data.draw(st.integers(0, len(sequences) - 1))], publish)

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.harness.clock.now += seconds

    @rule()
    @precondition(lambda self: self.flying is None)
    def launch(self) -> None:
        self.flying = self.harness.plan()
        self.harness.draft(self.flying)
        self.harness.launch(self.flying)

    @rule()
    @precondition(lambda self: self.flying is not None)
    def wait(self) -> None:
        assert self.flying is not None
        self.harness.wait(self.flying)
        self.flying = None

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        """As the executor does it: the next step is planned while one runs, and thrown away if it is void by then."""
        harness, scheduler = self.harness, self.harness.scheduler
        plan = self.flying
        for _ in range(count):
            if plan is None:
                plan = harness.plan()
                harness.draft(plan)
                harness.launch(plan)
            after, version = scheduler.plan_steady(), scheduler.version
            harness.wait(plan)
            harness.kv.check()
            plan = after if after is not None and version == scheduler.version else None
            if plan is not None:
                harness.draft(plan)
                harness.launch(plan)
        self.flying = plan

    @invariant()
    def nothing_is_lost(self) -> None:
        type(self).num_rules += 1
        if hasattr(self, "harness"):
            self.harness.kv.check()
            running = self.harness.scheduler.num_running
            assert running <= self.harness.scheduler.settings.max_batch_size
            assert running + self.harness.scheduler.num_waiting + self.harness.scheduler.num_paused == len(
                self.harness.sequences)

    def teardown(self) -> None:
        """The load stops. In every step the oldest that runs gets a token, and it is never paused."""
        if not hasattr(self, "harness") or sys.exc_info()[0] is not None:
            return  # a rule has failed; what comes after it would hide why
        harness = self.harness
        if self.flying is not None:
            harness.wait(self.flying)
        harness.run(sum(sequence.max_len for sequence in harness.sequences))
        harness.kv.check()
        assert harness.kv.num_available == harness.kv.num_blocks
        assert harness.scheduler.plan().entries == []
        of = type(self)
        of.num_steps += harness.num_steps
        of.num_pauses += harness.scheduler.num_pauses
        of.num_drafted += harness.num_drafted
        of.num_accepted += harness.num_accepted
        of.num_cached += sum(sequence.num_cached or 0 for sequence in harness.finished)


@pytest.mark.parametrize("policy", SchedulerPolicy)
def test_state_machine(policy: SchedulerPolicy) -> None:
    class Machine(Serving):
        pass

    Machine.policy = policy
    run_state_machine_as_test(seed(1)(Machine), settings=settings(
        max_examples=NUM_EXAMPLES, stateful_step_count=NUM_RULES, deadline=None, database=None,
        suppress_health_check=list(HealthCheck)))
    # It has been where it hurts.
    assert min(Machine.num_steps, Machine.num_rules) >= NUM_STEPS / len(SchedulerPolicy)
    assert Machine.num_cached >= 1000
    assert Machine.num_accepted >= 200 and Machine.num_drafted >= Machine.num_accepted + 200
    assert Machine.num_pauses >= 100 or policy is not SchedulerPolicy.MAX_UTILIZATION
