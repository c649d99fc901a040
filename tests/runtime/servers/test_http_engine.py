"""The HTTP server over real engines, through OpenAI's client: what it answers is what the engine computes."""

import asyncio
import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from ingot.compiler.build import BuildRequest, build
from ingot.runtime.engine import Engine
from ingot.runtime.executor.loading import EngineOptions, LoadedEngine
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.servers import http_server
from ingot.runtime.servers.context import ServerContext, ServerSettings
from ingot.runtime.servers.served import ServedEngine
from ingot.runtime.tokenizer import Tokenizer
from tests.runtime.mock_engine import TEMPLATE, tokenizer_json
from tests.runtime.servers.scripted_engine import running
from tests.runtime.servers.test_metrics_text import page, samples


@contextmanager
def serving(path: Path, options: EngineOptions) -> Iterator[tuple[str, LoadedEngine]]:
    with LoadedEngine(path, options) as loaded:
        async def start() -> http_server.HttpServer:
            context = ServerContext(ServedEngine.of(loaded), "tiny", ServerSettings())
            return await http_server.start(context, "127.0.0.1:0")

        with running(start) as address:
            yield address, loaded


@contextmanager
def client_of(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def settled(loaded: LoadedEngine) -> bool:
    """Nothing runs, and no request holds KV blocks."""
    for _ in range(2000):
        stats = loaded.executor.stats()
        if not (stats.num_running or stats.num_waiting or stats.num_used_blocks):
            return True
        time.sleep(0.005)
    return False


def test_a_built_engine_answers_as_it_does_alone(speaking_engine: Callable[..., Path]) -> None:
    path = speaking_engine()
    prompts = ["Hello", "The sea", "x" * 40]
    with Engine.load(path, kv_cache_tokens=256, num_workers=1) as engine:
        expected = [answer.text for answer in engine.generate(prompts, SamplingParams(max_tokens=20))]
    with serving(path, EngineOptions(kv_cache_tokens=256, num_workers=1)) as (address, loaded), \
            client_of(address) as client:
        answers = client.completions.create(model="tiny", prompt=prompts, max_tokens=20, temperature=0)
        assert [choice.text for choice in answers.choices] == expected
        streamed = client.completions.create(model="tiny", prompt=prompts[0], max_tokens=20, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed) == expected[0]
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
        with pytest.raises(openai.BadRequestError) as wrong:
            client.completions.create(model="tiny", prompt="x" * 128)
        assert (wrong.value.param, wrong.value.code) == ("prompt", "context_length_exceeded")
        assert settled(loaded)


def test_log_probabilities_of_a_prompt(speaking_engine: Callable[..., Path]) -> None:
    """echo scores the prompt with what the model's logits say."""
    import numpy as np

    path, text = speaking_engine(), "Hello, sea"
    with Engine.load(path, kv_cache_tokens=256, num_workers=1) as engine:
        ids = engine.encode(text)
        logits = engine.logits(ids).astype(np.float64)
    expected = [row[token] - np.log(np.exp(row - row.max()).sum()) - row.max()
                for row, token in zip(logits, ids[1:], strict=False)]
    with serving(path, EngineOptions(kv_cache_tokens=256, num_workers=1)) as (address, _), \
            client_of(address) as client:
        choice = client.completions.create(model="tiny", prompt=text, max_tokens=0, echo=True, logprobs=1).choices[0]
        assert choice.text == text and choice.logprobs is not None
        assert choice.logprobs.tokens == list(text)
        told = choice.logprobs.token_logprobs
        assert told is not None and told[0] is None
        assert told[1:] == pytest.approx(expected, abs=1e-4)


def test_counters_move_as_documented(mock_path: Path) -> None:
    """Two equal prompts: the second finds all but the last block's rest of it, and each count says so."""
    with serving(mock_path, EngineOptions(kv_cache_tokens=200, num_workers=1)) as (address, loaded), \
            client_of(address) as client:
        begin = samples(page(address))
        prompt = "abcdefghijklmnopqrst"
        usages = [client.completions.create(model="tiny", prompt=prompt, max_tokens=4, temperature=0,
                                            extra_body={"ignore_eos": True}).usage for _ in range(2)]
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "z"}], max_tokens=3, n=2,
                                       extra_body={"ignore_eos": True})
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="tiny", prompt="x" * 100)
        assert settled(loaded)
        moved = {name: value - begin[name] for name, value in samples(page(address)).items() if name in begin}
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages if usage and usage.prompt_tokens_details]
    # All but the prompt's last token, which is computed for its logits.
    assert cached == [0, 19]
    chat_tokens = len("u:z|") + 1 + len("a:")
    assert moved["ingot_requests_finished_total[('reason', 'length')]"] == 4
    assert moved["ingot_requests_received_total[]"] == 3
    assert moved["ingot_requests_refused_total[('error', 'NeverFits')]"] == 0
    assert moved["ingot_generated_tokens_total[]"] == 4 + 4 + 2 * 3
    assert moved["ingot_prompt_tokens_total[]"] == 20 + 20 + 2 * chat_tokens
    # The second answer to the chat shares the prompt of the first, whole blocks at least.
    assert moved["ingot_prompt_tokens_cached_total[]"] == moved["ingot_prefix_cache_hits_total[]"] > 19
    assert moved["ingot_time_to_first_token_seconds_count[('cache', 'hit')]"] == 2
    assert moved["ingot_time_to_first_token_seconds_count[('cache', 'miss')]"] == 2
    assert moved["ingot_prefix_cache_queries_total[]"] == moved["ingot_prefix_cache_hits_total[]"] + sum(
        value for name, value in moved.items() if name.startswith("ingot_prefix_cache_miss_total"))
    assert moved["ingot_prefix_cache_miss_total[('reason', 'recomputed_last')]"] >= 1
    assert moved["ingot_request_queue_time_seconds_count[]"] == 3
    assert moved["ingot_steps_total[]"] > 0 and moved["ingot_requests_running[]"] == 0


