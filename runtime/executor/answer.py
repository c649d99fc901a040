"""A request while it runs: its answers, and what becomes of the tokens that they get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import IngotError
from ..kv import CacheKey, KvSequence
from ..sampling import SamplingError
from ..sampling_inputs import Score
from ..sampling_state import SequenceSampling, spell
from ..scheduler import Sequence
from .request import FinishReason, Request, RequestOutput, TokenLogprobs
from .stop_strings import StopStrings

if TYPE_CHECKING:
    from ..adapters.loaded import LoadedAdapter
    from ..guides import Guides
    from ..text_stream import TextStream
    from ..tokenizer import Tokenizer

Sink = Callable[[list[RequestOutput]], None]
"""Takes the outputs of one step, on the thread that computes them."""


@dataclass(eq=False, slots=True)
class Running:
    """A request that has not ended.

    Times are those of time.monotonic(); None until it is so far. num_open: answers that have not ended.
    """

    request: Request
    sink: Sink
    adapter: LoadedAdapter | None = None
    answers: list[Answer] = field(default_factory=list)
    num_open: int = 0
    admitted_at: float | None = None
    num_pauses: int = 0


class Answer(Sequence):
    """One of the n answers of a request: the scheduler's sequence, and how its tokens become output.

    key              stands for its KV blocks in the inputs of steps: a new number at every admission
    end_token_ids    tokens that end it
    tracks_tokens    `sampling` must be told each token
    looks_for_stops  stop strings are looked for as soon as a token is there, before the next step; `text` is then what
                     the tokens since the last output give out
    prompt_logprobs  those that have been computed; given out with the first token
    finish_reason, matched_stop, error  how it ended; None until then
    first_token_at, last_token_at, longest_gap_s  of time.monotonic(), for the counters
    """

    __slots__ = ("_matcher", "_stream", "end_token_ids", "error", "finish_reason", "first_token_at", "index",
                 "key", "last_token_at", "longest_gap_s", "looks_for_stops", "matched_stop", "num_output",
                 "num_prompt", "prompt_logprobs", "running", "sampling", "text", "tracks_tokens", "wants_logprobs")

    def __init__(self, running: Running, index: int, sampling: SequenceSampling, end_token_ids: frozenset[int],
                 max_seq_len: int, stream: TextStream | None) -> None:
        request, params, adapter = running.request, running.request.params, running.adapter
        tokens = list(request.prompt_token_ids)
        scored = params.prompt_logprobs is not None and index == 0
        key = CacheKey(request.cache_salt, None if adapter is None else adapter.number)
        kv = KvSequence(tokens, key, request.retention,
                        request.decode_priority, request.decode_duration_s)
        deadline = None if request.deadline_s is None else request.arrival + request.deadline_s
        Sequence.__init__(self, request.request_id, tokens, min(len(tokens) + params.max_tokens, max_seq_len), kv,
                          priority=request.priority, arrival=request.arrival, deadline=deadline, prompt_logits=scored,
                          adapter=adapter)
        self.num_prompt = len(tokens)
        self.running = running
        self.index = index
        self.sampling = sampling
        self.tracks_tokens = sampling.may_change
        self.end_token_ids = end_token_ids
        self.key = 0
        self.num_output = 0
        self.finish_reason: FinishReason | None = None
        self.matched_stop: str | int | None = None
        self.error: IngotError | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] if scored else None
        self.wants_logprobs = scored or params.logprobs is not None
        self.first_token_at: float | None = None
        self.last_token_at = -1.0
        self.longest_gap_s = 0.0
        self._stream = stream
        self._matcher = StopStrings(params.stop, params.include_stop) if params.stop and stream is not None else None
        self.looks_for_stops = self._matcher is not None
        self.text = ""

    def take(self, token: int) -> bool:
        """Appends a token; whether the answer ends with it. Raises IngotError if its guide cannot follow."""
        tokens = self.tokens
        tokens.append(token)
        if self.tracks_tokens:
            self.sampling.append(token)
        self.num_output += 1
        if token in self.end_token_ids:
            self._stop_by(token)
        elif len(tokens) >= self.max_len:
            self.finish_reason = "length"
        if self.looks_for_stops:
            self.text += self._next_text(token)
        return self.finish_reason is not None

    def rows(self, begin: int, end: int) -> list[SequenceSampling | Score]:
        """What is to be done with the logits of tokens begin to end: score the token that follows, or choose one."""
        count, tokens = self.running.request.params.prompt_logprobs or 0, self.tokens
        return [Score(tokens[place + 1], count) if place + 1 < len(tokens) else self.sampling
                for place in range(begin, end)]

    def _stop_by(self, token: int) -> None:
        self.finish_reason = "stop"
        self.matched_stop = token if token in self.running.request.params.stop_token_ids else None

    def _next_text(self, token: int) -> str:
        """What a token adds to the text; finish_reason becomes "stop" where a stop string is complete."""
        stream, matcher, params = self._stream, self._matcher, self.running.request.params
        assert stream is not None
        text = stream.add(token) if self.finish_reason != "stop" or params.include_stop else ""
        if self.finish_reason is not None:
            text += stream.end()
        if matcher is None:
            return text
        text, stop = matcher.add(text, self.num_output >= params.min_tokens)
        if stop is not None and self.matched_stop is None:
            self.finish_reason, self.matched_stop = "stop", stop
        elif self.finish_reason is not None:
            text += matcher.end()
        return text

    def output(self, tokens: list[int], logprobs: list[TokenLogprobs] | None, ends: bool) -> RequestOutput:
        """What the newest tokens, those of one step, give out. Once for each step. ends: they end the answer."""
        if self.looks_for_stops:
            text, self.text = self.text, ""
        elif self._stream is None:
            text = ""
        else:
            text = self._stream.add(tokens[0]) if not ends and len(tokens) == 1 else self._text_of(tokens, ends)
        output = RequestOutput(self.request_id, self.index, tokens, text, self.num_prompt, self.num_cached or 0,
                               self.num_output, logprobs)
        if ends:
            output.finish_reason, output.matched_stop = self.finish_reason, self.matched_stop
        if self.num_output == len(tokens):
            output.prompt_logprobs = self.prompt_logprobs
        return output

    def _text_of(self, tokens: list[int], ends: bool) -> str:
        assert self._stream is not None
        text = "".join(map(self._stream.add, tokens[:-1]))
        return text + (self._next_text(tokens[-1]) if ends else self._stream.add(tokens[-1]))

    def last_output(self) -> RequestOutput:
        """The end of an answer that ends without a token: cancelled, out of time, failed."""
        text = ""
        if self._stream is not None:
            text = self._stream.end() + (self._matcher.end() if self._matcher is not None else "")
        return RequestOutput(self.request_id, self.index, [], text, self.num_prompt, self.num_cached or 0,
                             self.num_output, None, None, self.finish_reason, None, self.error)


def make_answers(request: Request, sink: Sink, tokenizer: Tokenizer | None, model_end_ids: frozenset[int],
                 max_seq_len: int, guides: Guides | None = None, adapter: LoadedAdapter | None = None) -> Running:
    """The answers of a request, not yet known to the scheduler. Raises SamplingError, WorkFailed."""
    running = Running(request, sink, adapter)
    params, prompt = request.params.seeded(), request.prompt_token_ids
    ends = model_end_ids if not params.ignore_eos else frozenset()
    if params.stop_token_ids:
        ends = ends.union(params.stop_token_ids)
    for name in ("stop", "bad_words"):
        if getattr(params, name) and tokenizer is None:
            raise SamplingError(name, f"{name} holds texts, but this engine has no tokenizer; give token ids instead")
    if params.guide is not None and guides is None:
        raise SamplingError("guide", "guide: this engine has no tokenizer, so that the text of an answer is not known")
    bad = spell(params.bad_words, tokenizer) if params.bad_words and tokenizer is not None else []
    needs_text = tokenizer is not None and (request.wants_text or bool(params.stop))
    for index in range(params.n):
        guide = guides.start(params.guide) if params.guide is not None and guides is not None else None
        sampling = SequenceSampling(params, prompt, ends, bad, index, guide)
        stream = tokenizer.stream(prompt, params.skip_special_tokens) if tokenizer is not None and needs_text else None
        running.answers.append(Answer(running, index, sampling, ends, max_seq_len, stream))
    running.num_open = params.n
    return running
