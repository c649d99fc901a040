"""A gRPC server over an executor that computes nothing, on a thread of its own, and channels to it."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import grpc

from ingot.runtime.devices.null import NullProgram
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.executor.async_engine import AsyncEngine
from ingot.runtime.executor.executor import Executor, ExecutorSettings
from ingot.runtime.kv import KvCache
from ingot.runtime.kv.events import EventBuffer
from ingot.runtime.lora import LoraRoom
from ingot.runtime.program import Limits
from ingot.runtime.scheduler import SchedulerSettings
from ingot.runtime.servers import grpc_server
from ingot.runtime.servers.context import ServerContext, ServerSettings
from ingot.runtime.servers.grpc_server import GrpcServer
from ingot.runtime.servers.served import ServedEngine
from ingot.runtime.tokenizer import Tokenizer
from tests.runtime.mock_engine import EOS, TEMPLATE, VOCAB_SIZE, tokenizer_json, write_engine

LIMITS = Limits(max_batch_size=8, max_num_tokens=64, max_seq_len=256)
BLOCK_SIZE = 16
MODEL = "mock"


def next_token(position: int, token: int) -> int:
    """Printable ASCII, so that answers are texts; never EOS."""
    return 65 + (position + token) % 26


@dataclass
class Replica:
    """run: has a coroutine run where the server runs, and gives its result."""

    address: str
    executor: Executor
    context: ServerContext
    server: GrpcServer
    run: Callable[[Coroutine[Any, Any, Any]], Any]

    def channel(self, **options: Any) -> grpc.Channel:
        return grpc.insecure_channel(self.address, list(options.items()))


@cache
def tokenizer() -> Tokenizer:
    """A token a byte."""
    return Tokenizer(tokenizer_json(), {"special_tokens": {"bos_token": "<s>"}}, TEMPLATE)


@contextmanager
def replica(folder: Path, *, settings: ServerSettings = ServerSettings(), limits: Limits = LIMITS,  # noqa: B008
            num_blocks: int = 256, step_s: float = 0.0, max_queue_size: int = 512, with_tokenizer: bool = True,
            follow: Callable[[int, int], int] | None = next_token, lora: LoraRoom | None = None) -> Iterator[Replica]:
    """step_s: seconds that a step takes. follow: (position, token) -> the token that follows; None: as NullMemory says,
    of the whole context and the LoRA adapter."""
    path = folder / "replica.engine"
    if not path.exists():
        write_engine(path, b"no code", limits={"max_batch_size": limits.max_batch_size,
                                               "max_num_tokens": limits.max_num_tokens,
                                               "max_seq_len": limits.max_seq_len})
    program = NullProgram(limits, VOCAB_SIZE, num_blocks, block_size=BLOCK_SIZE, next_token=follow, step_s=step_s,
                          simulate_kv=follow is None, lora=lora)
    kv = KvCache(num_blocks, BLOCK_SIZE, max_chunk=limits.max_num_tokens, events=EventBuffer())
    executor = Executor(program, kv, ExecutorSettings(SchedulerSettings.within(limits), limits.max_seq_len,
                                                      max_queue_size),
                        tokenizer=tokenizer() if with_tokenizer else None, stop_token_ids=frozenset({EOS}))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(30)

    async def start(file: EngineFile) -> tuple[ServerContext, GrpcServer]:
        engine = ServedEngine(AsyncEngine(executor), file, tokenizer() if with_tokenizer else None, limits, VOCAB_SIZE,
                              frozenset({EOS}))
        context = ServerContext(engine, MODEL, settings)
        return context, await grpc_server.start(context, "127.0.0.1:0")

    try:
        with EngineFile.open(path) as file:
            context, server = run(start(file))
            try:
                yield Replica(server.address, executor, context, server, run)
            finally:
                run(server.stop(0))
    finally:
        executor.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()
