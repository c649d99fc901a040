"""Another engine takes over in a running server (docs/serving.md, "Another engine").

One at a time: found in the store, checked by the server's policy, loaded beside the one that runs, tried out; then new
requests go to it. Whatever goes wrong before that leaves the running engine as it is. The old one finishes its requests
and is freed.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ..devices import device_of, free_bytes
from ..engine_file import EngineFile
from ..errors import IngotError, RequestError, WorkFailed
from ..executor.loading import LoadedEngine
from ..executor.overlap import KvBudget, NoRoom, kv_beside
from ..executor.request import Draining
from ..executor.trial import Extent
from ..lora import LoraRoom
from ..self_test import SelfTestFailed
from ..store.locate import locate
from ..store.policy import EngineRefused
from ..store.store import NotInStore, Store
from .served import ServedEngine
from .swap_outcome import NotServing, OtherTokenizer
from .tokenizer_archive import tokenizer_archive

if TYPE_CHECKING:
    from ..executor.loading import EngineOptions
    from .context import ServerContext

Phase = Literal["idle", "checking", "loading"]
Kind = Literal["recorded", "smoke", "returned", "none"]
MAX_HISTORY = 100


@dataclass(frozen=True)
class SwapRequest:
    """engine        name, or start of a hash, in the server's store; None: `steps` engines back
    if_serving    only if this engine, by its whole hash, is the current one
    kv_cache_tokens, host_kv_tokens  None: as the server's first engine had, or what part of it fits
    allow_other_tokenizer  clients that send token ids must know the new ones
    """

    engine: str | None
    steps: int = 1
    if_serving: str | None = None
    kv_cache_tokens: int | None = None
    host_kv_tokens: int | None = None
    allow_other_tokenizer: bool = False


@dataclass(frozen=True)
class SwapReport:
    """before, after   hashes; equal if nothing had to be done
    tried           how the engine was tried out: against its record, without one, not at all as it was still loaded
    wait_s          for swaps that came before; load_s: from there until the engine was ready; trial_s: part of load_s
    kv_cache_tokens, wanted_kv_tokens  what it got, and what the first engine had
    num_finishing   requests that the old engine still has
    """

    before: str
    after: str
    tried: Kind = "none"
    wait_s: float = 0.0
    load_s: float = 0.0
    trial_s: float = 0.0
    kv_cache_tokens: int = 0
    wanted_kv_tokens: int = 0
    num_finishing: int = 0


class Swapper:
    """Belongs to the context's loop.

    phase, loading  what it does now, and with which engine (its hash)
    history         hashes of the engines that have served, the latest last, no two equal ones in a row
    last_error      of the last swap that failed; "" if none has
    """

    def __init__(self, context: ServerContext, options: EngineOptions, budget: KvBudget,
                 load: Callable[[str, EngineOptions, Extent], LoadedEngine] = LoadedEngine,
                 available_bytes: Callable[[EngineFile, str | None], int] = free_bytes) -> None:
        """available_bytes: of the device that an engine would run on, see free_bytes."""
        self.phase: Phase = "idle"
        self.loading = ""
        self.history = [context.current.hash]
        self.last_error = ""
        self._context = context
        self._options = options
        self._budget = budget
        self._load = load
        self._available_bytes = available_bytes
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[SwapReport]] = set()

    async def swap(self, request: SwapRequest) -> SwapReport:
        """Once begun it goes on to its end, even if whoever asked leaves.

        Raises RequestError (NotInStore, EngineRefused, OtherTokenizer, NotServing, …), Draining, NoRoom,
        SelfTestFailed, WorkFailed: then the current engine is what it was.
        """
        task = asyncio.ensure_future(self._in_turn(request, time.monotonic()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _in_turn(self, request: SwapRequest, asked_at: float) -> SwapReport:
        async with self._turn:
            wait_s = time.monotonic() - asked_at
            try:
                report = replace(await self._swap(request), wait_s=wait_s)
            except Exception as error:
                self._context.swaps[_result(error)] += 1
                self.last_error = f"{type(error).__name__}: {error}"
                _say(f"{self._context.current.hash[:12]} stays: {self.last_error}")
                if isinstance(error, IngotError):
                    raise
                raise WorkFailed(f"the engine cannot be loaded: {self.last_error}") from error
            finally:
                self.phase, self.loading = "idle", ""
        self._context.swaps["unchanged" if report.before == report.after else "done"] += 1
        return report

    async def _swap(self, request: SwapRequest) -> SwapReport:
        begin, current = time.monotonic(), self._context.current
        self._check_state(request)
        self.phase = "checking"
        store = Store(self._options.store)
        new_hash = await asyncio.to_thread(store.resolve, self._reference(request))
        self.loading = new_hash
        has_sizes = (request.kv_cache_tokens, request.host_kv_tokens) != (None, None)
        if new_hash == current.hash and current.engine.health == "serving" and not has_sizes:
            return SwapReport(current.hash, new_hash)
        async with self._context.adapters.changing:
            returned = not has_sizes and self._return(new_hash)
        if returned:
            report = SwapReport(current.hash, new_hash, "returned")
        else:
            report = await self._load_anew(new_hash, request)
        num_finishing = len(current.engine.request_ids)
        if new_hash != self.history[-1]:
            self.history = [*self.history[1 - MAX_HISTORY :], new_hash]
        report = replace(report, load_s=time.monotonic() - begin, num_finishing=num_finishing)
        _say(_told(report))
        return report

    async def _load_anew(self, new_hash: str, request: SwapRequest) -> SwapReport:
        """An engine that is not loaded takes over."""
        options = await asyncio.to_thread(self._checked, new_hash, request)
        self.phase = "loading"
        # What has served here is the same to the last bit: a rollback must be quick.
        extent: Extent = "brief" if new_hash in self.history else "full"
        loaded = await asyncio.to_thread(self._load, new_hash, options, extent)
        engine, trial = ServedEngine.of(loaded), loaded.trial
        wanted = request.kv_cache_tokens or self._budget.tokens(loaded.file.manifest)[0]
        report = SwapReport(self._context.current.hash, new_hash,
                            "none" if trial is None else "recorded" if trial.recorded else "smoke",
                            trial_s=0.0 if trial is None else trial.seconds,
                            kv_cache_tokens=loaded.facts()["kv_cache_tokens"], wanted_kv_tokens=wanted)
        del loaded  # the context alone decides how long it lives
        async with self._context.adapters.changing:
            try:
                await asyncio.to_thread(self._context.adapters.carry_over, engine)
                if self._context.is_draining:
                    self._check_state(request)
            except BaseException:
                await asyncio.to_thread(engine.close)
                raise
            self._context.take_over(engine)
        return report

    def _check_state(self, request: SwapRequest) -> None:
        if self._context.is_draining:
            raise Draining("the server drains: no other engine takes over any more")
        current = self._context.current.hash
        if request.if_serving is not None and request.if_serving != current:
            raise NotServing(f"the server serves {current}, not {request.if_serving}; nothing was changed")

    def _reference(self, request: SwapRequest) -> str:
        if request.engine is not None:
            return request.engine
        if not 1 <= request.steps < len(self.history):
            raise RequestError(f"cannot go back {request.steps} engines: this server has had {len(self.history) - 1} "
                               "before the current one.\n  Name the engine, by its hash or a name of the store.")
        return self.history[-1 - request.steps]

    def _return(self, new_hash: str) -> bool:
        """Has the engine of this hash take over if it is still loaded, because it finishes old requests. At once: it
        could be freed while something is waited for."""
        engine = next((engine for engine in self._context.finishing
                       if engine.hash == new_hash and self._context.can_return(engine)), None)
        if engine is None:
            return False
        self._context.adapters.carry_over(engine)
        self._context.take_over(engine)
        return True

    def _checked(self, new_hash: str, request: SwapRequest) -> EngineOptions:
        """On a thread: what can be said before anything is loaded; the options to load it with."""
        located = locate(new_hash, self._options.store)
        with located.open() as file:
            self._options.policy.check(file, located.attestations)
            if not request.allow_other_tokenizer:
                _require_same_tokenizer(self._context.current.file, file)
            self._context.adapters.check_room(LoraRoom.of(file.manifest), f"engine {new_hash[:12]}")
            wanted, host = self._budget.tokens(file.manifest)
            least = self._budget.min_fraction
            if request.kv_cache_tokens is not None:
                wanted, least = request.kv_cache_tokens, 1.0
            if request.host_kv_tokens is not None:
                host = request.host_kv_tokens
            device = self._options.device
            in_host = host if device_of(file, device)[0] != "cuda" else 0  # on a GPU the host tier takes other memory
            tokens = kv_beside(file.manifest, wanted, in_host, least, f"engine {new_hash[:12]}",
                               lambda: self._available_bytes(file, device))
        return replace(self._options, kv_cache_tokens=tokens, host_kv_tokens=host, host_cache_fraction=None)


def _require_same_tokenizer(current: EngineFile, new: EngineFile) -> None:
    if tokenizer_archive(current) != tokenizer_archive(new):
        raise OtherTokenizer(
            f"engine {new.hash} has another tokenizer than {current.hash}: clients and gateways that send token ids "
            "would be understood wrongly.\n  If they know, say so: --allow-other-tokenizer")


def _result(error: Exception) -> str:
    match error:
        case NoRoom():
            return "no_room"
        case SelfTestFailed():
            return "self_test_failed"
        case RequestError() | Draining() | NotInStore() | EngineRefused():
            return "refused"
        case _:
            return "failed"


def _told(report: SwapReport) -> str:
    tried = {"recorded": "gave the answers of its build", "smoke": "tried out, without a record of its build",
             "returned": "was still loaded", "none": "not tried out"}[report.tried]
    less = ""
    if report.kv_cache_tokens < report.wanted_kv_tokens:
        less = f"; its KV cache has {report.kv_cache_tokens:,} tokens of the {report.wanted_kv_tokens:,} wanted"
    return (f"{report.after[:12]} has taken over from {report.before[:12]} after {report.load_s:.2f} s ({tried}); "
            f"{report.num_finishing} requests finish on the old one{less}")


def _say(text: str) -> None:
    print(f"ingot: engine {text}", file=sys.stderr, flush=True)
