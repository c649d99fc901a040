"""The executor on a device that computes nothing: answers, ends, refusals, failures, and what is in its way."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from ingot.runtime.devices.null import NullProgram
from ingot.runtime.devices.null_memory import NullMemory
from ingot.runtime.errors import IngotError, WorkFailed
from ingot.runtime.executor.request import (
    DeadlineError,
    Draining,
    DuplicateRequest,
    EngineFailed,
    PromptError,
    QueueFull,
    RequestFailed,
)
from ingot.runtime.sampling import Guide, SamplingError
from ingot.runtime.sampling_state import SequenceSampling
from ingot.runtime.scheduler import NeverFits, SchedulerPolicy
from tests.runtime.executor.null_engine import (
    BLOCK_SIZE,
    LIMITS,
    WAIT_S,
    GatedProgram,
    Sink,
    gated,
    null_executor,
    request,
    saying,
    tokenizer,
)
from tests.runtime.mock_engine import EOS, VOCAB_SIZE

PROMPT = [1, 2, 3, 4, 5]


def expected_answer(prompt: list[int], count: int) -> list[int]:
    """What a device answers whose every token depends on the whole context."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(NullMemory.next_token(tokens, VOCAB_SIZE))
    return tokens[len(prompt) :]


def talking(text: str, **options: Any) -> NullProgram:
    return NullProgram(LIMITS, VOCAB_SIZE, 64, block_size=BLOCK_SIZE, next_token=saying(PROMPT, text), **options)


