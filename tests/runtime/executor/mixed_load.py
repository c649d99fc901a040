"""Everything at once, from one seed: requests of all kinds come, are cancelled and run out of time, with adapters or
without, on a program that computes. One thread, and a clock that counts steps: a seed gives the same run again.

Each answer must be what its request gets alone, without reuse and without drafts, as far as it came.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ingot.runtime.adapters.loaded import LoadedAdapter
from ingot.runtime.adapters.slots import AdapterSlots
from ingot.runtime.executor.answer import Running, make_answers
from ingot.runtime.executor.recorder import Recorder
from ingot.runtime.executor.request import Request, RequestOutput, TokenLogprobs
from ingot.runtime.executor.step_loop import StepLoop
from ingot.runtime.guides import Guides
from ingot.runtime.kv import KvCache
from ingot.runtime.kv.sequence import RetentionRange
from ingot.runtime.program import Limits, Program
from ingot.runtime.sampling import Guide, SamplingError, SamplingParams
from ingot.runtime.scheduler import ChunkingPolicy, Scheduler, SchedulerPolicy, SchedulerSettings
from ingot.runtime.tokenizer import Tokenizer

_GUIDES = (Guide("regex", "([a-z]{3}-)*[a-z]{3}"), Guide("choice", choices=("yes", "no", "perhaps not")),
           Guide("json_schema", '{"type": "array", "items": {"type": "integer"}, "minItems": 3}'))


@dataclass(frozen=True)
class Setting:
    """How an engine is run."""

    policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT
    chunking: ChunkingPolicy = ChunkingPolicy.FIRST_COME_FIRST_SERVED
    max_num_tokens: int | None = None
    reuse: bool = True
    drafts: int = 0


@dataclass(frozen=True)
class Speaker:
    """A program with all that answers need beside it."""

    program: Program
    limits: Limits
    tokenizer: Tokenizer
    end_token_ids: frozenset[int]

    def guides(self) -> Guides:
        return Guides(self.tokenizer, self.program.vocab_size, self.end_token_ids)


@dataclass
class Got:
    """What came of one answer."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    matched_stop: str | int | None = None

    def add(self, output: RequestOutput) -> None:
        assert self.finish_reason is None, "an output behind the last one"
        assert output.error is None or isinstance(output.error, SamplingError)  # a guide that leaves bad tokens only
        self.tokens += output.token_ids
        self.text += output.text
        self.logprobs += output.logprobs or ()
        assert output.num_output_tokens == len(self.tokens)
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None and len(self.tokens) == len(output.token_ids)
            self.prompt_logprobs = output.prompt_logprobs
        self.finish_reason, self.matched_stop = output.finish_reason, output.matched_stop


class Run:
    """One loop over the program. clock: steps."""

    def __init__(self, speaker: Speaker, setting: Setting) -> None:
        program, limits = speaker.program, speaker.limits
        self.speaker = speaker
        self.clock = 0.0
        self.recorder = Recorder()
        settings = SchedulerSettings.within(
            limits, None, setting.max_num_tokens, policy=setting.policy, chunking=setting.chunking,
            speculative_tokens=setting.drafts)
        self.kv = KvCache(program.num_blocks, program.block_size, program.kv_windows,
                          num_host_blocks=program.num_host_blocks, max_chunk=settings.max_num_tokens,
                          max_draft=setting.drafts, enable_reuse=setting.reuse)
        self.scheduler: Scheduler[Any] = Scheduler(self.kv, settings, lambda: self.clock,
                                                   AdapterSlots.of(program, self.recorder))
        self.loop = StepLoop(program, self.kv, self.scheduler, self.recorder)
        self.got: dict[str, list[Got]] = {}
        self._guides = speaker.guides()

    def add(self, request: Request, adapter: LoadedAdapter | None) -> None:
        speaker = self.speaker
        self.scheduler.check(len(request.prompt_token_ids), min(len(request.prompt_token_ids)
                             + request.params.max_tokens, speaker.limits.max_seq_len), request.priority)
        running = make_answers(request, self._take, speaker.tokenizer, speaker.end_token_ids,
                               speaker.limits.max_seq_len, self._guides, adapter)
        self.got[request.request_id] = [Got() for _ in range(request.params.n)]
        self.loop.add(running)

    def running(self, request_id: str) -> Running | None:
        return self.loop.requests.get(request_id)

    def _take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.got[output.request_id][output.index].add(output)

    def step(self, between: Any = lambda: None) -> bool:
        """between: what requests do while no step is in flight."""
        self.loop.wait()
        between()
        launched = self.loop.launch()
        delivered = self.loop.deliver()
        self.loop.prepare()
        self.clock += 1
        return launched or delivered

    def check_books(self) -> None:
        """Once all requests have ended."""
        self.loop.settle()
        usage, recorder = self.kv.usage(), self.recorder
        assert not self.loop.requests and not self.loop.num_unstarted
        assert (self.scheduler.num_running, self.scheduler.num_waiting, self.scheduler.num_paused) == (0, 0, 0)
        assert (usage.num_used, self.kv.num_promised) == (0, 0)
        assert usage.num_cached + usage.num_free == self.kv.num_blocks
        assert recorder.requests_received == len(self.got)
        answers = [answer for answers in self.got.values() for answer in answers]
        assert sum(recorder.requests_finished.values()) == len(answers)
        for reason, count in recorder.requests_finished.items():
            assert count == sum(answer.finish_reason == reason for answer in answers)
        assert recorder.generated_tokens == sum(len(answer.tokens) for answer in answers)
        begun = [answer for answer in answers if answer.tokens]
        assert sum(each.total for each in recorder.time_to_first_token.values()) == len(begun)
        assert recorder.inter_token_latency.total == recorder.generated_tokens - len(begun)
        assert recorder.request_time.total == len(self.got)
        assert recorder.accepted_draft_tokens <= recorder.draft_tokens
        stats = self.kv.stats
        assert stats.queried_tokens == stats.hit_tokens + sum(stats.miss_tokens.values())
        self.kv.check()
        self.kv.clear()
        assert self.kv.usage().num_free == self.kv.num_blocks
        self.kv.check()


