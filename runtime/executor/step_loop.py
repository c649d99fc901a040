"""Runs the answers that the scheduler holds, step by step, the host's work beside the device's.

    loop.wait()                    the step in flight, if any, is done: its tokens are appended
    …                              here requests come and go
    loop.launch()                  the next step: the one that was prepared, if nothing has happened since
    loop.deliver()                 while it runs: the text and the outputs of the step before,
    loop.prepare()                 and the inputs of the next one, all but the tokens that are being computed

With speculation a step verifies drafts too, and an answer may get several tokens from it; what comes next is prepared
then only as far as nobody has a draft.

One thread at a time. The end of an answer is known before the next launch, so that no row is computed in vain.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..errors import IngotError
from ..sampling import SamplingError
from ..speculation import Speculator
from .answer import Answer, Running, Sink
from .recorder import Recorder, cache_use
from .request import FinishReason, RequestFailed, RequestOutput, TokenLogprobs
from .rows import logprobs_of, rows_of, run_logprobs

if TYPE_CHECKING:
    from ..kv import KvCache
    from ..program import Program
    from ..sampling_inputs import StepOutputs
    from ..scheduler import Scheduler, StepPlan
    from ..step import StepInputs
    from .request_log import RequestLog


_keys = itertools.count(1)
"""Of admissions, see StepInputs.add: unique over the process, for a program may get another loop after its first."""


class StepLoop:
    """requests       those that have not ended, by their id
    num_unstarted  how many of them wait for their first admission
    """

    def __init__(self, program: Program, kv: KvCache, scheduler: Scheduler[Answer], recorder: Recorder,
                 log: RequestLog | None = None) -> None:
        self.requests: dict[str, Running] = {}
        self.num_unstarted = 0
        self._program = program
        self._kv = kv
        self._scheduler = scheduler
        self._recorder = recorder
        self._log = log
        self._buffer = 0  # of program.inputs: the one that is filled next
        self._in_flight: StepPlan[Answer] | None = None
        self._prepared: StepPlan[Answer] | None = None
        self._prepared_at = 0  # the scheduler's version then
        self._speculator: Speculator[Answer] | None = None
        if scheduler.settings.speculative_tokens:
            self._speculator = Speculator(_usable)
        self._num_generating = 0  # tokens of the step in flight if all its sequences generate, else 0
        self._launched_at = 0.0
        # What has come and is not delivered yet: tokens, and answers that ended without one.
        self._tokens: list[tuple[Answer, list[int], list[TokenLogprobs] | None, bool]] = []  # the last: they end it
        self._ended: list[Answer] = []
        self._step_at = 0.0
        self._step_before_at = 0.0

    def add(self, running: Running) -> None:
        """Let the answers of a request wait for their turn. Raises NeverFits, and the request is none."""
        for number, answer in enumerate(running.answers):
            try:
                self._scheduler.add(answer)
            except BaseException:
                for added in running.answers[:number]:
                    self._scheduler.finish(added)
                raise
        self.requests[running.request.request_id] = running
        self.num_unstarted += 1
        self._recorder.requests_received += 1

    def end(self, running: Running, reason: FinishReason, error: IngotError | None = None) -> None:
        """Ends what has not ended of a request; its KV blocks are free at once. Not while a step is in flight."""
        for answer in running.answers:
            if answer.finish_reason is None:
                self._scheduler.finish(answer)
                self._end(answer, reason, error)

    def fail(self, error: IngotError, others: Iterable[Running] = ()) -> None:
        """The device is broken: all requests end with the error, and others that were not added yet. The last call."""
        for running in others:
            self.requests[running.request.request_id] = running
            self.num_unstarted += 1
        for running in list(self.requests.values()):
            for answer in running.answers:
                if answer.finish_reason is None:
                    self._end(answer, "error", error)
        self.deliver()

    def release(self) -> None:
        """Lets go of the program. The last call, after `fail` or when nothing runs any more."""
        self.__dict__.pop("_program", None)

    def _end(self, answer: Answer, reason: FinishReason, error: IngotError | None = None) -> None:
        """Of an answer that the scheduler has let go of."""
        answer.finish_reason, answer.error = reason, error
        self._ended.append(answer)

    def step(self) -> bool:
        """One turn with nothing in between; False if there is nothing to do."""
        self.wait()
        launched = self.launch()
        delivered = self.deliver()
        self.prepare()
        return launched or delivered

    def settle(self) -> None:
        """No step is in flight any more, and none is prepared: the device is free for something else."""
        self.wait()
        self._prepared = None
        self.deliver()

    def wait(self) -> None:
        """The step in flight is done: its tokens are appended, and what ends by them is finished."""
        plan = self._in_flight
        if plan is None:
            return
        self._in_flight = None
        begin = time.perf_counter()
        outputs = self._program.wait()
        done = time.perf_counter()
        self._step_before_at, self._step_at = self._step_at, time.monotonic()
        if self._speculator is not None and self._num_generating:
            self._speculator.times.add(self._num_generating, done - self._launched_at)
        self._scheduler.advance(plan)
        self._take(plan, outputs)
        recorder = self._recorder
        recorder.step_phases["device"].observe(done - begin)
        recorder.step_phases["tokens"].observe(time.perf_counter() - done)
        recorder.steps += 1

    def _take(self, plan: StepPlan[Answer], outputs: StepOutputs) -> None:
        tokens = outputs.tokens.tolist()
        taken, finish = self._tokens, self._scheduler.finish
        end = 0
        for answer, _, num_logits in plan.entries:
            if not num_logits:
                continue
            end += num_logits
            if answer.draft:
                self._take_run(answer, tokens[end - num_logits : end], end - num_logits, outputs)
                continue
            logprobs = logprobs_of(answer, end - num_logits, end, outputs) if answer.wants_logprobs else None
            if answer.num_pending:  # a piece of a prompt whose tokens are scored
                continue
            token = tokens[end - 1]
            if token < 0:
                self._fail(answer)
                continue
            try:
                ends = answer.take(token)
            except IngotError as error:
                finish(answer)
                self._end(answer, "error", error)
                continue
            taken.append((answer, [token], logprobs, ends))
            if ends:
                finish(answer)

    def _take_run(self, answer: Answer, sampled: list[int], row: int, outputs: StepOutputs) -> None:
        """sampled: what follows the last token, then each token of the draft; from row `row` of the outputs on.

        What follows a token counts as long as the draft before it is what was chosen, and the answer has not ended.
        """
        draft, taken = answer.draft, list[int]()
        error: IngotError | None = None
        ends = is_failed = False
        for token, drafted in zip(sampled, [*draft, None], strict=True):
            if is_failed := token < 0:
                break
            try:
                ends = answer.take(token)
            except IngotError as found:
                error = found
                break
            taken.append(token)
            if ends or token != drafted:
                break
        if taken:
            logprobs = run_logprobs(answer, row, len(taken), outputs) if answer.wants_logprobs else None
            self._tokens.append((answer, taken, logprobs, ends))
        self._recorder.draft_tokens += len(draft)
        self._recorder.accepted_draft_tokens += sum(map(operator.eq, taken, draft))
        if is_failed:
            self._fail(answer)
            return
        self._scheduler.accept(answer)
        if ends or error is not None:
            self._scheduler.finish(answer)
        if error is not None:
            self._end(answer, "error", error)

    def _fail(self, answer: Answer) -> None:
        """No token could be chosen."""
        self._scheduler.finish(answer, publish=False)
        what = f"{answer.request_id}: no token can follow token {len(answer.tokens) - 1}"
        error: IngotError = RequestFailed(f"{what}: its logits are no numbers, or every token is banned.\n"
                                          "  Find the layer with: ingot compare")
        if answer.sampling.forbids_all:
            error = SamplingError("guide", f"{what}: the guide, with the tokens that are banned (min_tokens bans the "
                                           "end of an answer), allows none")
        self._end(answer, "error", error)

    def launch(self) -> bool:
        """Starts the next step; False if nothing can run."""
        begin = time.perf_counter()
        inputs = self._program.inputs[self._buffer]
        plan = self._prepared
        self._prepared = None
        generates = plan is not None and self._scheduler.version == self._prepared_at
        if plan is not None and generates:
            planned = begin
            if self._draft(plan):
                planned = time.perf_counter()
                self._fill(plan, inputs)
            else:
                inputs.token_ids[: inputs.num_tokens] = [entry[0].tokens[-1] for entry in plan.entries]
        else:
            plan = self._scheduler.plan()
            self._note(plan)
            generates = all(answer.num_pending == 1 for answer, _, _ in plan.entries)
            self._draft(plan)
            planned = time.perf_counter()
            if not plan.entries:
                return False
            self._fill(plan, inputs)
        inputs.sampling.fill(rows_of(plan))
        if inputs.sampling.mask_wait_s:
            self._recorder.guided_mask_wait.observe(inputs.sampling.mask_wait_s)
        copies = self._kv.take_copies()
        if copies:
            self._program.copy_blocks(copies)
        self._program.launch(inputs)
        self._in_flight = plan
        self._launched_at, self._num_generating = begin, inputs.num_tokens if generates else 0
        self._buffer = 1 - self._buffer
        phases = self._recorder.step_phases
        phases["schedule"].observe(planned - begin)
        phases["inputs"].observe(time.perf_counter() - planned)
        self._recorder.computed_tokens += inputs.num_tokens
        return True

    def _draft(self, plan: StepPlan[Answer]) -> bool:
        """Whether the plan has drafts now, for which its inputs must be made anew."""
        return self._speculator is not None and self._scheduler.draft(plan, self._speculator.choose)

    def _note(self, plan: StepPlan[Answer]) -> None:
        """Who came and went by the scheduler's decision."""
        for answer in plan.admitted:
            answer.key = next(_keys)
            self._start(answer.running)
        for answer in plan.paused:
            answer.running.num_pauses += 1
            self._recorder.requests_paused += 1
        for answer in plan.expired:
            self._end(answer, "timeout")

    def _start(self, running: Running) -> None:
        if running.admitted_at is None:
            running.admitted_at = time.monotonic()
            self.num_unstarted -= 1
            self._recorder.queue_time.observe(running.admitted_at - running.request.arrival)

    def _fill(self, plan: StepPlan[Answer], inputs: StepInputs) -> None:
        inputs.clear()
        for answer, count, num_logits in plan.entries:
            begin = answer.num_computed
            tokens = answer.tokens[begin : begin + count] + answer.draft
            inputs.add(tokens, begin, answer.kv.tables, num_logits, answer.key, answer.slot)

    def prepare(self) -> None:
        """The step behind the one in flight, as it will be unless something happens."""
        if self._in_flight is None:
            return
        begin = time.perf_counter()
        plan = self._prepared = self._scheduler.plan_steady()
        planned = time.perf_counter()
        if plan is not None:
            self._prepared_at = self._scheduler.version
            inputs = self._program.inputs[self._buffer]
            inputs.clear()
            for answer, _, _ in plan.entries:  # each computes the token that it is just being given
                inputs.add((0,), len(answer.tokens), answer.kv.tables, 1, answer.key, answer.slot)
            phases = self._recorder.step_phases
            phases["schedule"].observe(planned - begin)
            phases["inputs"].observe(time.perf_counter() - planned)

    def deliver(self) -> bool:
        """Hands out what has come since the last call; False if nothing has."""
        if not self._tokens and not self._ended:
            return False
        begin = time.perf_counter()
        recorder = self._recorder
        now, before = self._step_at, self._step_before_at
        num_steady = 0
        batches: dict[Sink, list[RequestOutput]] = {}
        sink, outputs = None, []
        num_tokens = 0
        for answer, tokens, logprobs, ends in self._tokens:
            num_tokens += len(tokens)
            if len(tokens) > 1:
                self._note_run(answer, len(tokens), now)
            elif answer.last_token_at == before:
                num_steady += 1
                if now - before > answer.longest_gap_s:
                    answer.longest_gap_s = now - before
            else:
                self._note_time(answer, now)
            answer.last_token_at = now
            if answer.running.sink is not sink:
                sink = answer.running.sink
                outputs = batches.setdefault(sink, [])
            outputs.append(answer.output(tokens, logprobs, ends))
            if ends:
                self._close(answer)
        for answer in self._ended:
            batches.setdefault(answer.running.sink, []).append(answer.last_output())
            self._close(answer)
        if num_steady:
            recorder.inter_token_latency.observe(now - before, num_steady)
        recorder.generated_tokens += num_tokens
        self._tokens.clear()
        self._ended.clear()
        for sink, outputs in batches.items():
            sink(outputs)
        recorder.step_phases["outputs"].observe(time.perf_counter() - begin)
        return True

    def _note_run(self, answer: Answer, count: int, now: float) -> None:
        """Of tokens that came together: each is given its part of the time since the token before them."""
        if answer.first_token_at is None:
            self._note_time(answer, now)
            self._recorder.inter_token_latency.observe(0.0, count - 1)
            return
        gap = now - answer.last_token_at
        self._recorder.inter_token_latency.observe(gap / count, count)
        answer.longest_gap_s = max(answer.longest_gap_s, gap)

    def _note_time(self, answer: Answer, now: float) -> None:
        """Of a token that does not follow on one of the step before."""
        recorder = self._recorder
        if answer.first_token_at is not None:  # it was paused meanwhile
            gap = now - answer.last_token_at
            recorder.inter_token_latency.observe(gap)
            answer.longest_gap_s = max(answer.longest_gap_s, gap)
            return
        answer.first_token_at = now
        cached = answer.num_cached or 0
        use = cache_use(answer.num_prompt, cached, self._kv.block_size)
        recorder.time_to_first_token[use].observe(now - answer.arrival)
        recorder.prompt_tokens += answer.num_prompt
        recorder.cached_prompt_tokens += cached

    def _close(self, answer: Answer) -> None:
        running, recorder = answer.running, self._recorder
        assert answer.finish_reason is not None
        recorder.requests_finished[answer.finish_reason] += 1
        if self._speculator is not None:
            self._speculator.forget(answer)
        running.num_open -= 1
        if running.num_open:
            return
        now = time.monotonic()
        del self.requests[running.request.request_id]
        if running.admitted_at is None:
            self.num_unstarted -= 1
        recorder.request_time.observe(now - running.request.arrival)
        if self._log is not None:
            self._log.write(running, now)


def _usable(answer: Answer, draft: list[int]) -> int:
    """How many first tokens of a draft the answer could have: none that ends it, none that its guide forbids."""
    ends, guide, count = answer.end_token_ids, answer.sampling.guide, len(draft)
    if ends:
        count = next((place for place, token in enumerate(draft) if token in ends), count)
    return count if guide is None else guide.allowed(draft[:count])