def test_one_request() -> None:
    sink = Sink()
    with null_executor() as executor:
        executor.submit(request("a", PROMPT, 6), sink)
        answer = sink.finished("a")
    assert answer.token_ids == expected_answer(PROMPT, 6)
    assert answer.text == tokenizer().decode(answer.token_ids)
    assert (answer.finish_reason, answer.num_prompt_tokens, answer.num_output_tokens) == ("length", 5, 6)
    assert [output.num_output_tokens for output in sink.of("a")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("policy", list(SchedulerPolicy))
def test_many_requests_in_a_small_pool(policy: SchedulerPolicy) -> None:
    """Chunks, waiting, reuse, pauses: no answer changes."""
    rng = np.random.default_rng(1)
    shared = rng.integers(0, 256, 20).tolist()
    prompts = [shared[: rng.integers(0, 20)] + rng.integers(0, 256, rng.integers(1, 20)).tolist() for _ in range(60)]
    sink = Sink()
    with null_executor(num_blocks=24, policy=policy) as executor:
        for number, prompt in enumerate(prompts):
            executor.submit(request(str(number), prompt, 12), sink)
        answers = [sink.finished(str(number)).token_ids for number in range(len(prompts))]
        assert executor.recorder.requests_finished == {"length": 60}
        assert executor.stats().num_used_blocks == 0
    assert answers == [expected_answer(prompt, 12) for prompt in prompts]


def test_outputs_of_a_step_come_in_one_call() -> None:
    sink, program = Sink(), gated()
    with null_executor(program) as executor:
        executor.submit(request("first", PROMPT, 3), sink)
        program.await_launch()
        executor.submit(request("a", [6], 3), sink)
        executor.submit(request("b", [7], 3), sink)
        program.is_open = True
        sink.finished("b")
    assert {"a", "b"} in [{output.request_id for output in call} for call in sink.calls]


@pytest.mark.parametrize(("sampling", "text", "reason", "stop"), [
    ({}, "Hello you", "stop", None),  # the model's own end
    ({"stop_token_ids": (ord("y") - 33,)}, "Hello ", "stop", ord("y") - 33),
    ({"stop_token_ids": (ord("y") - 33,), "include_stop": True}, "Hello y", "stop", ord("y") - 33),
    ({"stop": ("lo y", "x")}, "Hel", "stop", "lo y"),
    ({"stop": ("lo y",), "include_stop": True}, "Hello y", "stop", "lo y"),
    ({"stop": ("ll",), "min_tokens": 5}, "Hello you", "stop", None),
    ({"stop": ("you!",)}, "Hello you", "stop", None),  # held back, then given out
    ({"ignore_eos": True, "skip_special_tokens": False}, "Hello you</s></s></s>", "length", None),
])  # fmt: skip
def test_ends(sampling: dict[str, Any], text: str, reason: str, stop: Any) -> None:
    sink, program = Sink(), talking("Hello you")
    with null_executor(program) as executor:
        executor.submit(request("a", PROMPT, 12, sampling={"ignore_eos": False, **sampling}), sink)
        answer = sink.finished("a")
    assert (answer.text, answer.finish_reason, answer.matched_stop) == (text, reason, stop)
    if stop == "lo y":  # its tokens are told, and nothing is computed behind it
        assert answer.token_ids == tokenizer().encode("Hello y")
        assert program.num_steps == 7


def test_nothing_is_computed_in_vain() -> None:
    sink = Sink()
    with null_executor(talking("Hello you")) as executor:
        for number in range(3):
            executor.submit(request(str(number), [number, *PROMPT[1:]], 20, sampling={"ignore_eos": False}), sink)
        for number in range(3):
            assert sink.finished(str(number)).token_ids == [*tokenizer().encode("Hello you"), EOS]
        # Each prompt, and each token of an answer but the last.
        assert executor.recorder.computed_tokens == 3 * (5 + 9)


def test_characters_come_whole() -> None:
    sink = Sink()
    with null_executor(talking("é😀")) as executor:
        executor.submit(request("a", PROMPT, 7, sampling={"ignore_eos": False}), sink)
        sink.finished("a")
    assert [output.token_ids for output in sink.of("a")][1] == tokenizer().encode("é")[1:]
    assert "\N{REPLACEMENT CHARACTER}" not in sink.of("a")[-1].text


def test_text_that_nobody_wants() -> None:
    sink = Sink()
    with null_executor(talking("Hello")) as executor:
        executor.submit(request("a", PROMPT, 12, sampling={"ignore_eos": False}, wants_text=False), sink)
        executor.submit(request("b", PROMPT, 12, sampling={"stop": ("ll",)}, wants_text=False), sink)
        assert (sink.finished("a").text, sink.finished("a").finish_reason) == ("", "stop")
        assert sink.finished("b").matched_stop == "ll"


def test_several_answers_share_the_prompt() -> None:
    sink, prompt = Sink(), list(range(1, 33))
    with null_executor() as executor:
        executor.submit(request("a", prompt, 8, sampling={"n": 3}), sink)
        answers = [sink.finished("a", index) for index in range(3)]
        assert [answer.token_ids for answer in answers] == [expected_answer(prompt, 8)] * 3
        # Two of the three find all of it in the cache but the token whose logits are needed, at most a block of it.
        cached = sorted(answer.num_cached_tokens for answer in answers)
        assert cached[0] == 0 and cached[1] >= len(prompt) - BLOCK_SIZE
        assert executor.recorder.computed_tokens <= len(prompt) + 2 * BLOCK_SIZE + 3 * 7
        assert executor.stats().num_used_blocks == 0


@pytest.mark.parametrize(("fields", "error", "message"), [
    ({"prompt": []}, PromptError, "no tokens"),
    ({"prompt": [1, 258]}, PromptError, "token 1 of the prompt is 258; expected an id of 0 to 257"),
    ({"prompt": [-1]}, PromptError, "token 0 of the prompt is -1"),
    ({"prompt": [1] * 65}, PromptError, "takes sequences of 64 at most"),
    ({"prompt": [1] * 64}, PromptError, "no room for an answer"),
    ({"prompt": [1], "sampling": {"stop_token_ids": (258,)}}, SamplingError, "stop_token_ids holds token 258"),
    ({"prompt": [1], "sampling": {"guide": Guide("regex", "((")}}, SamplingError, "guide is no regex"),
    ({"prompt": [1] * 40, "max_tokens": 20}, NeverFits, r"needs 15 KV blocks of 4 tokens; there are 8 \(32 tokens\)"),
])  # fmt: skip
def test_what_is_refused_at_once(fields: dict[str, Any], error: type[IngotError], message: str) -> None:
    with null_executor(num_blocks=8) as executor:
        with pytest.raises(error, match=message):
            executor.submit(request("a", **fields), Sink())
        assert executor.recorder.requests_refused == {error.__name__: 1}
        sink = Sink()
        executor.submit(request("a", PROMPT, 3), sink)
        assert sink.finished("a").token_ids == expected_answer(PROMPT, 3)


def test_a_full_queue() -> None:
    sink, program = Sink(), gated()
    with null_executor(program, max_queue_size=2, max_batch_size=1) as executor:
        executor.submit(request("running", PROMPT), sink)
        program.await_launch()
        executor.submit(request("a", PROMPT), sink)
        executor.submit(request("b", PROMPT), sink)
        with pytest.raises(QueueFull, match="2 requests wait and 1 sequences run; no more than 2 may wait"):
            executor.submit(request("c", PROMPT), sink)
        executor.cancel("a")
        program.let()
        assert sink.finished("a").finish_reason == "cancelled"
        executor.submit(request("c", PROMPT), sink)
        program.is_open = True
        for name in ("running", "b", "c"):
            assert sink.finished(name).finish_reason == "length"
        assert executor.recorder.requests_refused == {"QueueFull": 1}


def test_the_same_id_twice() -> None:
    sink, program = Sink(), gated()
    with null_executor(program) as executor:
        executor.submit(request("a", PROMPT), sink)
        with pytest.raises(DuplicateRequest, match="'a' is that of a request that has not ended") as caught:
            executor.submit(request("a", PROMPT), sink)
        assert caught.value.field == "request_id"
        program.await_launch()
        with pytest.raises(DuplicateRequest):
            executor.submit(request("a", PROMPT), sink)
        program.is_open = True
        sink.finished("a")
        again = Sink()
        executor.submit(request("a", PROMPT), again)
        again.finished("a")


def test_cancelled_while_a_step_is_in_flight() -> None:
    sink, program = Sink(), gated()
    with null_executor(program) as executor:
        executor.submit(request("a", PROMPT, 50), sink)
        executor.submit(request("b", [7], 6), sink)
        for _ in range(3):
            program.await_launch()
            program.let()
        program.await_launch()  # the next step is in flight, the one behind it is prepared
        executor.cancel("a")
        executor.cancel("unknown")
        program.let()
        last = sink.finished("a")
        assert last.finish_reason == "cancelled"
        assert last.num_output_tokens == len(last.token_ids)
        assert executor.stats().num_running <= 1
        program.is_open = True
        sink.finished("b")
        assert executor.stats().num_used_blocks == 0


def test_deadline() -> None:
    sink, program = Sink(), gated()
    with null_executor(program, max_batch_size=1) as executor:
        executor.submit(request("a", PROMPT, 50, deadline_s=0.5), sink)  # launched before, on a busy machine too
        executor.submit(request("waiting", PROMPT, 50, deadline_s=0.01), sink)
        program.await_launch()
        threading.Event().wait(0.51)
        program.is_open = True
        assert sink.finished("a").finish_reason == "timeout"
        assert sink.finished("waiting").finish_reason == "timeout"
        assert executor.stats().num_used_blocks == 0
        assert executor.recorder.requests_finished == {"timeout": 2}


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_deadlines_that_are_none(seconds: float) -> None:
    with pytest.raises(DeadlineError, match=r"deadline_s is .*; expected seconds, 0 or more") as caught:
        request("a", PROMPT, deadline_s=seconds)
    assert caught.value.field == "deadline_s"


def test_logits_that_are_no_numbers_fail_their_request_alone() -> None:
    program = NullProgram(LIMITS, VOCAB_SIZE, 64, block_size=BLOCK_SIZE,
                          next_token=lambda position, token: -1 if token == 9 and position == 6 else 9)
    sink = Sink()
    with null_executor(program) as executor:
        executor.submit(request("bad", PROMPT, 9), sink)
        executor.submit(request("good", [1] * 8, 9), sink)
        bad, good = sink.finished("bad"), sink.finished("good")
        assert executor.health == "serving"
    assert (bad.finish_reason, bad.token_ids, good.token_ids) == ("error", [9, 9], [9] * 9)
    assert isinstance(bad.error, RequestFailed)
    assert "bad: no token can follow token 6: its logits are no numbers" in str(bad.error)


def test_a_guide_that_fails_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever keeps account of an answer's tokens may refuse one."""
    append = SequenceSampling.append

    def guided(self: SequenceSampling, token: int) -> None:
        append(self, token)
        if len(counted) == 2:
            raise WorkFailed("the grammar has no state for this token")
        counted.append(token)

    counted: list[int] = []
    monkeypatch.setattr(SequenceSampling, "append", guided)
    sink = Sink()
    with null_executor() as executor:
        executor.submit(request("bad", PROMPT, 9, sampling={"presence_penalty": 1.0}), sink)
        executor.submit(request("good", [1] * 8, 9), sink)
        bad, good = sink.finished("bad"), sink.finished("good")
    assert (bad.finish_reason, bad.num_output_tokens, good.finish_reason) == ("error", 2, "length")
    assert bad.token_ids == expected_answer(PROMPT, 2)
    assert "the grammar has no state" in str(bad.error)


@pytest.mark.parametrize("failure", [WorkFailed("the device is gone"), ZeroDivisionError("a fault")])
def test_a_broken_device_ends_everything(failure: Exception, capfd: pytest.CaptureFixture[str]) -> None:
    sink, program = Sink(), gated()
    told: list[str] = []
    with null_executor(program, max_batch_size=1) as executor:
        executor.on_health(told.append)
        executor.submit(request("a", PROMPT), sink)
        program.await_launch()
        executor.submit(request("b", PROMPT), sink)
        program.failure = failure
        program.let()
        for name in ("a", "b"):
            last = sink.finished(name)
            assert last.finish_reason == "error"
            assert isinstance(last.error, EngineFailed) and str(failure) in str(last.error)
        assert executor.drain(WAIT_S)
        assert (executor.health, told) == ("failed", ["failed"])
        with pytest.raises(EngineFailed, match="answers no more requests"):
            executor.submit(request("c", PROMPT), sink)
        with pytest.raises(EngineFailed):
            executor.flush_cache()
        executor.cancel("a")
    assert ("Traceback" in capfd.readouterr().err) == (not isinstance(failure, IngotError))


def drained(executor: Any, timeout_s: float | None) -> tuple[threading.Thread, list[bool]]:
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(executor.drain(timeout_s)))
    thread.start()
    return thread, results


