"""Which tokens the next step computes (docs/scheduling.md). Pure bookkeeping, no tensors; one thread at a time.

    plan = scheduler.plan()
    program.copy_blocks(kv.take_copies()); program.launch(...); program.wait()
    scheduler.advance(plan)                  then append a token to, or finish, each sequence that has none pending

With speculation (docs/speculation.md) scheduler.draft(plan, choose) adds drafts to a plan before it is launched, and
scheduler.accept(sequence) follows when the tokens are appended that the step has confirmed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Generic

from .admission import Admission
from .chunking import divide, room_for_next
from .errors import InvalidPriority, NeverFits
from .plan import StepPlan
from .sequence import MAX_PRIORITY, S, SequenceState
from .settings import SchedulerPolicy, SchedulerSettings

if TYPE_CHECKING:
    from ..adapters.slots import AdapterSlots
    from ..kv import KvCache

RUNNING = SequenceState.RUNNING

Choose = Callable[[list[S], list[int], int, int], dict[S, list[int]]]
"""(sequences that generate, the most tokens that may be drafted for each, for all together, tokens that the step has
without them) -> the drafts of those that get one."""


class Scheduler(Generic[S]):
    """Waiting and running sequences over one KV cache, which nobody else draws blocks from.

    S            Sequence, or the caller's class that extends it

    version      changes whenever a plan of plan_steady made before is void
    num_pauses   how often a sequence was paused, since the beginning
    """

    def __init__(self, kv: KvCache, settings: SchedulerSettings, clock: Callable[[], float] = time.monotonic,
                 slots: AdapterSlots | None = None) -> None:
        """clock: seconds; arrivals and deadlines of sequences are times of this clock. slots: of LoRA adapters."""
        self.settings = settings
        self.version = 0
        self.num_pauses = 0
        self._kv = kv
        self._clock = clock
        self._admission: Admission[S] = Admission(kv, settings, slots)
        self._running: list[S] = []  # in the order in which they were started
        self._next_deadline = math.inf  # no deadline is earlier
        # Left out of the last steady plan, since the step in flight gives them their last token.
        self._ending: list[S] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that have not started yet."""
        return len(self._admission.queue) - self.num_paused

    @property
    def num_paused(self) -> int:
        return self._admission.queue.num_paused

    @property
    def sequences(self) -> Iterator[S]:
        """All that have not finished: the running ones as they were started, then the others in order of their turn."""
        yield from self._running
        yield from self._admission.queue

    def check(self, num_tokens: int, max_len: int, priority: int = 0) -> None:
        """Raises what `add` would raise for a sequence of so many tokens. From any thread: it reads constants only."""
        if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise InvalidPriority(f"priority must be {-MAX_PRIORITY} to {MAX_PRIORITY}, not {priority}")
        kv = self._kv
        needed = kv.needed(max(num_tokens, max_len - 1), self.settings.max_num_tokens)
        if needed > kv.num_blocks:
            size = kv.block_size
            raise NeverFits(
                f"a prompt of {num_tokens} tokens with its answer, {max_len} tokens together, needs {needed} KV blocks "
                f"of {size} tokens; there are {kv.num_blocks} ({kv.num_blocks * size} tokens).\n"
                f"  Lower max_tokens, shorten the prompt, or raise kv_cache_tokens to {needed * size}."
            )

    def add(self, sequence: S) -> None:
        """Let a sequence wait for its turn. Raises NeverFits if it could never have one, or InvalidPriority."""
        self.check(len(sequence.tokens), sequence.max_len, sequence.priority)
        self._admission.queue.add(sequence)
        if sequence.deadline is not None:
            self._next_deadline = min(self._next_deadline, sequence.deadline)
        if self._running and self._admission.can_start(self._running):
            self.version += 1

    def finish(self, sequence: S, publish: bool = True) -> None:
        """A sequence has ended, in whatever way: complete, cancelled, failed. Its blocks stay cached or are free.

        At any time, also while a step with it is in flight; a second time changes nothing.
        publish  False: what of its KV is not shared yet is not to be trusted
        """
        if sequence.state is SequenceState.FINISHED:
            return
        if sequence.state is RUNNING:
            self._running.remove(sequence)
            self._release(sequence, publish)
            self._admission.room_was_made()
        else:
            self._admission.remove(sequence)
        sequence.state = SequenceState.FINISHED
        if sequence not in self._ending:
            self.version += 1

    def plan(self) -> StepPlan[S]:
        """The next step, when none is in flight."""
        plan: StepPlan[S] = StepPlan()
        self._ending.clear()
        if self._next_deadline <= self._clock():
            self._expire(plan)
        settings, running = self.settings, self._running
        num_generating = 0
        contexts: list[S] = []
        for sequence in running:
            pending = len(sequence.tokens) - sequence.num_computed
            if pending == 1:
                num_generating += 1
            elif pending:
                contexts.append(sequence)
        self._grow_all(contexts, num_generating, plan)
        if plan.paused:
            contexts = [sequence for sequence in contexts if sequence.state is RUNNING]
            num_generating = sum(sequence.num_pending == 1 for sequence in running)
        else:
            num_generating += self._admit(contexts, num_generating, plan)
        counts = iter(self._divide(contexts, num_generating))
        entries = plan.entries
        for sequence in running:
            pending = len(sequence.tokens) - sequence.num_computed
            if pending == 1:
                entries.append((sequence, 1, 1))
            elif pending:
                # A pause or an admission has moved the shares; blocks are there for the old ones.
                count = min(next(counts), sequence.kv.capacity - sequence.num_computed)
                if count:
                    entries.append((sequence, count, sequence.num_logits(count)))
        assert len(entries) <= settings.max_batch_size
        return plan

    def plan_steady(self) -> StepPlan[S] | None:
        """The step after the one in flight, if it is sure to be one more token for each sequence, else None.

        None unless every running sequence generates, nobody waiting can start, and there are blocks. A sequence that
        the step in flight completes to max_len is left out. The plan is good while `version` stays as it is; deadlines
        that pass meanwhile take effect one step later.
        """
        running, kv = self._running, self._kv
        if self._next_deadline <= self._clock() or self._admission.can_start(running):
            return None
        plan: StepPlan[S] = StepPlan()
        ending: list[S] = []
        entries = plan.entries
        for sequence in running:
            # Once the step in flight is done: all tokens there are now are computed, and there is one more.
            computed = len(sequence.tokens)
            if computed - sequence.num_computed != 1 or sequence.draft:
                return None
            if computed + 1 >= sequence.max_len:
                ending.append(sequence)
                continue
            if computed >= sequence.kv.capacity and not kv.grow(sequence.kv, computed + 1):
                return None
            entries.append((sequence, 1, 1))
        if not entries or (ending and self._admission.queue):
            return None
        self._ending = ending
        return plan

    def advance(self, plan: StepPlan[S]) -> None:
        """The plan's step is done: what it computed is written. Sequences that have finished meanwhile are passed."""
        block_size, advance = self._kv.block_size, self._kv.advance
        for sequence, count, _ in plan.entries:
            if sequence.state is RUNNING:
                computed = sequence.num_computed + count
                if sequence.draft:  # `accept` counts what is confirmed of it
                    computed = len(sequence.tokens)
                sequence.num_computed = computed
                # One token more matters to the cache only when it fills a block.
                if count > 1 or computed % block_size == 0:
                    advance(sequence.kv, computed)

    def draft(self, plan: StepPlan[S], choose: Choose[S]) -> bool:
        """Gives drafts to sequences of the plan that generate, from what the step has left over; whether there are any.

        To be called when all tokens of the sequences are known. Nobody is paused for a draft, no prompt gets less, and
        no sequence more KV blocks than it may have at its end.
        """
        settings = self.settings
        if len(plan.entries) >= settings.max_batch_size:
            return False
        num_tokens = sum(count for _, count, _ in plan.entries)
        num_rows = sum(rows for *_, rows in plan.entries)
        room = min(settings.max_num_tokens - num_tokens, settings.max_batch_size - num_rows)
        generating = [sequence for sequence, count, rows in plan.entries
                      if count == 1 and rows and len(sequence.tokens) - sequence.num_computed == 1]
        if room <= 0 or not generating:
            return False
        most = settings.speculative_tokens
        limits = [min(most, sequence.max_len - 1 - len(sequence.tokens)) for sequence in generating]
        drafts = choose(generating, limits, room, num_tokens)
        if not drafts:
            return False
        for sequence, draft in drafts.items():
            sequence.draft = draft[: self._room_for_draft(sequence, len(draft))]
        plan.entries = [(sequence, count + len(sequence.draft), rows + len(sequence.draft))
                        for sequence, count, rows in plan.entries]
        return any(sequence.draft for sequence in drafts)

    def _room_for_draft(self, sequence: S, count: int) -> int:
        """How many of so many tokens behind a sequence's own its KV blocks have room for; it may get more."""
        kv, end = self._kv, len(sequence.tokens)
        missing = -(-(end + count - sequence.kv.capacity) // kv.block_size)
        if missing > 0:
            # The others come first: where nothing is reserved, a block for each of them must be left.
            spare = len(self._running) if self.settings.policy is SchedulerPolicy.MAX_UTILIZATION else 0
            if spare and kv.num_available < (missing + spare) * len(kv.windows):
                return min(count, sequence.kv.capacity - end)
            kv.grow(sequence.kv, end + count)
        return count

    def accept(self, sequence: S) -> None:
        """The tokens are appended that the step has given to a sequence with a draft: all but the last are computed."""
        sequence.draft = []
        if sequence.state is RUNNING:
            sequence.num_computed = len(sequence.tokens) - 1
            self._kv.advance(sequence.kv, sequence.num_computed)

    def _divide(self, contexts: list[S], num_generating: int) -> list[int]:
        """Generation goes first: each of its tokens is one that somebody waits for."""
        settings = self.settings
        return divide(contexts, settings.max_num_tokens - num_generating, settings.max_batch_size - num_generating,
                      settings.chunking, self._kv.block_size)

    def _grow_all(self, contexts: list[S], num_generating: int, plan: StepPlan[S]) -> None:
        """Blocks for what each running sequence computes next. The oldest first, so that the last started give way."""
        counts = iter(self._divide(contexts, num_generating))
        for sequence in self._running:  # pauses shorten it from its end
            pending = len(sequence.tokens) - sequence.num_computed
            num_tokens = sequence.num_computed + (next(counts) if pending > 1 else pending)
            if num_tokens > sequence.kv.capacity:
                while not self._kv.grow(sequence.kv, num_tokens):
                    last = self._running[-1]
                    self._pause(last, plan)
                    if last is sequence:
                        break

    def _pause(self, sequence: S, plan: StepPlan[S]) -> None:
        assert self.settings.policy is SchedulerPolicy.MAX_UTILIZATION, "reserved blocks are missing"
        assert len(self._running) > 1, "a sequence that fits the cache does not fit it alone"
        self._running.pop()
        sequence.num_scored = max(sequence.num_scored, sequence.num_computed)
        self._release(sequence, publish=True)
        sequence.num_computed = 0
        sequence.state = SequenceState.PAUSED
        self._admission.queue.put_back(sequence)
        self.num_pauses += 1
        plan.paused.append(sequence)

    def _release(self, sequence: S, publish: bool) -> None:
        if publish and sequence.kv.num_computed < sequence.num_computed:
            self._kv.advance(sequence.kv, sequence.num_computed)
        self._kv.release(sequence.kv, publish_tail=publish)

    def _admit(self, contexts: list[S], num_generating: int, plan: StepPlan[S]) -> int:
        """Starts waiting sequences, appending to `contexts` those that have more than one token pending.

        Returns the number of the others.
        """
        settings, admission, kv, running = self.settings, self._admission, self._kv, self._running
        num_single = 0
        candidates = admission.candidates(running)
        while True:
            left = settings.max_num_tokens - num_generating - num_single
            room = room_for_next(contexts, left, settings.chunking, kv.block_size)
            sequence = next(candidates, None) if room else None
            if sequence is None or not admission.start(sequence, running, room):
                return num_single
            sequence.state = RUNNING
            sequence.num_computed = sequence.kv.num_computed
            if sequence.num_cached is None:
                sequence.num_cached = sequence.num_computed
            running.append(sequence)
            plan.admitted.append(sequence)
            if sequence.num_pending == 1:
                num_single += 1
            else:
                contexts.append(sequence)

    def _expire(self, plan: StepPlan[S]) -> None:
        now, self._next_deadline = self._clock(), math.inf
        for sequence in list(self.sequences):
            if sequence.deadline is None:
                continue
            if sequence.deadline <= now:
                self.finish(sequence)
                plan.expired.append(sequence)
            else:
                self._next_deadline = min(self._next_deadline, sequence.deadline)
