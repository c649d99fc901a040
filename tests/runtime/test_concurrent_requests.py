"""200 requests at once on the first layers of a real model, in a KV cache that is too small for them: each gets the
answer it gets alone.

Greedy and in fp32, so that "the same" means the same tokens. Some share prefixes, some are cancelled on the way, and
under every policy blocks are evicted; where the policy allows it, requests are paused.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ingot.compiler.build import BuildRequest, build
from ingot.runtime.executor.executor import Executor
from ingot.runtime.executor.loading import EngineOptions, LoadedEngine
from ingot.runtime.executor.request import Request, RequestOutput
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.scheduler import ChunkingPolicy, SchedulerPolicy
from ingot.runtime.tokenizer import Tokenizer

NUM_REQUESTS, NUM_PROMPTS = 200, 20
NUM_LAYERS = 4
"""Of 30: that nothing mixes requests up shows in the answers of few as well, and a step takes a third of the time."""
# A few answers grow over several blocks, which is what makes a small cache run out of them; most are short.
NUM_LONG_PROMPTS, NUM_LONG_REQUESTS = 2, 14
LONG_ANSWER, SHORT_ANSWER = 72, 10
KV_CACHE_TOKENS = 224
WAIT_S = 300.0

DOCUMENT = ("The lighthouse keeper climbed the stairs every evening, lit the lamp, and wrote down what the sea was "
            "like. In winter the waves reached the windows; in summer the ships came close enough to greet him. ")
QUESTIONS = ["What does the keeper do?", "How is the winter?", "Who greets him, and when?", "Count to ten: one, two,",
             "The capital of France is", "def fibonacci(n):", "Once upon a time", "He wrote:"]


@dataclass(frozen=True)
class Case:
    prompt: int
    max_tokens: int
    cancel_after: int | None


@pytest.fixture(scope="module")
def engine_path(smollm2_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    model, path = folder / "smollm2", folder / "smollm2.fp32.engine"
    model.mkdir()
    for file in smollm2_checkpoint.iterdir():
        (model / file.name).symlink_to(file)
    config = json.loads((smollm2_checkpoint / "config.json").read_text())
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": NUM_LAYERS}))
    build(BuildRequest(str(model), "cpu", "fp32", path, max_batch_size=16, max_num_tokens=128, max_seq_len=128))
    return path


@pytest.fixture(scope="module")
def prompts(smollm2_checkpoint: Path) -> list[list[int]]:
    """Questions; most of those with short answers stand behind a beginning of one document, of many lengths."""
    tokenizer = Tokenizer((smollm2_checkpoint / "tokenizer.json").read_bytes(), {})
    document, rng = tokenizer.encode(DOCUMENT), random.Random(1)
    found = []
    for number in range(NUM_PROMPTS):
        length = rng.randrange(len(document)) if number >= NUM_LONG_PROMPTS and number % 6 else 0
        found.append(document[:length] + tokenizer.encode(QUESTIONS[number % len(QUESTIONS)]) + [number + 100])
    return found


@pytest.fixture(scope="module")
def alone(engine_path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The longest answer to each prompt, without any other request, and without reuse. A shorter one begins like it."""
    with LoadedEngine(engine_path, EngineOptions(prefix_reuse=False, kv_cache_tokens=128, num_workers=1)) as engine:
        answers = []
        for number, prompt in enumerate(prompts):
            readers = Readers(engine.executor)
            readers.submit(f"alone {number}", prompt, Case(number, longest_answer(number), None))
            answers.append(readers.wait()[f"alone {number}"].tokens)
    return answers


class Reader:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.tokens: list[int] = []
        self.finish_reason: str | None = None


