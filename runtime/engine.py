"""An engine, loaded and ready to answer.

    engine = Engine.load("x.engine")
    answer = engine.generate("The capital of France is", SamplingParams(max_tokens=16))
    for piece in engine.stream([{"role": "user", "content": "Hello"}]):
        print(piece, end="")
"""

from __future__ import annotations

import os
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np

from .devices import load_program
from .engine_file import EngineFile
from .errors import RequestError
from .host import available_memory_bytes, return_free_memory
from .kv_blocks import KvBlocks
from .loop import KvCacheTooSmall, Loop
from .loop import Sequence as Tokens
from .program import Limits, Program, step_logits
from .sampling import Sampler, SamplingParams
from .sampling_inputs import Float32Array
from .tokenizer import TextStream, Tokenizer, read_config

if TYPE_CHECKING:
    from .chat_template import Message

    Prompt = str | Sequence[int] | Sequence[Message]


class PromptError(RequestError):
    """A prompt that the engine cannot take."""


@dataclass(frozen=True)
class Generation:
    """An answer. finish_reason: "stop", the model ended it, or "length".

    token_ids holds the token that ended it, text does not. text is empty if the engine has no tokenizer.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    num_prompt_tokens: int


@dataclass(frozen=True)
class Piece:
    """One token of an answer and the text that it completes, often none. The last one has a finish_reason."""

    text: str
    token_id: int
    finish_reason: str | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(eq=False)
class _Request:
    sequence: Tokens
    params: SamplingParams
    stop_token_ids: frozenset[int]
    text: TextStream | None
    num_prompt_tokens: int
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None


class Engine:
    """A loaded engine. One thread at a time; several streams may be open and read in turn.

    file       the engine file: hash, manifest
    tokenizer  None if the engine has none: prompts are then token ids
    program    the engine on its device
    limits     what it was built for
    """

    def __init__(self, file: EngineFile, program: Program, tokenizer: Tokenizer | None) -> None:
        self.file = file
        self.program = program
        self.tokenizer = tokenizer
        self.limits = Limits.of(file.manifest)
        self.stop_token_ids = frozenset(read_config(file).get("eos_token_ids", ()))
        self._blocks = KvBlocks(program.num_blocks // len(program.kv_windows), program.block_size)
        self._sampler = Sampler(program.vocab_size)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, kv_cache_tokens: int | None = None,
             num_workers: int | None = None) -> Self:
        """Load the engine at `path`.

        kv_cache_tokens  tokens that the KV cache has room for; memory is taken only as it is used. By default as many
                         as the engine's largest batch of longest sequences, within half of the available memory.
        num_workers      threads; by default one a core that this process may use
        Raises RequestError (EngineFormatError, EngineMismatch) or WorkFailed.
        """
        file = EngineFile.open(path)
        try:
            tokens = _default_kv_cache_tokens(file) if kv_cache_tokens is None else kv_cache_tokens
            engine = cls(file, load_program(file, tokens, num_workers), Tokenizer.of(file))
            return_free_memory()  # loading parses much JSON: what it leaves would stay for as long as the engine serves
            return engine
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

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str too
        self, prompts: str | Sequence[int] | Sequence[Message], params: SamplingParams = ...
    ) -> Generation: ...

    @overload
    def generate(self, prompts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Sequence[Message]],
                 params: SamplingParams = ...) -> list[Generation]: ...

    def generate(self, prompts: Any, params: SamplingParams = SamplingParams()) -> Any:  # noqa: B008 (immutable)
        """Answer one prompt, or several that run as one batch in flight.

        A prompt is a text, a list of token ids, or a chat: a list of messages with role and content. The answers have
        the order of the prompts. Raises PromptError, ChatTemplateError, KvCacheTooSmall.
        """
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, np.integer, Mapping)))
        requests = [self._request(prompt, params) for prompt in ([prompts] if is_one else prompts)]
        for request, piece in self._start(requests):
            request.pieces.append(piece.text)
        answers = [_generation(request) for request in requests]
        return answers[0] if is_one else answers

    def stream(self, prompt: Prompt,
               params: SamplingParams = SamplingParams()) -> Generator[Piece, None, None]:  # noqa: B008 (immutable)
        """The answer to one prompt, token by token as they come. Wrong prompts raise at once, as in `generate`.

        Its KV blocks are free again when it has ended, or is closed before.
        """
        request = self._request(prompt, params)
        return (piece for _, piece in self._start([request]))

    def logits(self, token_ids: Sequence[int]) -> Float32Array:
        """The logits [T, vocab_size] that the model gives at each of the T tokens of a sequence."""
        return np.concatenate([rows.copy() for rows in self.iter_logits(token_ids)])

    def iter_logits(self, token_ids: Sequence[int]) -> Generator[Float32Array, None, None]:
        """As `logits`, but a few rows at a time, each array valid until the next one is asked for."""
        tokens = self._checked_ids(token_ids)
        count = min(self.limits.max_batch_size, self.limits.max_num_tokens)
        with self._borrowed_blocks(len(tokens)) as blocks:
            for begin in range(0, len(tokens), count):
                chunk = tokens[begin : begin + count]
                inputs = self.program.inputs[0]
                inputs.clear()
                inputs.add(chunk, begin, self._tables(blocks), len(chunk))
                yield step_logits(self.program, inputs)

    def trace(self, token_ids: Sequence[int], values: Collection[str]) -> dict[str, np.ndarray]:
        """Values of the plan by name, in the order in which one step over all the tokens computes them.

        The logits, and what is computed for them only, are those of the last max_batch_size tokens.
        """
        tokens = self._checked_ids(token_ids)
        if len(tokens) > self.limits.max_num_tokens:
            raise PromptError(f"{len(tokens)} tokens; a step of this engine takes {self.limits.max_num_tokens} at most")
        with self._borrowed_blocks(len(tokens)) as blocks:
            inputs = self.program.inputs[0]
            inputs.clear()
            inputs.add(tokens, 0, self._tables(blocks), min(len(tokens), self.limits.max_batch_size))
            return self.program.trace(inputs, values)

    def _tables(self, blocks: list[int]) -> list[list[int]]:
        """The block of each table: those of the pool, as many in a row as there are tables, are given out together."""
        count = len(self.program.kv_windows)
        return [[block * count + table for block in blocks] for table in range(count)]

    @contextmanager
    def _borrowed_blocks(self, num_tokens: int) -> Iterator[list[int]]:
        needed = self._blocks.needed(num_tokens)
        blocks = self._blocks.allocate(needed)
        if blocks is None:
            raise KvCacheTooSmall(f"{num_tokens} tokens need {needed} KV blocks; {self._blocks.num_free} of "
                                  f"{self._blocks.num_blocks} are free.\n  Raise kv_cache_tokens.")
        try:
            yield blocks
        finally:
            self._blocks.release(blocks)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt in any of its forms; checked as `generate` does."""
        if isinstance(prompt, str):
            return self._checked_ids(self._need_tokenizer("a text").encode(prompt))
        if len(prompt) and isinstance(prompt[0], Mapping):
            tokenizer = self._need_tokenizer("a chat")
            if not tokenizer.has_chat_template:
                raise PromptError(f"{self.file.path} has no chat template; give it a text instead of messages")
            # The template writes BOS and its like itself.
            text = tokenizer.chat(prompt)  # type: ignore[arg-type]  # all messages, as render checks
            return self._checked_ids(tokenizer.encode(text, add_special_tokens=False))
        return self._checked_ids(prompt)  # type: ignore[arg-type]  # all integers, as is checked there

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise PromptError(f"{self.file.path} has no tokenizer: the prompt must be token ids, got {what}")
        return self.tokenizer

    def _checked_ids(self, ids: Sequence[int]) -> list[int]:
        vocab_size, longest = self.program.vocab_size, self.limits.max_seq_len
        for index, token in enumerate(ids):
            if not isinstance(token, (int, np.integer)) or not 0 <= token < vocab_size:
                raise PromptError(f"token {index} of the prompt is {token!r}; expected an id of 0 to {vocab_size - 1}")
        if not len(ids):
            raise PromptError("the prompt has no tokens; expected at least one")
        if len(ids) > longest:
            raise PromptError(f"the prompt has {len(ids)} tokens; this engine takes sequences of {longest} at most.\n"
                              "  Shorten it, or build the engine with a larger --max-seq-len.")
        return [int(token) for token in ids]

    def _request(self, prompt: Prompt, params: SamplingParams) -> _Request:
        tokens = self.encode(prompt)
        longest = self.limits.max_seq_len
        if len(tokens) == longest:
            raise PromptError(f"the prompt has {longest} tokens, as many as this engine takes; no room for an answer.\n"
                              "  Shorten it, or build the engine with a larger --max-seq-len.")
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.stop_token_ids)
        text = self.tokenizer.stream(tokens) if self.tokenizer is not None else None
        sequence = Tokens(tokens, min(len(tokens) + params.max_tokens, longest))
        return _Request(sequence, params.seeded(), stops, text, len(tokens))

    def _start(self, requests: list[_Request]) -> Iterator[tuple[_Request, Piece]]:
        """Each token of each answer as it comes. Raises KvCacheTooSmall at once."""
        loop = Loop(self._blocks, self.limits.max_batch_size, self.limits.max_num_tokens)
        for request in requests:
            loop.add(request.sequence)
        return self._run(loop, requests)

    def _run(self, loop: Loop, requests: list[_Request]) -> Iterator[tuple[_Request, Piece]]:
        by_sequence = {request.sequence: request for request in requests}
        try:
            while step := loop.next_step():
                # A step is complete before anything is given out: other streams may run one in between.
                pieces = self._step([(by_sequence[sequence], count) for sequence, count in step])
                for request, _ in pieces:
                    if request.finish_reason:
                        loop.finish(request.sequence)
                yield from pieces
        finally:
            for request in requests:
                loop.finish(request.sequence)

    def _step(self, step: list[tuple[_Request, int]]) -> list[tuple[_Request, Piece]]:
        """Computes the given number of pending tokens of each request; a new token for those that have none left."""
        inputs = self.program.inputs[0]
        inputs.clear()
        for request, count in step:
            sequence = request.sequence
            begin, end = sequence.num_computed, sequence.num_computed + count
            tables = self._tables(sequence.blocks)
            inputs.add(sequence.tokens[begin:end], begin, tables, int(end == len(sequence.tokens)))
            sequence.num_computed = end
        rows = step_logits(self.program, inputs)
        complete = [request for request, _ in step if not request.sequence.num_pending]
        return [(request, self._advance(request, row)) for request, row in zip(complete, rows, strict=True)]

    def _advance(self, request: _Request, logits: Float32Array) -> Piece:
        """Chooses the next token of a request."""
        sequence, text = request.sequence, ""
        token = self._sampler.sample(logits, request.params, len(sequence.tokens) - 1)
        sequence.tokens.append(token)
        if token in request.stop_token_ids:
            request.finish_reason = "stop"
        elif len(sequence.tokens) == sequence.max_len:
            request.finish_reason = "length"
        if request.text is not None:
            text = "" if request.finish_reason == "stop" else request.text.add(token)
            text += request.text.end() if request.finish_reason else ""
        return Piece(text, token, request.finish_reason)


def _generation(request: _Request) -> Generation:
    assert request.finish_reason is not None
    answer = request.sequence.tokens[request.num_prompt_tokens :]
    return Generation("".join(request.pieces), answer, request.finish_reason, request.num_prompt_tokens)


def _default_kv_cache_tokens(file: EngineFile) -> int:
    limits = Limits.of(file.manifest)
    tokens = limits.max_batch_size * limits.max_seq_len
    token_bytes = file.manifest["memory"].get("kv_bytes_per_token", 0)
    available = available_memory_bytes()
    if token_bytes and available:
        tokens = min(tokens, available // 2 // token_bytes)
    return max(tokens, 1)