class Mix:
    """Requests of all kinds, and what each gets alone. adapters: those that requests may name."""

    def __init__(self, speaker: Speaker, adapters: Mapping[str, LoadedAdapter], seed: int) -> None:
        self.random = random.Random(seed)
        self._speaker = speaker
        self._adapters = adapters
        self._alone: dict[str, list[Got]] = {}
        size = speaker.limits.max_seq_len * 3 // 4
        self._documents = [[self.random.randrange(256) for _ in range(size)] for _ in range(3)]

    def adapter(self, name: str | None) -> LoadedAdapter | None:
        return None if name is None else self._adapters[name]

    def request(self, request_id: str) -> tuple[Request, str | None]:
        draw = self.random
        prompt = draw.choice(self._documents)[: draw.randrange(self._speaker.limits.max_seq_len * 3 // 4)]
        prompt = prompt + [draw.randrange(256) for _ in range(draw.randrange(0 if prompt else 1, 4))]
        lora = draw.choice([None, *self._adapters]) if self._adapters and draw.random() < 0.7 else None
        retention = (RetentionRange(0, None, draw.randrange(101)),) if draw.random() < 0.2 else ()
        deadline = float(draw.randrange(1, 60)) if draw.random() < 0.15 else None
        request = Request(request_id, prompt, self._params(), draw.randrange(-3, 4), deadline,
                          draw.choice([None, None, None, "salt"]), retention, lora=lora,
                          wants_text=draw.random() < 0.8)
        return request, lora

    def _params(self) -> SamplingParams:
        draw = self.random
        max_tokens = draw.choice([1, 2, draw.randrange(3, 40), draw.randrange(3, 40)])
        options: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": draw.random() < 0.6}
        if draw.random() < 0.5:
            options |= {"temperature": draw.choice([0.3, 1.0, 2.0]), "seed": draw.randrange(1 << 32)}
            options |= draw.choice([{}, {"top_k": 20}, {"top_p": 0.7}, {"min_p": 0.05}])
        if draw.random() < 0.3:
            options |= draw.choice([{"repetition_penalty": 1.4}, {"presence_penalty": 1.0, "frequency_penalty": 0.5},
                                    {"frequency_penalty": 1.0, "prompt_ignore_length": 2}])
        if draw.random() < 0.2:
            options["n"] = draw.randrange(2, 4)
        if draw.random() < 0.3:
            options["logprobs"] = draw.randrange(4)
        if draw.random() < 0.1:
            options["prompt_logprobs"] = draw.randrange(3)
        if draw.random() < 0.3:
            options["stop"] = tuple(draw.choice("abcdefghijklmnopqrstuvwxyz .,") for _ in range(draw.randrange(1, 6)))
            options["include_stop"] = draw.random() < 0.5
        if draw.random() < 0.2:
            options["bad_token_ids"] = tuple((draw.randrange(256), draw.randrange(256)) for _ in range(200))
        if draw.random() < 0.2:
            options["stop_token_ids"] = tuple(draw.randrange(256) for _ in range(8))
        if draw.random() < 0.2:
            options |= {"guide": draw.choice(_GUIDES), "ignore_eos": False}
        elif draw.random() < 0.2:
            options["min_tokens"] = draw.randrange(max_tokens + 1)
        return SamplingParams(**options)

    def alone(self, request: Request, lora: str | None) -> list[Got]:
        """What a request gets when nothing else is there."""
        if request.request_id not in self._alone:
            run = Run(self._speaker, Setting(reuse=False))
            only = Request(request.request_id, request.prompt_token_ids, request.params)
            run.add(only, self.adapter(lora))
            while run.loop.requests:
                assert run.step()
            run.check_books()
            self._alone[request.request_id] = run.got[request.request_id]
        return self._alone[request.request_id]


class Known:
    """A drafter that knows the answers, and errs in every fifth place."""

    certainty = 1
    answers: Sequence[Sequence[int]] = ()

    def propose(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        begin, so_far = len(tokens), list(tokens)
        for known in self.answers:
            if len(known) > begin and list(known[:begin]) == so_far:
                return [token if place % 5 else (token + 1) % 256
                        for place, token in enumerate(known[begin : begin + max_tokens], begin)]
        return []

    def accepted(self, count: int) -> None:
        pass


def mixed_run(run: Run, mix: Mix, num_requests: int) -> None:
    """Requests come in bursts, some are cancelled; every answer is compared with its own alone."""
    draw = mix.random
    requests = [mix.request(f"{number}") for number in range(num_requests)]
    wanted = {request.request_id: mix.alone(request, lora) for request, lora in requests}
    Known.answers = [[*request.prompt_token_ids, *answer.tokens] for request, _ in requests
                     for answer in wanted[request.request_id]]
    waiting = list(reversed(requests))
    cancelling: dict[str, float] = {}

    def between() -> None:
        for _ in range(draw.choice([0, 0, 0, 1, 2, 6]) if len(run.loop.requests) < 24 else 0):
            if not waiting:
                break
            request, lora = waiting.pop()
            run.add(dataclasses.replace(request, arrival=run.clock), mix.adapter(lora))
            if draw.random() < 0.2:
                cancelling[request.request_id] = run.clock + draw.randrange(30)
        for request_id in [each for each, at in cancelling.items() if at <= run.clock]:
            del cancelling[request_id]
            if (running := run.running(request_id)) is not None:
                run.loop.end(running, "cancelled")

    idle = 0
    while waiting or run.loop.requests:
        idle = 0 if run.step(between) else idle + 1
        assert idle < 100, f"stuck: {list(run.scheduler.sequences)}"
        run.kv.check()
    run.check_books()
    for request, _ in requests:
        for got, want in zip(run.got[request.request_id], wanted[request.request_id], strict=True):
            _compare(request, got, want)


def _compare(request: Request, got: Got, want: Got) -> None:
    count = len(got.tokens)
    assert got.tokens == want.tokens[:count], (request, got, want)
    if got.finish_reason in ("cancelled", "timeout"):
        assert got.finish_reason == "cancelled" or request.deadline_s is not None
        # Half a character at the end is told as that.
        assert want.text.startswith(got.text.rstrip("\N{REPLACEMENT CHARACTER}")), (request, got, want)
    else:
        assert (count, got.finish_reason, got.matched_stop) == (len(want.tokens), want.finish_reason,
                                                                want.matched_stop), (request, got, want)
        if request.wants_text or request.params.stop:
            assert got.text == want.text, (request, got, want)
    rows: list[tuple[Any, Any]] = list(zip(got.logprobs, want.logprobs, strict=False))
    if request.params.logprobs is not None:
        assert len(got.logprobs) == count
    if count and request.params.prompt_logprobs is not None and got.prompt_logprobs is not None:
        assert want.prompt_logprobs is not None and len(got.prompt_logprobs) == len(request.prompt_token_ids)
        rows += zip(got.prompt_logprobs[1:], want.prompt_logprobs[1:], strict=True)
    for one, other in rows:
        assert one.token_id == other.token_id
        assert abs(one.logprob - other.logprob) < 1e-3, (request, one, other)
        tops = zip(one.top_logprobs, other.top_logprobs, strict=True)
        assert all(abs(a - b) < 1e-3 for a, b in tops), (one, other)