class Readers:
    """Takes the outputs of many requests, and cancels those that are to be cancelled."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._readers: dict[str, Reader] = {}
        self._left = 0
        self._changed = threading.Condition()
        self._cancelling: list[str] = []

    def submit(self, request_id: str, prompt: list[int], case: Case) -> None:
        self._readers[request_id] = Reader(case)
        with self._changed:
            self._left += 1
        params = SamplingParams(max_tokens=case.max_tokens, ignore_eos=True)
        self._executor.submit(Request(request_id, prompt, params), self._take)

    def _take(self, outputs: list[RequestOutput]) -> None:
        with self._changed:
            for output in outputs:
                reader = self._readers[output.request_id]
                assert reader.finish_reason is None
                reader.tokens += output.token_ids
                reader.finish_reason = output.finish_reason
                if output.finish_reason is not None:
                    self._left -= 1
                elif len(reader.tokens) == reader.case.cancel_after:
                    self._cancelling.append(output.request_id)
            self._changed.notify_all()

    def wait(self) -> dict[str, Reader]:
        while True:
            with self._changed:
                assert self._changed.wait_for(lambda: not self._left or self._cancelling, WAIT_S), self._left
                cancelling, self._cancelling = self._cancelling, []
                if not self._left:
                    return self._readers
            for request_id in cancelling:
                self._executor.cancel(request_id)


def longest_answer(prompt: int) -> int:
    return LONG_ANSWER if prompt < NUM_LONG_PROMPTS else SHORT_ANSWER


def cases() -> Iterator[Case]:
    rng = random.Random(2)
    for number in range(NUM_REQUESTS):
        is_long = number < NUM_LONG_REQUESTS
        prompt = rng.randrange(NUM_LONG_PROMPTS) if is_long else rng.randrange(NUM_LONG_PROMPTS, NUM_PROMPTS)
        max_tokens = rng.randrange(LONG_ANSWER // 2 if is_long else 2, longest_answer(prompt) + 1)
        yield Case(prompt, max_tokens, rng.randrange(1, max_tokens) if number % 9 == 4 else None)


@pytest.mark.parametrize(("policy", "chunking"), [
    (SchedulerPolicy.GUARANTEED_NO_EVICT, ChunkingPolicy.FIRST_COME_FIRST_SERVED),
    (SchedulerPolicy.MAX_UTILIZATION, ChunkingPolicy.EQUAL_PROGRESS),
    (SchedulerPolicy.STATIC_BATCH, ChunkingPolicy.FIRST_COME_FIRST_SERVED),
])  # fmt: skip
def test_each_answer_is_the_one_it_gets_alone(
    engine_path: Path, prompts: list[list[int]], alone: list[list[int]], policy: SchedulerPolicy,
    chunking: ChunkingPolicy,
) -> None:
    options = EngineOptions(scheduler_policy=policy, context_chunking=chunking, kv_cache_tokens=KV_CACHE_TOKENS,
                            num_workers=1)
    with LoadedEngine(engine_path, options) as engine:
        readers = Readers(engine.executor)
        for number, case in enumerate(cases()):
            readers.submit(f"{number}", prompts[case.prompt], case)
        finished = readers.wait()
        recorder, kv, stats = engine.executor.recorder, engine.kv.stats, engine.executor.stats()

    wrong = {request_id: reader.tokens for request_id, reader in finished.items()
             if reader.tokens != alone[reader.case.prompt][: len(reader.tokens)]}
    assert wrong == {}
    for reader in finished.values():
        if reader.finish_reason == "length":
            assert len(reader.tokens) == reader.case.max_tokens
        else:
            assert reader.finish_reason == "cancelled" and reader.case.cancel_after is not None
            assert reader.case.cancel_after <= len(reader.tokens) < reader.case.max_tokens
    assert recorder.requests_finished["cancelled"] > 0
    assert kv.hit_tokens > 0 and kv.evicted_blocks > 0
    assert (recorder.requests_paused > 0) == (policy is SchedulerPolicy.MAX_UTILIZATION)
    assert (stats.num_running, stats.num_waiting, stats.num_paused, stats.num_used_blocks) == (0, 0, 0, 0)