def test_a_client_that_goes_away_frees_its_blocks(mock_path: Path) -> None:
    with serving(mock_path, EngineOptions(kv_cache_tokens=400, num_workers=1)) as (address, loaded):
        host, _, port = address.partition(":")
        body = json.dumps({"prompt": "abc", "max_tokens": 40, "n": 4, "stream": True, "ignore_eos": True}).encode()
        clients = []
        for _ in range(20):
            client = socket.create_connection((host, int(port)))
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
                           % (len(body), body))
            clients.append(client)
        for client in clients:
            client.close()
        assert settled(loaded)
        stats = loaded.executor.stats()
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


def test_many_at_once_answer_as_one_by_one(mock_path: Path) -> None:
    """More requests than the batch has room for, with shared beginnings; greedy, so that answers can be compared."""
    prompts = [("shared beginning " if number % 2 else "") + f"prompt {number}" for number in range(30)]

    async def ask(address: str, at_once: int) -> list[str]:
        limit = asyncio.Semaphore(at_once)
        async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client:
            async def one(prompt: str) -> str:
                async with limit:
                    answer = await client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0)
                    return answer.choices[0].text
            return list(await asyncio.gather(*map(one, prompts)))

    with serving(mock_path, EngineOptions(kv_cache_tokens=150, num_workers=1)) as (address, loaded):
        assert asyncio.run(ask(address, 30)) == asyncio.run(ask(address, 1))
        assert settled(loaded)


def test_a_random_model_makes_the_call_that_it_is_bound_to(mock_path: Path) -> None:
    pytest.importorskip("llguidance")
    tokenizer = Tokenizer(tokenizer_json(), {}, "{{ tools | length }}{{ messages[0].content }}")
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}}}
        for name in "fg"]
    messages: Any = [{"role": "user", "content": "x"}]
    with LoadedEngine(mock_path, EngineOptions(kv_cache_tokens=256, num_workers=1)) as loaded:
        async def start() -> http_server.HttpServer:
            engine = replace(ServedEngine.of(loaded), tokenizer=tokenizer)
            settings = ServerSettings(tool_call_parser="llama3_json")
            return await http_server.start(ServerContext(engine, "tiny", settings), "127.0.0.1:0")

        with running(start) as address, client_of(address) as client:
            answer = client.chat.completions.create(
                model="tiny", messages=messages, tools=tools, parallel_tool_calls=False,
                tool_choice={"type": "function", "function": {"name": "g"}})
        choice, = answer.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert choice.message.tool_calls is not None
        call, = choice.message.tool_calls
        assert call.type == "function" and call.function.name == "g"
        assert json.loads(call.function.arguments) in ({"a": True}, {"a": False})


def test_a_chat_that_names_no_length_gets_what_room_there_is(speaking_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(speaking_checkpoint, tmp_path / "chatty")
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    path = tmp_path / "chatty.engine"
    build(BuildRequest(str(checkpoint), "cpu", "fp32", path, max_batch_size=2, max_num_tokens=8, calibrate=False))
    with serving(path, EngineOptions(kv_cache_tokens=64, num_workers=1)) as (address, loaded), \
            client_of(address) as client:
        assert loaded.kv.longest(loaded.limits.max_seq_len) == 64 < loaded.limits.max_seq_len
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], extra_body={"ignore_eos": True})
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None and answer.usage.total_tokens == 64
