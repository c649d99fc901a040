"""A gRPC server around an executor that answers as a test says."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ingot.runtime.engine_file import EngineFile
from ingot.runtime.executor.async_engine import AsyncEngine
from ingot.runtime.servers import grpc_server
from ingot.runtime.servers.context import ServerContext, ServerSettings
from ingot.runtime.servers.served import ServedEngine
from tests.runtime.mock_engine import VOCAB_SIZE, write_engine
from tests.runtime.servers.scripted_engine import LIMITS, ScriptedRunner, tokenizer

__all__ = ["ScriptedRunner", "scripted"]


@contextmanager
def scripted(folder: Path, runner: ScriptedRunner) -> Iterator[str]:
    """host:port of a server around `runner`."""
    path = write_engine(folder / "scripted_grpc.engine", b"no code")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(30)

    async def start(file: EngineFile) -> grpc_server.GrpcServer:
        engine = ServedEngine(AsyncEngine(runner), file, tokenizer(), LIMITS, VOCAB_SIZE, frozenset())
        context = ServerContext(engine, "mock", ServerSettings())
        return await grpc_server.start(context, "127.0.0.1:0")

    with EngineFile.open(path) as file:
        server = run(start(file))
        try:
            yield server.address
        finally:
            run(server.stop(0))
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)
    loop.close()
