"""The HTTP server through OpenAI's own Python client."""

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from ingot.runtime.executor.request import QueueFull
from tests.runtime.servers.scripted_engine import ANSWER, ScriptedRunner, outputs, tokenizer

MESSAGES: Any = [{"role": "user", "content": "hello"}]
LENGTH = len(ANSWER.encode())


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["mock"]
    assert client.models.retrieve("mock").owned_by == "ingot"


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="mock", prompt="ab", max_tokens=100)
    assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices] == [(0, ANSWER, "stop")]
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.completion_tokens == LENGTH and answer.usage.prompt_tokens_details.cached_tokens == 1


def test_length(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="mock", prompt="ab", max_tokens=4)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (ANSWER[:3], "length")
    assert client.completions.create(model="mock", prompt="ab").choices[0].finish_reason == "stop"


def test_many_prompts_and_answers(client: openai.OpenAI, runner: ScriptedRunner) -> None:
    runner.script = lambda request: outputs(request, f"{len(request.prompt_token_ids)}!")
    answer = client.completions.create(model="mock", prompt=["a", "bb", "ccc"], n=2)
    assert [choice.text for choice in answer.choices] == ["1!", "1!", "2!", "2!", "3!", "3!"]
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage is not None and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 12)
    assert [list(request.prompt_token_ids) for request in runner.requests] == [
        tokenizer().encode("a" * 0 + text) for text in ("a", "bb", "ccc")]


def test_prompts_of_token_ids(client: openai.OpenAI, runner: ScriptedRunner) -> None:
    client.completions.create(model="mock", prompt=[1, 2, 3])
    client.completions.create(model="mock", prompt=[[1], [2, 3]])
    assert [list(request.prompt_token_ids) for request in runner.requests] == [[1, 2, 3], [1], [2, 3]]


def test_completion_stream(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="mock", prompt="ab", max_tokens=100, stream=True,
                                            stream_options={"include_usage": True}))
    *texts, usage = chunks
    assert "".join(chunk.choices[0].text for chunk in texts) == ANSWER
    # The bytes of a character come together, and what shows nothing is not sent.
    assert all(chunk.choices[0].text for chunk in texts) and len(texts) == len(ANSWER)
    assert [chunk.choices[0].finish_reason for chunk in texts] == [None] * (len(texts) - 1) + ["stop"]
    assert usage.choices == [] and usage.usage is not None and usage.usage.completion_tokens == LENGTH
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_of_many(client: openai.OpenAI, runner: ScriptedRunner) -> None:
    runner.script = lambda request: outputs(request, f"{len(request.prompt_token_ids)}!")
    texts: dict[int, str] = {}
    for chunk in client.completions.create(model="mock", prompt=["a", "bb"], n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == {0: "1!", 1: "1!", 2: "2!", 3: "2!"}


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="mock", prompt="ab", max_tokens=100, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.text_offset is not None
    assert len(logprobs.tokens) == LENGTH and logprobs.tokens[0] == "H"
    assert logprobs.token_logprobs == [-0.5] * LENGTH
    assert logprobs.top_logprobs is not None and logprobs.top_logprobs[0] == {"H": -0.5, "!": -9999.0}
    # "Hé": the second byte of é belongs to the character that the first one begins.
    assert logprobs.text_offset[:4] == [0, 1, 1, 2] and logprobs.text_offset[-1] == len(ANSWER) - 1
    streamed = list(client.completions.create(model="mock", prompt="ab", max_tokens=100, logprobs=0, stream=True))
    offsets = [chunk.choices[0].logprobs.text_offset for chunk in streamed if chunk.choices[0].logprobs]
    assert [offset for some in offsets for offset in some or ()] == logprobs.text_offset


def test_echo_scores_the_prompt(client: openai.OpenAI, runner: ScriptedRunner) -> None:
    """As evaluation harnesses ask: no answer, the prompt's log probabilities."""
    answer = client.completions.create(model="mock", prompt="abc", max_tokens=0, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == "abc" and choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b", "c"]
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.5]
    assert answer.usage is not None and answer.usage.completion_tokens == 0
    assert runner.requests[0].params.prompt_logprobs == 1
    answer = client.completions.create(model="mock", prompt=tokenizer().encode("abc"), max_tokens=2, echo=True)
    assert answer.choices[0].text == "abc" + ANSWER[:1]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="mock", messages=MESSAGES)
    message = answer.choices[0].message
    assert (message.role, message.content, answer.choices[0].finish_reason) == ("assistant", ANSWER, "stop")
    assert answer.usage is not None and answer.usage.completion_tokens == LENGTH
    assert answer.system_fingerprint is not None and answer.system_fingerprint.startswith("ingot-")


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="mock", messages=MESSAGES, n=2, stream=True,
                                                 stream_options={"include_usage": True}))
    texts = ["", ""]
    roles = []
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles += [choice.index] if choice.delta.role == "assistant" else []
    assert texts == [ANSWER, ANSWER] and sorted(roles) == [0, 1]
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 2 * LENGTH
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_chat_logprobs(client: openai.OpenAI) -> None:
    """Also of half characters, whose bytes are told."""
    answer = client.chat.completions.create(model="mock", messages=MESSAGES, logprobs=True, top_logprobs=1)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None and b"".join(bytes(token.bytes or ()) for token in content).decode() == ANSWER
    assert all(math.isclose(token.logprob, -0.5) and len(token.top_logprobs) == 1 for token in content)
    streamed = [token for chunk in client.chat.completions.create(
        model="mock", messages=MESSAGES, logprobs=True, stream=True)
        for choice in chunk.choices if choice.logprobs for token in choice.logprobs.content or ()]
    assert b"".join(bytes(token.bytes or ()) for token in streamed).decode() == ANSWER


def test_extensions(client: openai.OpenAI, runner: ScriptedRunner) -> None:
    client.chat.completions.create(model="mock", messages=MESSAGES, extra_body={"top_k": 5, "min_p": 0.1,
                                                                                "repetition_penalty": 1.1})
    params = runner.requests[0].params
    assert (params.top_k, params.min_p, params.repetition_penalty) == (5, 0.1, 1.1)


def test_errors(client: openai.OpenAI, runner: ScriptedRunner) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="mock", prompt="a", temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    runner.refusal = QueueFull("full")
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="mock", messages=MESSAGES, stream=True)


def test_an_error_in_mid_stream(client: openai.OpenAI, runner: ScriptedRunner) -> None:
    runner.script = lambda request: outputs(request, reason="timeout")
    with pytest.raises(openai.APIError, match="deadline"):
        list(client.completions.create(model="mock", prompt="a", max_tokens=100, stream=True))


def test_leaving_a_stream_cancels(client: openai.OpenAI, runner: ScriptedRunner) -> None:
    runner.script = lambda request: outputs(request)[:3]
    with client.chat.completions.create(model="mock", messages=MESSAGES, stream=True) as stream:
        next(iter(stream))
        assert not runner.cancelled
    for _ in range(2000):
        if runner.cancelled:
            break
        asyncio.run(asyncio.sleep(0.005))
    assert set(runner.cancelled) == {runner.requests[0].request_id}


def test_many_at_once(address: str) -> None:
    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(*(client.chat.completions.create(model="mock", messages=MESSAGES)
                                             for _ in range(50)))
            return [answer.choices[0].message.content for answer in answers]
    assert asyncio.run(ask()) == [ANSWER] * 50
