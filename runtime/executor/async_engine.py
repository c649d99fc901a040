"""The executor as servers see it: requests in, outputs out, on one asyncio loop.

    async for output in engine.generate(request):
        ...

All the outputs of a step come over to the loop in one call, however many requests they belong to.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from .request import DuplicateRequest, Request, RequestOutput
from .stats import EngineStats, Health

if TYPE_CHECKING:
    from ..adapters.loaded import LoadedAdapters
    from ..kv.events import EventBuffer
    from ..kv.stats import KvStats
    from ..sampling import SamplingParams
    from .answer import Sink
    from .recorder import Recorder


class RequestRunner(Protocol):
    """What the asyncio side needs of an executor: see Executor. Every method may be called from any thread."""

    @property
    def health(self) -> Health: ...
    @property
    def adapters(self) -> LoadedAdapters: ...
    @property
    def recorder(self) -> Recorder: ...
    @property
    def events(self) -> EventBuffer | None: ...
    @property
    def kv_stats(self) -> KvStats: ...
    def prepare(self, params: SamplingParams) -> None: ...
    def submit(self, request: Request, sink: Sink) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def stats(self) -> EngineStats: ...
    def flush_cache(self) -> bool: ...
    def refuse_new(self) -> None: ...
    def drain(self, timeout_s: float | None = None) -> bool: ...
    def on_health(self, listener: Callable[[Health], None]) -> None: ...


class AsyncEngine:
    """Belongs to the loop that runs when it is made; its methods are called there."""

    def __init__(self, executor: RequestRunner) -> None:
        self._executor = executor
        self._loop = asyncio.get_running_loop()
        self._mailboxes: dict[str, _Mailbox] = {}
        # One object for all requests: the executor gathers the outputs of a step by sink.
        self._sink: Sink = self._from_executor

    async def prepare(self, params: SamplingParams) -> None:
        """To be awaited before `generate`, where params may hold a guide: it is compiled beside this loop.

        Raises SamplingError, WorkFailed.
        """
        if params.guide is not None:
            await asyncio.to_thread(self._executor.prepare, params)

    def generate(self, request: Request) -> OutputStream:
        """Starts a request. The outputs of all its answers come out of the iterator, each answer's in order.

        Raises at once QueueFull, Draining, EngineFailed, DuplicateRequest, PromptError, NeverFits, UnknownAdapter.
        What goes wrong later is told by an output with finish_reason "error". Cancelling the task that waits for an
        output, closing the iterator (aclose), and letting go of it, cancel the request.
        """
        request_id = request.request_id
        if request_id in self._mailboxes:
            raise DuplicateRequest(f"request_id {request_id!r} is that of a request that has not ended")
        mailbox = self._mailboxes[request_id] = _Mailbox(request.params.n)
        try:
            self._executor.submit(request, self._sink)
        except BaseException:
            del self._mailboxes[request_id]
            raise
        return OutputStream(self, request_id, mailbox)

    def cancel(self, request_id: str) -> bool:
        """Ends a request early: its answers that have not ended get an output with finish_reason "cancelled".

        False if no such request runs or waits: it has ended, or never was.
        """
        if request_id not in self._mailboxes:
            return False
        self._executor.cancel(request_id)
        return True

    def has(self, request_id: str) -> bool:
        """Whether a request of this id has not ended."""
        return request_id in self._mailboxes

    @property
    def request_ids(self) -> Sequence[str]:
        """Of the requests that have not ended."""
        return list(self._mailboxes)

    @property
    def health(self) -> Health:
        return self._executor.health

    def on_health(self, listener: Callable[[Health], None]) -> None:
        """Calls `listener` on this loop whenever `health` has changed."""
        self._executor.on_health(lambda health: self._call_soon(listener, health))

    @property
    def adapters(self) -> LoadedAdapters:
        """Those that requests may name."""
        return self._executor.adapters

    @property
    def recorder(self) -> Recorder:
        return self._executor.recorder

    @property
    def kv_stats(self) -> KvStats:
        """Counters of the prefix cache."""
        return self._executor.kv_stats

    @property
    def events(self) -> EventBuffer | None:
        """What was stored in and removed from the KV cache, for routers; None if it is not recorded."""
        return self._executor.events

    def stats(self) -> EngineStats:
        return self._executor.stats()

    async def flush_cache(self) -> bool:
        """Forgets all cached prefixes; False, and nothing happens, while requests hold KV blocks."""
        return await asyncio.to_thread(self._executor.flush_cache)

    def refuse_new(self) -> None:
        """From now on new requests raise Draining."""
        self._executor.refuse_new()

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Refuses new requests and returns when all others have ended: True. What still runs after timeout_s seconds is
        cancelled: False."""
        return await asyncio.to_thread(self._executor.drain, timeout_s)

    def _from_executor(self, outputs: list[RequestOutput]) -> None:
        """On the executor's thread."""
        self._call_soon(self._deliver, outputs)

    def _call_soon(self, function: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(function, *arguments)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        mailboxes = self._mailboxes
        for output in outputs:
            mailbox = mailboxes[output.request_id]
            mailbox.outputs.append(output)
            if output.finish_reason is not None:
                mailbox.num_open -= 1
                if not mailbox.num_open:
                    del mailboxes[output.request_id]
            waiter = mailbox.waiter
            if waiter is not None:
                mailbox.waiter = None
                if not waiter.done():
                    waiter.set_result(None)

    def _abandon(self, request_id: str, mailbox: _Mailbox) -> None:
        """Nobody reads on. The mailbox stays until the executor has ended the request, so that what is still on its
        way cannot reach another request of the same id."""
        if mailbox.num_open:
            self._executor.cancel(request_id)


class _Mailbox:
    """Outputs on their way from the executor to their reader; num_open of the answers have not ended."""

    __slots__ = ("num_open", "outputs", "waiter")

    def __init__(self, num_open: int) -> None:
        self.num_open = num_open
        self.outputs: deque[RequestOutput] = deque()
        self.waiter: asyncio.Future[None] | None = None


class OutputStream:
    """The outputs of one request: an asynchronous iterator for one reader."""

    def __init__(self, engine: AsyncEngine, request_id: str, mailbox: _Mailbox) -> None:
        self.request_id = request_id
        self._engine = engine
        self._mailbox = mailbox
        self._is_closed = False

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        mailbox = self._mailbox
        if self._is_closed:
            raise StopAsyncIteration
        if not mailbox.outputs:
            if not mailbox.num_open:
                raise StopAsyncIteration
            waiter = mailbox.waiter = self._engine._loop.create_future()
            try:
                await waiter
            except asyncio.CancelledError:
                self._close()
                raise
        return mailbox.outputs.popleft()

    async def aclose(self) -> None:
        """Cancels the request unless it has ended; the iterator is at its end."""
        self._close()

    def _close(self) -> None:
        self._is_closed = True
        self._engine._abandon(self.request_id, self._mailbox)

    def __del__(self) -> None:
        # A reader that leaves its loop early and drops the iterator wants no more.
        if not self._is_closed and self._mailbox.num_open:
            self._engine._call_soon(self._engine._abandon, self.request_id, self._mailbox)
