"""An engine, loaded and ready to answer.

    engine = Engine.load("x.engine")
    answer = engine.generate("The capital of France is", SamplingParams(max_tokens=16))
    for piece in engine.stream([{"role": "user", "content": "Hello"}]):
        print(piece, end="")
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np

from .adapters.loaded import LoadedAdapter, LoadedAdapters
from .adapters.slots import AdapterSlots
from .devices import load_program
from .errors import RequestError, WorkFailed
from .executor.answer import Answer, Running, make_answers
from .executor.recorder import Recorder
from .executor.request import PromptError, Request, RequestOutput, TokenLogprobs, check_prompt, check_room
from .executor.step_loop import StepLoop
from .guides import Guides
from .host import return_free_memory
from .kv import KvCache, KvSequence
from .kv_memory import most_useful_tokens
from .program import Limits, Program, step_logits
from .prompt import encode
from .sampling import SamplingParams
from .sampling_inputs import Float32Array
from .scheduler import Scheduler, SchedulerSettings
from .step import StepInputs
from .store.locate import open_engine
from .tokenizer import Tokenizer, read_config

if TYPE_CHECKING:
    from .chat_template import Message
    from .engine_file import EngineFile

    Prompt = str | Sequence[int] | Sequence[Message]


class KvCacheBusy(WorkFailed):
    """The KV blocks that are needed are held by logits that somebody is still reading."""


@dataclass(frozen=True)
class Generation:
    """An answer. finish_reason: "stop", the model or a stop string ended it, or "length".

    token_ids holds the token that ended it, text does not. text is empty if the engine has no tokenizer.
    index: which of the params.n answers. num_cached_tokens: of the prompt, taken from the KV cache.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    num_prompt_tokens: int
    index: int = 0
    matched_stop: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Piece:
    """One token of an answer and the text that it completes, often none. The last one has a finish_reason."""

    text: str
    token_id: int
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None

    def __str__(self) -> str:
        return self.text


