"""A store with several mock engines, and servers over one of them whose engine can be changed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from smg_grpc_proto import trtllm_service_pb2 as trtllm

from ingot.compiler.engine_writer import EngineWriter
from ingot.compiler.self_test import record_self_test
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.engine_format import SELF_TEST
from ingot.runtime.executor.loading import EngineOptions, LoadedEngine
from ingot.runtime.executor.overlap import KvBudget
from ingot.runtime.servers import grpc_server, http_server
from ingot.runtime.servers.context import ENGINE_HASH, ServerContext, ServerSettings
from ingot.runtime.servers.proto import control_pb2 as pb
from ingot.runtime.servers.served import ServedEngine
from ingot.runtime.servers.swap import Swapper
from ingot.runtime.store.store import Store
from tests.runtime.mock_engine import HEAD, reference_greedy, write_engine
from tests.runtime.store.samples import add

HEADS: dict[str, np.ndarray] = {"a": HEAD, "b": np.ascontiguousarray(HEAD[::-1]), "c": np.ascontiguousarray(-HEAD)}
OPTIONS = EngineOptions(kv_cache_tokens=192, num_workers=1)
PROMPT = [5, 6, 7]


def answer_of(name: str, prompt: list[int] = PROMPT, count: int = 10) -> list[int]:
    return reference_greedy(prompt, count, HEADS[name])


def fill_store(store: Store, folder: Path, code: bytes) -> dict[str, str]:
    """Name -> hash: a (recorded), b (recorded), c (no record), broken (b with the record of a), other (a's weights with
    another tokenizer)."""
    paths = {
        "a": write_engine(folder / "a.engine", code, before_finish=record_self_test),
        "b": write_engine(folder / "b.engine", code, head=HEADS["b"], before_finish=record_self_test),
        "c": write_engine(folder / "c.engine", code, head=HEADS["c"]),
    }
    with EngineFile.open(paths["a"]) as file:
        record = file.read(SELF_TEST)

    def add_record(writer: EngineWriter, manifest: Mapping[str, Any]) -> None:
        writer.add(SELF_TEST, record)

    paths["broken"] = write_engine(folder / "broken.engine", code, head=HEADS["b"], before_finish=add_record)
    paths["other"] = write_engine(folder / "other.engine", code, with_tokenizer=False)
    return {name: add(store, path, name) for name, path in paths.items()}


@dataclass
class Swapping:
    """run: has a coroutine run where the server runs. control, trtllm: callables by the names of methods."""

    context: ServerContext
    swapper: Swapper
    store: Store
    hashes: dict[str, str]
    address: str
    http: str
    run: Callable[[Coroutine[Any, Any, Any]], Any]
    channel: grpc.Channel
    available: list[int] = field(default_factory=lambda: [0])

    def load(self, engine: str, **options: Any) -> pb.LoadEngineResponse:
        request = pb.LoadEngineRequest(engine=engine, options=pb.LoadOptions(**options))
        return self._call("LoadEngine", request, pb.LoadEngineResponse)

    def rollback(self, steps: int = 0) -> pb.LoadEngineResponse:
        return self._call("RollbackEngine", pb.RollbackEngineRequest(steps=steps), pb.LoadEngineResponse)

    def status(self) -> pb.SwapStatus:
        return self._call("GetSwapStatus", pb.GetSwapStatusRequest(), pb.SwapStatus)

    def info(self) -> pb.EngineInfo:
        return self._call("GetEngineInfo", pb.GetEngineInfoRequest(), pb.EngineInfo)

    def _call(self, method: str, request: Any, kind: Any) -> Any:
        return self.channel.unary_unary(f"/ingot.v1.Control/{method}", lambda message: message.SerializeToString(),
                                        kind.FromString)(request, timeout=30)

    def start(self, prompt: list[int] = PROMPT, count: int = 10, n: int = 1, request_id: str = "") -> Any:
        """A streaming call."""
        request = trtllm.GenerateRequest(
            request_id=request_id, tokenized=trtllm.TokenizedInput(input_token_ids=prompt), max_tokens=count,
            streaming=True, ignore_eos=True)
        if n > 1:
            request.sampling_config.num_return_sequences = n
        return self.channel.unary_stream("/trtllm.TrtllmService/Generate", lambda message: message.SerializeToString(),
                                         trtllm.GenerateResponse.FromString)(request, timeout=30)

    def ask(self, prompt: list[int] = PROMPT, count: int = 10) -> tuple[str, list[int]]:
        """(hash of the engine that answered, the answer)"""
        return finished(self.start(prompt, count))

    @contextmanager
    def held(self) -> Iterator[None]:
        """The current engine computes two steps more, and then none before the block ends."""
        program = self.context.current.engine._executor._loop._program  # type: ignore[attr-defined]
        launch, go_on, left = program.launch, threading.Event(), [2]

        def held_launch(inputs: Any) -> None:
            if not left[0]:
                assert go_on.wait(60)
            left[0] = max(0, left[0] - 1)
            launch(inputs)

        program.launch = held_launch
        try:
            yield
        finally:
            go_on.set()
            del program.launch


def finished(call: Any) -> tuple[str, list[int]]:
    """The rest of a streaming call: (hash, tokens of the first answer). Both kinds of metadata tell the same."""
    (told,) = [value for key, value in call.initial_metadata() if key == ENGINE_HASH]
    tokens = [list(message.complete.output_token_ids) for message in call if message.HasField("complete")]
    assert [value for key, value in call.trailing_metadata() if key == ENGINE_HASH] == [told]
    return str(told), tokens[0]


def swaps(server: Swapping) -> dict[str, int]:
    return {name: count for name, count in server.status().results.items() if count}


def until_freed(server: Swapping) -> None:
    end = time.monotonic() + 20
    while len(server.status().engines) > 1:
        assert time.monotonic() < end
        time.sleep(0.005)


def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


@contextmanager
def swapping(store: Store, hashes: dict[str, str], options: EngineOptions = OPTIONS, first: str = "a",
             settings: ServerSettings = ServerSettings(), min_fraction: float = 0.5,  # noqa: B008 (immutable)
             ) -> Iterator[Swapping]:
    """available[0]: bytes of memory that the swapper finds free; 0: it cannot tell."""
    from dataclasses import replace

    options = replace(options, store=str(store.folder))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    available = [0]

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    async def begin() -> Any:
        context = ServerContext(ServedEngine.of(LoadedEngine(hashes[first], options)), "mock", settings)
        facts = context.current.facts
        budget = KvBudget(facts["kv_cache_bytes"], 0, options.kv_cache_tokens, options.host_kv_tokens, min_fraction)
        context.swapper = Swapper(context, options, budget, available_bytes=lambda file, device: available[0])
        return (context, context.swapper, await grpc_server.start(context, "127.0.0.1:0"),
                await http_server.start(context, "127.0.0.1:0"))

    async def end() -> None:
        for server in servers:
            await server.stop(0)
        await context.close()

    context, swapper, *servers = run(begin())
    try:
        with grpc.insecure_channel(servers[0].address) as channel:
            yield Swapping(context, swapper, store, hashes, servers[0].address, servers[1].address, run, channel,
                           available)
    finally:
        run(end())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()
