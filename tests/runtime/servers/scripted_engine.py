"""An executor that answers as a test says, and the servers' context around it."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from ingot.runtime.adapters.loaded import LoadedAdapters
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.errors import IngotError
from ingot.runtime.executor.answer import Sink
from ingot.runtime.executor.async_engine import AsyncEngine
from ingot.runtime.executor.recorder import Recorder
from ingot.runtime.executor.request import Request, RequestOutput, TokenLogprobs, check_prompt, check_room
from ingot.runtime.executor.stats import EngineStats, Health
from ingot.runtime.kv.stats import KvStats
from ingot.runtime.program import Limits
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.servers import http_server
from ingot.runtime.servers.context import ServerContext, ServerSettings
from ingot.runtime.servers.served import ServedEngine
from ingot.runtime.tokenizer import Tokenizer
from tests.runtime.mock_engine import TEMPLATE, VOCAB_SIZE, tokenizer_json, write_engine

ANSWER = "Héllo 😀!"
LIMITS = Limits(4, 16, 1000)


def outputs(request: Request, answer: str = ANSWER, reason: Any = "stop") -> list[RequestOutput]:
    """A token a byte, of every answer in turn; the first half of each prompt was cached."""
    ids = tokenizer().encode(answer)[: request.params.max_tokens]
    stream = tokenizer().stream()
    made = []
    pieces = [stream.add(token) for token in ids]
    for number, (token, text) in enumerate(zip(ids, pieces, strict=True), 1):
        for index in range(request.params.n):
            made.append(RequestOutput(
                request.request_id, index, [token], text, len(request.prompt_token_ids),
                len(request.prompt_token_ids) // 2, number,
                logprobs=None if request.params.logprobs is None else [logprobs(token)],
                prompt_logprobs=_prompt_logprobs(request) if number == 1 and index == 0 else None,
                finish_reason=None if number < len(ids) else reason if len(ids) == len(answer.encode()) else "length"))
    return made


def logprobs(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5, 1, [token, 0], [-0.5, float("-inf")])


def _prompt_logprobs(request: Request) -> list[TokenLogprobs | None] | None:
    if request.params.prompt_logprobs is None:
        return None
    return [None, *(logprobs(token) for token in request.prompt_token_ids[1:])]


@cache
def tokenizer() -> Tokenizer:
    """A token a byte."""
    return Tokenizer(tokenizer_json(), {"special_tokens": {"bos_token": "<s>"}}, TEMPLATE)


class ScriptedRunner:
    """The executor's side of an AsyncEngine.

    script  request -> its outputs, all at once; by default ANSWER. One that does not end leaves the request open
    refusal raised at once by the next requests
    """

    def __init__(self) -> None:
        self.health: Health = "serving"
        self.adapters = LoadedAdapters(None)
        self.recorder = Recorder()
        self.events = None
        self.kv_stats = KvStats(100, 60, miss_tokens={"cold": 30, "evicted": 10})
        self.requests: list[Request] = []
        self.cancelled: deque[str] = deque()
        self.script: Callable[[Request], list[RequestOutput]] = outputs
        self.refusal: IngotError | None = None
        self._open: dict[str, Sink] = {}

    def prepare(self, params: SamplingParams) -> None:
        """Nothing takes long here."""

    def submit(self, request: Request, sink: Sink) -> None:
        if self.refusal is not None:
            raise self.refusal
        check_prompt(request.prompt_token_ids, VOCAB_SIZE, LIMITS.max_seq_len)
        check_room(request.prompt_token_ids, LIMITS.max_seq_len)
        self.requests.append(request)
        made = self.script(request)
        if sum(output.finish_reason is not None for output in made) < request.params.n:
            self._open[request.request_id] = sink
        if made:
            sink(made)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        if sink := self._open.pop(request_id, None):
            sink([RequestOutput(request_id, 0, [], "", 1, 0, 0, finish_reason="cancelled")])

    def finish_later(self, request: Request, after_s: float) -> None:
        """Ends an open request."""
        sink = self._open.pop(request.request_id)
        threading.Timer(after_s, sink, [outputs(request)]).start()

    def stats(self) -> EngineStats:
        return EngineStats(self.health, 1, 2, 0, 4, 64, 100, 25, 10, 65, 16, 0, 0, 3)

    def flush_cache(self) -> bool:
        return True

    def refuse_new(self) -> None:
        self.health = "draining"

    def drain(self, timeout_s: float | None = None) -> bool:
        return True

    def on_health(self, listener: Callable[[Health], None]) -> None:
        pass


@contextmanager
def http(folder: Path, runner: ScriptedRunner, settings: ServerSettings = ServerSettings(),  # noqa: B008 (immutable)
         with_tokenizer: bool = True, grace_s: float = 0) -> Iterator[str]:
    """An HTTP server around `runner`; host:port. It is stopped with this grace."""
    with running(lambda: start_at(folder, runner, "127.0.0.1:0", settings, with_tokenizer), grace_s) as address:
        yield address


@contextmanager
def running(start: Callable[[], Coroutine[Any, Any, http_server.HttpServer]], grace_s: float = 0) -> Iterator[str]:
    """A server on a thread of its own; host:port."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(30)

    try:
        server = run(start())
        try:
            yield server.address
        finally:
            run(server.stop(grace_s))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()


async def start_at(folder: Path, runner: ScriptedRunner, address: str,
                   settings: ServerSettings = ServerSettings(),  # noqa: B008 (immutable)
                   with_tokenizer: bool = True) -> http_server.HttpServer:
    path = folder / "scripted.engine"
    if not path.exists():
        write_engine(path, b"no code")
    engine = ServedEngine(AsyncEngine(runner), EngineFile.open(path), tokenizer() if with_tokenizer else None, LIMITS,
                          VOCAB_SIZE, frozenset())
    return await http_server.start(ServerContext(engine, "mock", settings), address)