def test_drain_finishes_what_runs_and_waits() -> None:
    sink, program = Sink(), gated()
    with null_executor(program, max_batch_size=1) as executor:
        executor.submit(request("a", PROMPT), sink)
        executor.submit(request("b", PROMPT), sink)
        program.await_launch()
        executor.refuse_new()
        thread, results = drained(executor, None)
        with pytest.raises(Draining):
            executor.submit(request("c", PROMPT), sink)
        assert executor.health == "draining"
        program.is_open = True
        thread.join(WAIT_S)
        assert results == [True]
        assert {sink.finished(name).finish_reason for name in "ab"} == {"length"}


def test_drain_gives_up_after_its_time() -> None:
    sink, program = Sink(), gated()
    with null_executor(program, max_batch_size=1) as executor:
        executor.submit(request("a", PROMPT, 50), sink)
        executor.submit(request("b", PROMPT), sink)
        program.await_launch()
        thread, results = drained(executor, 0.01)
        while not executor._commands:
            threading.Event().wait(0.002)
        program.let(2)
        thread.join(WAIT_S)
        assert results == [False]
        assert {sink.finished(name).finish_reason for name in "ab"} == {"cancelled"}


def test_drain_of_an_idle_executor_and_close() -> None:
    with null_executor() as executor:
        assert executor.drain(WAIT_S)
    assert executor.health == "stopped"


