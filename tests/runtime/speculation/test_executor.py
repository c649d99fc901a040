"""Answers with drafts are those without, whatever else runs: on a device whose tokens depend on every token before."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ingot.runtime.adapters.adapter import Adapter
from ingot.runtime.devices.null import NullProgram
from ingot.runtime.devices.null_memory import NullMemory
from ingot.runtime.executor import step_loop
from ingot.runtime.executor.request import RequestOutput
from ingot.runtime.program import Limits
from ingot.runtime.sampling import Guide
from ingot.runtime.scheduler import SchedulerPolicy
from ingot.runtime.speculation import Speculator
from tests.runtime.adapters.samples import room, seeded_adapter
from tests.runtime.executor.null_engine import BLOCK_SIZE, Sink, null_executor, request, saying, tokenizer
from tests.runtime.mock_engine import VOCAB_SIZE

pytestmark = pytest.mark.usefixtures("free_steps")
WIDE = Limits(max_batch_size=16, max_num_tokens=32, max_seq_len=64)
PROMPT = [1, 2, 3, 4, 5]


class Oracle:
    """Knows what the device is going to say, and errs in every third place."""

    certainty = 1

    def propose(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        known = list(tokens)
        for _ in range(max_tokens):
            token = NullMemory.next_token(known, VOCAB_SIZE)
            known.append(token if len(known) % 3 else (token + 1) % VOCAB_SIZE)
        return known[len(tokens) :]

    def accepted(self, count: int) -> None:
        pass


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_loop, "Speculator", partial(Speculator, make_drafter=Oracle))


def expected_answer(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(NullMemory.next_token(tokens, VOCAB_SIZE))
    return tokens[len(prompt) :]


@pytest.mark.usefixtures("oracle")
@pytest.mark.parametrize("windows", [(None,), (9,), (None, 9, 9)])
@pytest.mark.parametrize("policy", SchedulerPolicy)
def test_many_requests_in_a_small_cache(policy: SchedulerPolicy, windows: tuple[int | None, ...]) -> None:
    """Prefixes are shared, blocks evicted, sequences paused and cancelled; the device checks all that it reads."""
    rng, sink = random.Random(1), Sink()
    prompts = [[*range(rng.randrange(0, 20)), 100 + number] for number in range(60)]
    lengths = [rng.randrange(1, 40) for _ in prompts]
    program = NullProgram(WIDE, VOCAB_SIZE, 24 * len(windows), windows, block_size=BLOCK_SIZE, simulate_kv=True)
    with null_executor(program, limits=WIDE, policy=policy, speculative_tokens=5) as executor:
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            executor.submit(request(str(number), prompt, length), sink)
        for number in range(0, 60, 7):
            executor.cancel(str(number))
        answers = [sink.finished(str(number)) for number in range(60)]
        recorder, paused = executor.recorder, executor.recorder.requests_paused
        executor.kv.check()
    for prompt, length, answer in zip(prompts, lengths, answers, strict=True):
        expected = expected_answer(prompt, length)
        if answer.finish_reason == "length":
            assert answer.token_ids == expected
        else:
            assert answer.finish_reason == "cancelled" and answer.token_ids == expected[: len(answer.token_ids)]
    assert 100 < recorder.accepted_draft_tokens < recorder.draft_tokens
    assert recorder.generated_tokens == sum(len(answer.token_ids) for answer in answers)
    if None in windows:  # a window alone never needs more blocks than at the beginning
        assert (paused > 0) == (policy is SchedulerPolicy.MAX_UTILIZATION)


@pytest.mark.usefixtures("oracle")
def test_what_was_drafted_is_reused_as_if_it_had_been_computed_alone() -> None:
    sink = Sink()
    with null_executor(limits=WIDE, speculative_tokens=5) as executor:
        executor.submit(request("a", PROMPT, 20), sink)
        first = sink.finished("a").token_ids
        executor.submit(request("b", [*PROMPT, *first[:17], 9], 20), sink)
        again = sink.finished("b")
    assert first == expected_answer(PROMPT, 20)
    assert again.num_cached_tokens == 22
    assert again.token_ids == expected_answer([*PROMPT, *first[:17], 9], 20)


@pytest.mark.usefixtures("oracle")
def test_outputs_of_a_step_come_as_one() -> None:
    sink = Sink()
    with null_executor(limits=WIDE, speculative_tokens=5) as executor:
        executor.submit(request("a", PROMPT, 13), sink)
        sink.until(lambda: any(output.finish_reason for output in sink.of("a")))
        recorder = executor.recorder
    outputs = sink.of("a")
    assert [len(call) for call in sink.calls] == [1] * len(outputs)
    assert max(len(output.token_ids) for output in outputs) > 1
    told = [output.num_output_tokens for output in outputs]
    assert told == [sum(len(output.token_ids) for output in outputs[: end + 1]) for end in range(len(outputs))]
    assert recorder.inter_token_latency.total == 12  # a gap before each token but the first
    assert recorder.steps == len(outputs)


@pytest.mark.usefixtures("oracle")
def test_nothing_is_held_of_an_answer_that_has_ended(tmp_path: Path) -> None:
    """Its adapter's memory goes with it, though no other request comes."""
    sink = Sink()
    program = NullProgram(WIDE, VOCAB_SIZE, 64, block_size=BLOCK_SIZE, lora=room())
    with null_executor(program, limits=WIDE, speculative_tokens=5) as executor:
        found = weakref.ref(executor.adapters.load("1", Adapter.read(seeded_adapter(tmp_path, 1))))
        executor.submit(request("a", PROMPT, 20, lora="1"), sink)
        sink.finished("a")
        executor.adapters.unload("1")
        executor.drain()
    gc.collect()
    assert found() is None


