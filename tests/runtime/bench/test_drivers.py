"""Drivers against servers and engines that are real but for the computing."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientTimeout

from ingot.runtime.bench.bench import Plan, Result, bench
from ingot.runtime.bench.drivers.driver import CallFailed, Delivery, Driver, Refused, ServerUnreachable
from ingot.runtime.bench.drivers.grpc import GrpcDriver
from ingot.runtime.bench.drivers.http import HttpDriver
from ingot.runtime.bench.drivers.in_process import in_process
from ingot.runtime.bench.load import Load
from ingot.runtime.bench.workload import make_workload
from ingot.runtime.errors import IngotError, RequestError
from ingot.runtime.executor.loading import EngineOptions
from ingot.runtime.executor.request import Draining, PromptError, QueueFull
from ingot.runtime.servers.context import ServerSettings
from tests.runtime.mock_engine import VOCAB_SIZE
from tests.runtime.servers.grpc_replica import replica
from tests.runtime.servers.scripted_engine import ScriptedRunner, http, outputs
from tests.runtime.servers.test_http_server import self_signed

AGENT = make_workload("agent", {}, distribution="fixed", prefix_len=8, isl="4", osl="3", turn_isl="3", turns=3,
                      think_s=0.0)


def run(driver: Driver, use: Callable[[Driver], Coroutine[Any, Any, Any]]) -> Any:
    async def closed() -> Any:
        try:
            return await use(driver)
        finally:
            await driver.close()
    return asyncio.run(asyncio.wait_for(closed(), 60))


def measure(driver: Driver, workload: Any = AGENT, num_requests: int = 20, **plan: Any) -> Result:
    load = Load(concurrency=4, num_requests=num_requests)
    result: Result = run(driver, lambda driver: bench(driver, Plan(load, workload, **plan), "0"))
    return result


async def deliveries(driver: Driver, prompt: list[int] | str = "ab", output_tokens: int = 3) -> list[Delivery]:
    return [delivery async for delivery in driver.generate("id", prompt, output_tokens)]


def test_http_facts(tmp_path: Path) -> None:
    with http(tmp_path, ScriptedRunner()) as address:
        facts = run(HttpDriver(f"http://{address}/v1"), lambda driver: driver.facts())
    assert (facts.model, facts.vocab_size, facts.max_seq_len) == ("mock", VOCAB_SIZE, 1000)
    assert len(facts.engine_hash) == 64 and facts.settings["precision"] == "fp32"


def test_http_answers(tmp_path: Path) -> None:
    runner = ScriptedRunner()
    with http(tmp_path, runner) as address:
        got = run(HttpDriver(f"http://{address}"), deliveries)
    request, = runner.requests
    assert (request.params.max_tokens, request.params.ignore_eos, request.params.temperature) == (3, True, 0)
    expected = outputs(request)
    assert [delivery.num_tokens for delivery in got] == [1, 1, 1, 0]
    assert [delivery.token_ids for delivery in got[:3]] == [output.token_ids for output in expected]
    assert (got[-1].prompt_tokens, got[-1].cached_tokens, got[-1].total_tokens) == (2, 1, 3)


@pytest.mark.parametrize(("error", "raised"), [
    (QueueFull("full"), Refused), (Draining("going"), Refused), (PromptError("bad"), CallFailed)])
def test_http_refusals(tmp_path: Path, error: IngotError, raised: type[Exception]) -> None:
    runner = ScriptedRunner()
    runner.refusal = error
    with http(tmp_path, runner) as address, pytest.raises(raised, match=str(error)):
        run(HttpDriver(f"http://{address}"), deliveries)


def test_http_errors_in_mid_stream(tmp_path: Path) -> None:
    runner = ScriptedRunner()
    runner.script = lambda request: outputs(request, "abc", reason="timeout")
    with http(tmp_path, runner) as address, pytest.raises(CallFailed, match="deadline"):
        run(HttpDriver(f"http://{address}"), deliveries)


def test_leaving_cancels(tmp_path: Path) -> None:
    runner = ScriptedRunner()
    runner.script = lambda request: outputs(request)[:1]

    async def leave(driver: Driver) -> None:
        async with contextlib.aclosing(driver.generate("id", [1], 3)) as stream:
            await anext(stream)
        for _ in range(1000):
            if runner.cancelled:
                return
            await asyncio.sleep(0.005)

    with http(tmp_path, runner) as address:
        run(HttpDriver(f"http://{address}"), leave)
        assert runner.cancelled


def test_servers_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for driver in (HttpDriver("http://127.0.0.1:1"), GrpcDriver("127.0.0.1:1")):
        with pytest.raises(ServerUnreachable, match=r"127\.0\.0\.1:1"):
            run(driver, lambda driver: driver.facts())
    monkeypatch.setattr("ingot.runtime.bench.drivers.http._FACTS_TIMEOUT", ClientTimeout(total=0.05))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ServerUnreachable, match=f"{port}/v1/models: (Connection )?[Tt]imeout"):
            run(HttpDriver(f"http://127.0.0.1:{port}"), lambda driver: driver.facts())
    monkeypatch.undo()
    with http(tmp_path, ScriptedRunner(), ServerSettings(auth_token="t")) as address:
        with pytest.raises(ServerUnreachable, match="401"):
            run(HttpDriver(f"http://{address}"), lambda driver: driver.facts())
        with pytest.raises(ServerUnreachable, match="other"):
            run(HttpDriver(f"http://{address}", "other", "t"), lambda driver: driver.facts())
        assert run(HttpDriver(f"http://{address}", "mock", "t"), deliveries)
    with pytest.raises(RequestError, match="certificates"):
        HttpDriver("https://x", ca_file=str(tmp_path / "missing"))
    with pytest.raises(RequestError, match="certificates"):
        GrpcDriver("x:1", ca_file=str(tmp_path / "missing"))


def test_tls_and_token(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    settings = ServerSettings(tls_certificate=certificate.read_bytes(), tls_key=key.read_bytes(), auth_token="t")
    with http(tmp_path, ScriptedRunner(), settings) as address:
        assert measure(HttpDriver(f"https://{address}", None, "t", str(certificate))).report["requests"]["finished"]
        with pytest.raises(ServerUnreachable, match="certificate"):
            run(HttpDriver(f"https://{address}", None, "t"), lambda driver: driver.facts())
    with replica(tmp_path, settings=settings) as server:
        assert measure(GrpcDriver(server.address, "t", str(certificate))).report["requests"]["finished"]
        with pytest.raises(ServerUnreachable, match="UNAUTHENTICATED"):
            run(GrpcDriver(server.address, None, str(certificate)), lambda driver: driver.facts())


def test_http_at_a_port_of_grpc(tmp_path: Path) -> None:
    wanted = r"speaks no HTTP(?s:.)*grpc://HOST:PORT"
    with replica(tmp_path) as server, pytest.raises(ServerUnreachable, match=wanted):
        run(HttpDriver(f"http://{server.address}"), lambda driver: driver.facts())


def test_http_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ScriptedRunner()
    monkeypatch.setattr("ingot.runtime.bench.bench._KV_PERIOD_S", 0.0)
    with http(tmp_path, runner) as address:
        report = measure(HttpDriver(f"http://{address}")).report
    assert report["requests"]["finished"] == 20 and report["run"]["metrics"] == "read before and after"
    assert report["tokens"]["output"] == 60 and report["prefix_cache"]["hit_rate"] == pytest.approx(0.5, abs=0.1)
    assert report["kv_usage"] == {"mean": 0.25, "max": 0.25}
    assert len(runner.requests) == 24  # with the warm-up


def test_a_warm_up_that_fails_ends_it(tmp_path: Path) -> None:
    runner = ScriptedRunner()
    runner.refusal = QueueFull("always full")
    with http(tmp_path, runner) as address, pytest.raises(IngotError, match=r"warm-up was refused.*always full"):
        measure(HttpDriver(f"http://{address}"))


def test_grpc_bench(tmp_path: Path) -> None:
    """The same executor tells the same by both protocols: prefixes are reused, and the metrics add up."""
    with replica(tmp_path) as server:
        result = measure(GrpcDriver(server.address), warm_up=2)
        report = result.report
        assert server.executor.recorder.requests_finished == {"length": 22}
    assert report["requests"]["finished"] == 20 and report["tokens"]["output"] == 60
    assert report["run"]["settings"]["max_batch_size"] == 8 and len(report["run"]["engine"]) == 64
    told = report["prefix_cache"]
    assert told["cached_tokens"] > 0
    assert report["server"]["prefix_cache_hits"] == told["cached_tokens"]
    assert report["server"]["prefix_cache_queries"] == told["prompt_tokens"]
    assert report["times"]["queue wait"]["count"] == 20


def test_grpc_refusals(tmp_path: Path) -> None:
    with replica(tmp_path) as server:
        with pytest.raises(CallFailed, match="INVALID_ARGUMENT"):
            run(GrpcDriver(server.address), lambda driver: deliveries(driver, [VOCAB_SIZE]))
        server.executor.refuse_new()
        with pytest.raises(Refused, match="UNAVAILABLE"):
            run(GrpcDriver(server.address), deliveries)


def test_in_process(mock_path: Path) -> None:
    """A real engine: what the answers tell of the cache, and what the engine counts, are the same."""
    async def use() -> Result:
        async with in_process(str(mock_path), EngineOptions(kv_cache_tokens=400, num_workers=1)) as driver:
            return await bench(driver, Plan(Load(concurrency=3, num_requests=20), AGENT), "0")

    report = asyncio.run(asyncio.wait_for(use(), 60)).report
    assert report["requests"]["finished"] == 20 and report["requests"]["shorter_than_asked"] == 0
    told, counted = report["prefix_cache"], report["server"]
    assert told["cached_tokens"] == counted["prefix_cache_hits"] > 0
    assert told["prompt_tokens"] == counted["prefix_cache_queries"]
    assert report["run"]["settings"]["scheduler_policy"] == "GUARANTEED_NO_EVICT"


def test_texts_in_process(mock_path: Path, tmp_path: Path) -> None:
    dataset = tmp_path / "requests.jsonl"
    dataset.write_text('{"task_id": 0, "prompt": "Hello", "output_tokens": 5}\n' * 3)

    async def use() -> Result:
        async with in_process(str(mock_path), EngineOptions(kv_cache_tokens=400, num_workers=1)) as driver:
            return await bench(driver, Plan(Load(concurrency=1), None, str(dataset), warm_up=0), "0")

    result = asyncio.run(asyncio.wait_for(use(), 60))
    assert [(record.prompt_tokens, record.num_output_tokens) for record in result.records] == [(5, 5)] * 3
