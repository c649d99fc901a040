"""What every server is given: the engines that it has, and what `ingot serve` asks of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from ..executor.request import DuplicateRequest
from ..executor.totals import Totals
from ..host import return_free_memory
from .adapters import ServerAdapters

if TYPE_CHECKING:
    from ..executor.async_engine import OutputStream
    from ..executor.request import Request
    from ..executor.stats import EngineStats, Health
    from .served import ServedEngine
    from .swap import Swapper

GRPC_SERVICES = ("trtllm", "vllm", "kserve", "control")
ENGINE_HASH = "ingot-engine-hash"
"""The HTTP header, and the key of gRPC metadata, that tells which engine gave an answer."""


@dataclass(frozen=True)
class ServerSettings:
    """The settings of `ingot serve`, resolved.

    grpc_address, http_address  host:port to bind, port 0: any; None: this server is not started
    grpc_services               which of GRPC_SERVICES are offered
    tls_certificate, tls_key    PEM; both or neither
    tls_client_ca               PEM: clients must show a certificate that it has signed
    auth_token                  what clients must send as a bearer token; None: nothing
    max_message_bytes           of one request, on either server
    tool_call_parser            how models write calls, one of NAMES of tool_calls; None: told by their chat templates
    reasoning_parser            how they write thoughts, one of NAMES of thoughts.py; None: not told from the rest
    lora_folder                 LoRA adapters may be loaded from below it, and unloaded, on request; None: they stay
    """

    grpc_address: str | None = None
    http_address: str | None = None
    grpc_services: tuple[str, ...] = GRPC_SERVICES
    tls_certificate: bytes | None = None
    tls_key: bytes | None = None
    tls_client_ca: bytes | None = None
    auth_token: str | None = None
    max_message_bytes: int = 32 << 20
    drain_timeout_s: float = 30.0
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    lora_folder: str | None = None


class ServerContext:
    """The engines of a server: the current one, which gets new requests, and older ones that finish theirs.

    Belongs to the loop that runs when it is made; its methods are called there.

    adapters the LoRA adapters of the current engine
    swapper  loads other engines; None: this server keeps the one it has
    swaps    how often engines were asked to take over, by what came of it (RESULTS of swap_outcome.py)
    """

    def __init__(self, engine: ServedEngine, model_name: str, settings: ServerSettings) -> None:
        self.model_name = model_name
        self.settings = settings
        self.adapters = ServerAdapters(self, settings.lora_folder)
        self.swapper: Swapper | None = None
        self.swaps: Counter[str] = Counter()
        self._engines = [engine]  # the current one first
        self._uses: Counter[ServedEngine] = Counter()
        self._unused: dict[ServedEngine, asyncio.Event] = {}
        self._past = Totals()
        self._is_draining = False
        self._on_health: list[Callable[[Health], None]] = []
        self._on_engine: list[Callable[[ServedEngine], None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._adopt(engine)

    # The engines

    @property
    def current(self) -> ServedEngine:
        return self._engines[0]

    @property
    def finishing(self) -> tuple[ServedEngine, ...]:
        """Engines that get no new requests and are freed when they have no old ones any more."""
        return tuple(self._engines[1:])

    @contextlib.contextmanager
    def use(self) -> Iterator[ServedEngine]:
        """The engine for one request: it is there until the block ends, whatever takes over meanwhile."""
        engine = self.current
        self._uses[engine] += 1
        try:
            yield engine
        finally:
            self._uses[engine] -= 1
            if not self._uses[engine]:
                del self._uses[engine]  # no reference stays to what is to be freed
                if engine in self._unused:
                    self._unused[engine].set()

    def take_over(self, engine: ServedEngine) -> None:
        """From now on `engine`, new or one that was finishing, gets the requests; the one before finishes its own."""
        before = self.current
        if engine is before:
            return
        if engine in self._engines:
            self._engines.remove(engine)
            self._unused.pop(engine).set()
            is_new = False
        else:
            is_new = True
        self._engines.insert(0, engine)
        if is_new:
            self._adopt(engine)
        for listener in self._on_engine:
            listener(engine)
        if engine.engine.health != before.engine.health:
            self._tell_health(engine.engine.health)
        unused = self._unused[before] = asyncio.Event()
        if before not in self._uses:
            unused.set()
        self._keep_running(self._retire(before, unused))

    def on_engine(self, listener: Callable[[ServedEngine], None]) -> None:
        """Calls `listener` at once whenever another engine has taken over."""
        self._on_engine.append(listener)

    async def _retire(self, engine: ServedEngine, unused: asyncio.Event) -> None:
        """Frees an engine once nothing needs it; not if it took over again meanwhile."""
        await unused.wait()
        if self._unused.get(engine) is not unused:
            return
        del self._unused[engine]  # from now on it cannot come back
        await asyncio.to_thread(engine.close)
        self._engines.remove(engine)
        self._past.add(engine.engine.recorder, engine.engine.kv_stats)
        asyncio.get_running_loop().call_soon(self._collect)  # when this coroutine holds it no more

    def _collect(self) -> None:
        self._keep_running(asyncio.to_thread(_collect_freed))

    def _keep_running(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def can_return(self, engine: ServedEngine) -> bool:
        """Whether an engine that was replaced could still take over again."""
        return engine in self._unused and engine.engine.health == "serving"

    def _adopt(self, engine: ServedEngine) -> None:
        engine.engine.on_health(lambda health: self._tell_health(health) if engine is self.current else None)

    # Requests

    def generate(self, engine: ServedEngine, request: Request) -> OutputStream:
        """As AsyncEngine.generate. Raises DuplicateRequest for the id of a request of another engine too."""
        if any(other.engine.has(request.request_id) for other in self._engines if other is not engine):
            raise DuplicateRequest(f"request_id {request.request_id!r} is that of a request that has not ended")
        return engine.engine.generate(request)

    def cancel(self, request_id: str) -> bool:
        """As AsyncEngine.cancel, whichever engine has the request."""
        return any(engine.engine.cancel(request_id) for engine in self._engines)

    @property
    def num_requests(self) -> int:
        """That have not ended."""
        return sum(len(engine.engine.request_ids) for engine in self._engines)

    # State

    @property
    def health(self) -> Health:
        return self.current.engine.health

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def on_health(self, listener: Callable[[Health], None]) -> None:
        """Calls `listener` on this loop whenever `health` has changed."""
        self._on_health.append(listener)

    def _tell_health(self, health: Health) -> None:
        for listener in self._on_health:
            listener(health)

    def stats(self) -> EngineStats:
        """Of the current engine; requests that older ones have are counted too."""
        stats = self.current.engine.stats()
        others = [engine.engine.stats() for engine in self.finishing]
        if not others:
            return stats
        return replace(stats, num_running=stats.num_running + sum(other.num_running for other in others),
                       num_waiting=stats.num_waiting + sum(other.num_waiting for other in others),
                       num_paused=stats.num_paused + sum(other.num_paused for other in others))

    def totals(self) -> Totals:
        """Counters since the server started, over all engines that it has had."""
        totals = self._past.copy()
        for engine in self._engines:
            totals.add(engine.engine.recorder, engine.engine.kv_stats)
        return totals

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Refuses new requests, and engines that would take over, and returns when all requests have ended: True.
        What still runs after timeout_s seconds is cancelled: False."""
        self._is_draining = True
        engines = list(self._engines)
        return all(await asyncio.gather(*(engine.engine.drain(timeout_s) for engine in engines)))

    async def close(self) -> None:
        """Frees all engines. What runs is cancelled."""
        self._is_draining = True
        for engine in list(self._engines):
            if engine in self._unused:
                self._unused[engine].set()
        while self._tasks:
            await asyncio.gather(*self._tasks)
        await asyncio.to_thread(self.current.close)


def _collect_freed() -> None:
    """Engines hold themselves by cycles, and `ingot serve` has taken what was there at its start out of collection."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if was_frozen:
        gc.freeze()
    return_free_memory()


class Server(Protocol):
    """What `start(context, address)` of grpc_server.py and http_server.py gives: a server that takes requests.

        async def start(context: ServerContext, address: str) -> Server     # raises RequestError if it cannot bind

    address  host:port that it is bound to, with the port that the system chose for 0
    """

    address: str

    async def stop(self, grace_s: float) -> None:
        """Takes no new connections, lets calls that run end within grace_s seconds, then closes them."""