def test_close_cancels() -> None:
    sink, program = Sink(), gated()
    with null_executor(program) as executor:
        executor.submit(request("a", PROMPT, 50), sink)
        program.await_launch()
    assert sink.finished("a").finish_reason == "cancelled"


def test_flush() -> None:
    sink, program = Sink(), gated()
    prompt = list(range(30))
    with null_executor(program) as executor:
        executor.submit(request("a", prompt, 2), sink)
        program.await_launch()
        flushed: list[bool] = []
        thread = threading.Thread(target=lambda: flushed.append(executor.flush_cache()))
        thread.start()
        while not executor._commands:
            threading.Event().wait(0.002)
        program.is_open = True
        thread.join(WAIT_S)
        sink.finished("a")
        assert flushed == [False]
        executor.submit(request("b", prompt, 2), sink)
        assert sink.finished("b").num_cached_tokens > 0
        assert executor.flush_cache()
        executor.submit(request("c", prompt, 2), sink)
        assert sink.finished("c").num_cached_tokens == 0


def test_an_idle_executor_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Sink()
    with null_executor() as executor:
        executor.submit(request("a", PROMPT), sink)
        sink.finished("a")
        assert executor.drain(WAIT_S)
        turns = []
        turn = executor._turn

        def counted() -> bool:
            turns.append(1)
            return turn()

        monkeypatch.setattr(executor, "_turn", counted)
        threading.Event().wait(0.05)
        assert turns == []


def test_paused_requests_lose_nothing() -> None:
    """Two answers that together do not fit: the later one gives way and goes on when there is room."""
    sink = Sink()
    with null_executor(num_blocks=16, policy=SchedulerPolicy.MAX_UTILIZATION) as executor:
        for name, prompt in (("a", [1] * 6), ("b", [2] * 6)):
            executor.submit(request(name, prompt, 50), sink)
        for name, prompt in (("a", [1] * 6), ("b", [2] * 6)):
            assert sink.finished(name).token_ids == expected_answer(prompt, 50)
        assert executor.recorder.requests_paused > 0


def test_gate() -> None:
    """The gate of these tests holds: without a permit no step ends."""
    sink, program = Sink(), gated()
    assert isinstance(program, GatedProgram)
    with null_executor(program) as executor:
        executor.submit(request("a", PROMPT, 2), sink)
        program.await_launch()
        assert program.num_steps == 0 and sink.calls == []
