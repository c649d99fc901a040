"""An executor over a device that computes nothing, for tests: answers are hashes, or what a test wants them to be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ingot.runtime.devices.null import NullProgram
from ingot.runtime.executor.executor import Executor, ExecutorSettings
from ingot.runtime.executor.request import Request, RequestOutput
from ingot.runtime.kv import KvCache
from ingot.runtime.program import Limits
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.sampling_inputs import StepOutputs
from ingot.runtime.scheduler import SchedulerSettings
from ingot.runtime.tokenizer import Tokenizer
from tests.runtime.mock_engine import EOS, VOCAB_SIZE, tokenizer_json

LIMITS = Limits(max_batch_size=4, max_num_tokens=16, max_seq_len=64)
BLOCK_SIZE = 4
WAIT_S = 20.0
"""So long a test waits for what must come: far longer than it ever takes."""


class GatedProgram(NullProgram):
    """Steps end only when the test lets them: `let(n)`. launched: steps that have begun."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._permits = threading.Semaphore(0)
        self._launches = threading.Semaphore(0)
        self.is_open = False
        self.failure: Exception | None = None

    def launch(self, inputs: Any) -> None:
        super().launch(inputs)
        self._launches.release()

    def wait(self) -> StepOutputs:
        while not self.is_open and not self._permits.acquire(timeout=0.02):
            pass
        if self.failure is not None:
            raise self.failure
        return super().wait()

    def let(self, count: int = 1) -> None:
        self._permits.release(count)

    def await_launch(self) -> None:
        assert self._launches.acquire(timeout=WAIT_S), "no step was launched"


class Sink:
    """Gathers outputs by request and index."""

    def __init__(self) -> None:
        self.calls: list[list[RequestOutput]] = []
        self._changed = threading.Condition()

    def __call__(self, outputs: list[RequestOutput]) -> None:
        with self._changed:
            self.calls.append(outputs)
            self._changed.notify_all()

    def of(self, request_id: str, index: int = 0) -> list[RequestOutput]:
        return [output for call in self.calls for output in call
                if (output.request_id, output.index) == (request_id, index)]

    def until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), [output for call in self.calls for output in call]

    def finished(self, request_id: str, index: int = 0) -> RequestOutput:
        """Waits for the end of an answer; all its outputs as one, with the text and the tokens of all."""
        self.until(lambda: any(output.finish_reason for output in self.of(request_id, index)))
        outputs = self.of(request_id, index)
        assert [output for output in outputs if output.finish_reason] == outputs[-1:]
        last = outputs[-1]
        last.text = "".join(output.text for output in outputs)
        last.token_ids = [token for output in outputs for token in output.token_ids]
        last.prompt_logprobs = outputs[0].prompt_logprobs
        return last


def tokenizer() -> Tokenizer:
    """A token a byte; 256 is <s>, 257 </s>."""
    return Tokenizer(tokenizer_json(), {})


def saying(prompt: list[int], text: str) -> Callable[[int, int], int]:
    """A device whose answer to a prompt of this length is `text`, then EOS."""
    answer = [*tokenizer().encode(text), EOS]
    return lambda position, _: answer[min(position + 1 - len(prompt), len(answer) - 1)]


@contextmanager
def null_executor(program: NullProgram | None = None, *, limits: Limits = LIMITS, num_blocks: int = 64,
                  max_queue_size: int = 100, log: Any = None, cache: dict[str, Any] | None = None, **scheduling: Any,
                  ) -> Iterator[Executor]:
    program = program or NullProgram(limits, VOCAB_SIZE, num_blocks, block_size=BLOCK_SIZE, simulate_kv=True)
    kv = KvCache(program.num_blocks, program.block_size, program.kv_windows, max_chunk=limits.max_num_tokens,
                 max_draft=scheduling.get("speculative_tokens", 0), **(cache or {}))
    settings = ExecutorSettings(SchedulerSettings.within(limits, **scheduling), limits.max_seq_len, max_queue_size)
    executor = Executor(program, kv, settings, tokenizer=tokenizer(), stop_token_ids=frozenset({EOS}), log=log)
    try:
        yield executor
    finally:
        if isinstance(program, GatedProgram):
            program.is_open = True
        executor.close()


def gated(num_blocks: int = 64, **options: Any) -> GatedProgram:
    return GatedProgram(LIMITS, VOCAB_SIZE, num_blocks, block_size=BLOCK_SIZE, **options)


def request(request_id: str, prompt: list[int], max_tokens: int = 8, *, sampling: dict[str, Any] | None = None,
            **fields: Any) -> Request:
    params = SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **(sampling or {})})
    return Request(request_id, prompt, params, **fields)
