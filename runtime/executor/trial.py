"""Tries out an engine before it gets requests: the self-test that its build recorded, and all of it at work once.

The second part runs the longest step, the fullest batch, and one prompt alone and among others, which must give the
same. It also warms the engine: weights are read, the arena and the code are in memory.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..errors import IngotError
from ..sampling import SamplingParams
from ..self_test import NUM_TOP, SelfTest, SelfTestFailed
from .request import Request, RequestOutput, TokenLogprobs

if TYPE_CHECKING:
    from ..program import Limits
    from .executor import Executor

_SHORT_PROMPT = 8
_SHORT_ANSWER = 4


Extent = Literal["none", "brief", "full"]
"""brief: the record, or one prompt, for an engine that has served here before; full: the rest of this module too."""


@dataclass(frozen=True)
class Trial:
    """recorded            the engine holds the answers of its build, and gave them again
    largest_difference  of a log probability from what was recorded, in nats; 0 without a record
    """

    recorded: bool
    largest_difference: float
    seconds: float


def try_out(executor: Executor, record: SelfTest | None, limits: Limits, kv_len: int, vocab_size: int, target_kind: str,
            engine: str, extent: Extent = "full") -> Trial:
    """kv_len: tokens that a sequence has room for in the KV cache. engine: its name in errors.

    Leaves cached prefixes and counters behind: the executor is for this alone. Raises SelfTestFailed.
    """
    begin = time.monotonic()
    asking = _Asking(executor, engine)
    room = min(limits.max_seq_len, kv_len)
    difference = 0.0
    if record is not None:
        # Under lowered limits only the beginning fits.
        count = min(len(record.token_ids), room - len(record.prompt_token_ids))
        if count > 0:
            if max(record.prompt_token_ids) >= vocab_size:
                raise SelfTestFailed(f"{engine}: the recorded prompt has tokens beyond the vocabulary")
            (answer,) = asking.ask([record.prompt_token_ids], count)
            difference = record.compare(answer, engine)
    if extent == "full" or record is None:
        _smoke(asking, limits, room, vocab_size, target_kind, engine, extent)
    return Trial(record is not None, difference, time.monotonic() - begin)


def _smoke(asking: _Asking, limits: Limits, room: int, vocab_size: int, target_kind: str, engine: str,
           extent: Extent) -> None:
    """Raises SelfTestFailed for numbers that are none, and for answers that depend on what runs beside them."""
    prompt = _tokens(0, min(_SHORT_PROMPT, max(1, room - 1)), vocab_size)
    count = min(_SHORT_ANSWER, room - len(prompt))
    if count < 1:
        return
    (alone,) = asking.ask([prompt], count)
    if extent == "brief":
        return
    mates = [_tokens(number, len(prompt), vocab_size) for number in range(1, limits.max_batch_size)]
    among, *_ = asking.ask([prompt, *mates], count)
    try:
        SelfTest.of(prompt, alone, target_kind).compare(among, engine)
    except SelfTestFailed as error:
        raise SelfTestFailed(f"{engine}: a prompt has another answer alone than among {len(mates)} others: {error}"
                             ) from None
    asking.ask([_tokens(-1, min(limits.max_num_tokens, room - 1), vocab_size)], 1)


def _tokens(number: int, count: int, vocab_size: int) -> list[int]:
    """Tokens from all over the vocabulary."""
    return [(7919 * (place + 31 * number) + 11) % vocab_size for place in range(count)]


class _Asking:
    """Requests of one trial, each with a salt of its own: nothing is taken from the prefix cache."""

    def __init__(self, executor: Executor, engine: str) -> None:
        self._executor = executor
        self._engine = engine
        self._num_asked = 0

    def ask(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[TokenLogprobs]]:
        """The greedy answers, all at once. Raises SelfTestFailed."""
        answers: dict[str, list[TokenLogprobs]] = {}
        left, problems, done = set[str](), list[str](), threading.Event()

        def sink(outputs: list[RequestOutput]) -> None:
            for output in outputs:
                answers[output.request_id] += output.logprobs or ()
                if output.finish_reason is None:
                    continue
                if output.finish_reason not in ("stop", "length"):
                    problems.append(str(output.error or output.finish_reason))
                left.discard(output.request_id)
                if not left:
                    done.set()

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=NUM_TOP, ignore_eos=True)
        requests = []
        for prompt in prompts:
            self._num_asked += 1
            name = f"self-test {self._num_asked}"
            requests.append(Request(name, list(prompt), params, cache_salt=name, wants_text=False))
            answers[name] = []
            left.add(name)
        try:
            for request in requests:
                self._executor.submit(request, sink)
        except IngotError as error:
            raise SelfTestFailed(f"{self._engine}: the self-test was refused: {error}") from None
        done.wait()
        if problems:
            raise SelfTestFailed(f"{self._engine}: the self-test failed: {problems[0]}")
        for answer in answers.values():
            if len(answer) != max_tokens or not all(math.isfinite(token.logprob) for token in answer):
                raise SelfTestFailed(f"{self._engine}: the self-test gave {len(answer)} tokens of {max_tokens}, with "
                                     f"log probabilities {[token.logprob for token in answer]}")
        return list(answers.values())