class Engine:
    """A loaded engine. One thread at a time; several streams may be open and read in turn: they share their steps.

    Prompts that begin like an earlier one find its KV in the cache.

    file       the engine file: hash, manifest
    tokenizer  None if the engine has none: prompts are then token ids
    program    the engine on its device
    limits     what it was built for
    adapters   the LoRA adapters that prompts may be answered with
    """

    def __init__(self, file: EngineFile, program: Program, tokenizer: Tokenizer | None,
                 speculative_tokens: int = 0) -> None:
        self.file = file
        self.program = program
        self.tokenizer = tokenizer
        self.limits = Limits.of(file.manifest)
        self.stop_token_ids = frozenset(read_config(file).get("eos_token_ids", ()))
        self.kv = KvCache(program.num_blocks, program.block_size, program.kv_windows,
                          max_chunk=self.limits.max_num_tokens, max_draft=speculative_tokens)
        self._guides = Guides(tokenizer, program.vocab_size, self.stop_token_ids) if tokenizer is not None else None
        self.adapters = LoadedAdapters(program.lora)
        recorder = Recorder()
        slots = AdapterSlots.of(program, recorder)
        settings = SchedulerSettings.within(self.limits, speculative_tokens=speculative_tokens)
        self._scheduler: Scheduler[Answer] = Scheduler(self.kv, settings, slots=slots)
        self._loop = StepLoop(program, self.kv, self._scheduler, recorder)
        self._num_requests = 0

    @classmethod
    def load(cls, engine: str | os.PathLike[str], *, device: str | None = None, kv_cache_tokens: int | None = None,
             num_workers: int | None = None, store: str | os.PathLike[str] | None = None,
             speculative_tokens: int = 0) -> Self:
        """Load an engine: a file, a name in the store, or the start of a hash.

        device           by default what it was built for; "emulator" runs an engine for GPUs on the CPU, very slowly
        kv_cache_tokens  tokens that the KV cache has room for. By default as many as the engine's largest batch of
                         longest sequences, within half of the available memory, or 0.9 of a GPU's.
        num_workers      threads of a CPU engine; by default one a core that this process may use
        store            folder of the engine store; by default $INGOT_STORE, else engines/
        speculative_tokens  drafted tokens that a step may verify for an answer; 0: none (docs/speculation.md)
        Raises RequestError (EngineFormatError, EngineMismatch, NoGpu) or WorkFailed. The tokenizer is read, and found
        malformed, when it is first needed: prompts of token ids, and the first short texts, do without it.
        """
        file = open_engine(engine, store)
        try:
            program = load_program(file, kv_cache_tokens, num_workers, device=device,
                                   most_kv_tokens=most_useful_tokens(file.manifest))
            loaded = cls(file, program, Tokenizer.of(file, when_needed=True), speculative_tokens)
            return_free_memory()  # loading parses much JSON: what it leaves would stay for as long as the engine serves
            return loaded
        except BaseException:
            file.close()
            raise

    @property
    def hash(self) -> str:
        return self.file.hash

    def close(self) -> None:
        """End the device's threads and free its memory."""
        self.program.close()
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def load_adapter(self, name: str, folder: str | os.PathLike[str], *, sha256: str | None = None) -> LoadedAdapter:
        """A LoRA adapter that PEFT saved; from now on `lora=name` asks for it. sha256: what its content must have.

        Raises AdapterError, AdapterExists.
        """
        from .adapters.adapter import Adapter  # most engines that are loaded get none

        return self.adapters.load(name, Adapter.read(folder, sha256, room=self.adapters.room))

    def unload_adapter(self, name: str) -> None:
        """Streams that use it go on. Raises UnknownAdapter."""
        self.adapters.unload(name)

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str too
        self, prompts: str | Sequence[int] | Sequence[Message], params: SamplingParams = ..., lora: str | None = ...
    ) -> Generation: ...

    @overload
    def generate(self, prompts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Sequence[Message]],
                 params: SamplingParams = ..., lora: str | None = ...) -> list[Generation]: ...

    def generate(self, prompts: Any, params: SamplingParams = SamplingParams(),  # noqa: B008 (immutable)
                 lora: str | None = None) -> Any:
        """Answer one prompt, or several that run as one batch in flight.

        A prompt is a text, a list of token ids, or a chat: a list of messages with role and content. The answers have
        the order of the prompts; with params.n above 1 a prompt has so many in a row, and one prompt gives a list too.
        lora: name of a loaded adapter. Raises PromptError, SamplingError, ChatTemplateError, NeverFits, UnknownAdapter.
        """
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, np.integer, Mapping)))
        outputs: deque[RequestOutput] = deque()
        requests = [self._request(prompt, params, outputs, lora) for prompt in ([prompts] if is_one else prompts)]
        try:
            for request in requests:
                self._loop.add(request)
            while any(request.num_open for request in requests):
                self._advance()
        finally:
            for request in requests:
                self._give_up(request)
        answers = _generations(requests, outputs)
        return answers[0] if is_one and params.n == 1 else answers

    def stream(self, prompt: Prompt, params: SamplingParams = SamplingParams(),  # noqa: B008 (immutable)
               lora: str | None = None) -> Generator[Piece, None, None]:
        """The answer to one prompt, token by token as they come. Wrong prompts raise at once, as in `generate`.

        Its KV blocks are given back when it has ended, or is closed before. params.n must be 1.
        """
        if params.n != 1:
            raise RequestError(f"a stream is one answer, n is {params.n}; use generate for several")
        outputs: deque[RequestOutput] = deque()
        return self._pieces(self._request(prompt, params, outputs, lora), outputs)

    def _pieces(self, request: Running, outputs: deque[RequestOutput]) -> Generator[Piece, None, None]:
        try:
            self._loop.add(request)
            while True:
                while not outputs:
                    self._advance()
                output = outputs.popleft()
                if output.error is not None:
                    raise output.error
                yield from _pieces_of(output)
                if output.finish_reason is not None:
                    return
        finally:
            self._give_up(request)

    def _advance(self) -> None:
        if not self._loop.step():
            raise KvCacheBusy(f"{self._scheduler.num_waiting} sequences wait for KV blocks, which are held by logits "
                              "that are still being read.\n  Close the iterator of iter_logits, or read it to its end.")

    def _give_up(self, request: Running) -> None:
        """What has not ended of a request ends now; its KV blocks are free."""
        if request.num_open:
            self._loop.settle()
            self._loop.end(request, "cancelled")
            self._loop.deliver()

    def logits(self, token_ids: Sequence[int]) -> Float32Array:
        """The logits [T, vocab_size] that the model gives at each of the T tokens of a sequence."""
        return np.concatenate([rows.copy() for rows in self.iter_logits(token_ids)])

    def iter_logits(self, token_ids: Sequence[int]) -> Generator[Float32Array, None, None]:
        """As `logits`, but a few rows at a time, each array valid until the next one is asked for."""
        tokens = self._checked_ids(token_ids)
        count = min(self.limits.max_batch_size, self.limits.max_num_tokens)
        with self._private(tokens) as sequence:
            for begin in range(0, len(tokens), count):
                end = min(begin + count, len(tokens))
                yield step_logits(self.program, self._inputs(sequence, begin, end, end - begin))
                self.kv.advance(sequence, end)

    def trace(self, token_ids: Sequence[int], values: Collection[str]) -> dict[str, np.ndarray]:
        """Values of the plan by name, in the order in which one step over all the tokens computes them.

        The logits, and what is computed for them only, are those of the last max_batch_size tokens.
        """
        tokens = self._checked_ids(token_ids)
        if len(tokens) > self.limits.max_num_tokens:
            raise PromptError(f"{len(tokens)} tokens; a step of this engine takes {self.limits.max_num_tokens} at most")
        with self._private(tokens) as sequence:
            num_logits = min(len(tokens), self.limits.max_batch_size)
            return self.program.trace(self._inputs(sequence, 0, len(tokens), num_logits), values)

    def _inputs(self, sequence: KvSequence, begin: int, end: int, num_logits: int) -> StepInputs:
        """A step over a piece of one sequence, which nothing else shares."""
        self._loop.settle()
        grown = self.kv.grow(sequence, end)
        assert grown, "reserved blocks are missing"
        self.program.copy_blocks(self.kv.take_copies())
        inputs = self.program.inputs[0]
        inputs.clear()
        inputs.add(sequence.tokens[begin:end], begin, sequence.tables, num_logits)
        return inputs

    @contextmanager
    def _private(self, tokens: list[int]) -> Iterator[KvSequence]:
        """KV blocks that hold nothing yet and that nobody else will find."""
        self._scheduler.check(len(tokens), len(tokens))
        sequence = KvSequence(tokens)
        if not self.kv.acquire(sequence, reserve_tokens=len(tokens), private=True):
            raise KvCacheBusy(f"{len(tokens)} tokens need {self.kv.needed(len(tokens))} KV blocks; only "
                              f"{self.kv.num_available} of {self.kv.num_blocks} are not held by open streams.\n"
                              "  Close some, or raise kv_cache_tokens.")
        try:
            yield sequence
        finally:
            self.kv.release(sequence)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt in any of its forms; checked as `generate` does."""
        if isinstance(prompt, str) or (len(prompt) and isinstance(prompt[0], Mapping)):
            return self._checked_ids(encode(prompt, self.tokenizer, self.file.path))  # type: ignore[arg-type]
        return self._checked_ids(prompt)  # type: ignore[arg-type]  # all integers, as is checked there

    def _checked_ids(self, ids: Sequence[int]) -> list[int]:
        for index, token in enumerate(ids):
            if not isinstance(token, (int, np.integer)):
                raise PromptError(f"token {index} of the prompt is {token!r}; expected an id")
        checked = [int(token) for token in ids]
        check_prompt(checked, self.program.vocab_size, self.limits.max_seq_len)
        return checked

    def _request(self, prompt: Prompt, params: SamplingParams, outputs: deque[RequestOutput],
                 lora: str | None) -> Running:
        """A request that was checked but not started; what it gives goes to `outputs`."""
        tokens = self.encode(prompt)
        longest = self.limits.max_seq_len
        check_room(tokens, longest)
        params.check_vocabulary(self.program.vocab_size)
        self._scheduler.check(len(tokens), min(len(tokens) + params.max_tokens, longest))
        self._num_requests += 1
        request = Request(f"request {self._num_requests}", tokens, params, lora=lora)
        return make_answers(request, outputs.extend, self.tokenizer, self.stop_token_ids, longest, self._guides,
                            None if lora is None else self.adapters.get(lora))


def _pieces_of(output: RequestOutput) -> Iterator[Piece]:
    """A piece a token; where a step gave several, their text comes with the last."""
    logprobs = output.logprobs if output.logprobs is not None else [None] * len(output.token_ids)
    *before, last = zip(output.token_ids, logprobs, strict=True)
    for token, row in before:
        yield Piece("", token, None, row)
    yield Piece(output.text, last[0], output.finish_reason, last[1])


def _generations(requests: list[Running], outputs: deque[RequestOutput]) -> list[Generation]:
    """All answers in the order of the requests. Raises the error of the first that failed."""
    parts: dict[tuple[str, int], list[RequestOutput]] = {}
    for output in outputs:
        if output.error is not None:
            raise output.error
        parts.setdefault((output.request_id, output.index), []).append(output)
    return [_generation(parts[answer.request_id, answer.index]) for request in requests for answer in request.answers]


def _generation(outputs: list[RequestOutput]) -> Generation:
    first, last = outputs[0], outputs[-1]
    assert last.finish_reason is not None
    logprobs = [row for output in outputs for row in output.logprobs or ()] if first.logprobs is not None else None
    return Generation("".join(output.text for output in outputs),
                      [token for output in outputs for token in output.token_ids], last.finish_reason,
                      last.num_prompt_tokens, last.index, last.matched_stop, logprobs, first.prompt_logprobs,
                      last.num_cached_tokens)