LIMITS_12 = Limits(max_batch_size=12, max_num_tokens=16, max_seq_len=64)


@pytest.mark.parametrize("fields", [
    {"stop": ("f. abcd",)}, {"stop": ("f. abcd", "xyz"), "include_stop": True}, {"stop": ("f. ab",), "min_tokens": 20},
    {"ignore_eos": False}, {"max_tokens": 15}, {"stop_token_ids": (tokenizer().encode("!")[0],)},
    {"guide": Guide("regex", "(abcdef[.] ){2}ab"), "ignore_eos": False}, {"guide": Guide("regex", "[a-f. ]+")},
])  # fmt: skip
def test_ends_inside_a_run(fields: dict[str, Any]) -> None:
    """What the answer repeats is drafted and accepted, and the answer ends in the middle of it."""
    if "guide" in fields:
        pytest.importorskip("llguidance")
    ends = []
    for drafts in (0, 8):
        answer = say("abcdef. " * 4 + "!", drafts, **fields)
        ends.append((answer.token_ids, answer.text, answer.finish_reason, answer.matched_stop,
                     answer.num_output_tokens))
    assert ends[0] == ends[1]


def test_a_drafted_token_that_ends_the_answer_was_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Knows(Oracle):
        def propose(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
            return tokenizer().encode("abcdefgh")[len(tokens) - len(PROMPT) :][:max_tokens]

    monkeypatch.setattr(step_loop, "Speculator", partial(Speculator, make_drafter=Knows))
    sink = Sink()
    program = NullProgram(LIMITS_12, VOCAB_SIZE, 64, block_size=BLOCK_SIZE, next_token=saying(PROMPT, "abcdefgh"))
    with null_executor(program, limits=LIMITS_12, speculative_tokens=4) as executor:
        executor.submit(request("a", PROMPT, 20, sampling={"stop": ("d",)}), sink)
        assert len(sink.finished("a").token_ids) == 4
        recorder = executor.recorder
    assert (recorder.draft_tokens, recorder.accepted_draft_tokens) == (4, 2), "c and d of c to f"


def say(text: str, drafts: int, max_tokens: int = 50, **sampling: Any) -> RequestOutput:
    """What becomes of an answer of this text."""
    sink = Sink()
    program = NullProgram(LIMITS_12, VOCAB_SIZE, 64, block_size=BLOCK_SIZE, next_token=saying(PROMPT, text))
    with null_executor(program, limits=LIMITS_12, speculative_tokens=drafts) as executor:
        executor.submit(request("a", PROMPT, max_tokens, sampling=sampling), sink)
        answer = sink.finished("a")
        assert (executor.recorder.accepted_draft_tokens > 0) == (drafts > 0)
        assert executor.recorder.generated_tokens == len(answer.token_ids)
    return answer
