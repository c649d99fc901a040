"""A server that follows a lock file: what its name means there is what it serves."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import IngotError, RequestError
from ..executor.overlap import NoRoom
from ..executor.request import Draining
from ..store.lock_file import LockError, LockFile
from ..store.store import NotInStore
from .swap import SwapRequest

if TYPE_CHECKING:
    from .context import ServerContext
    from .swap import Swapper

RETRY_S = 10.0
"""Between attempts that may succeed later although the file stays: the engine is neither in the store nor where it
comes from yet, or does not fit beside one that still finishes."""


class Follower:
    """Reads the file every `interval_s` seconds; a whole file, for it is small, and times and sizes of files are not to
    be relied on everywhere. What is wrong with it is told once, and counted."""

    def __init__(self, context: ServerContext, swapper: Swapper, lock: LockFile, name: str, interval_s: float = 1.0,
                 fetch: Callable[[str], None] | None = None, retry_s: float = RETRY_S) -> None:
        """fetch: gets an engine, by its hash, into the store; called on a thread where it is missing there."""
        self._context = context
        self._swapper = swapper
        self._lock = lock
        self._name = name
        self._interval_s = interval_s
        self._fetch = fetch
        self._retry_s = retry_s
        self._done: str | None = context.current.hash  # what was last seen and dealt with, for good or ill
        self._retry_at = 0.0
        self._problem = ""

    async def run(self) -> None:
        """Until cancelled, or the server drains."""
        while not self._context.is_draining:
            await self.look()
            await asyncio.sleep(self._interval_s)

    async def look(self) -> None:
        """Once: another engine takes over if the file says so."""
        try:
            wanted = await asyncio.to_thread(self._read)
        except RequestError as error:
            self._tell_bad(str(error))
            return
        if wanted == self._done:
            self._problem = ""
            return
        if self._problem and time.monotonic() < self._retry_at:
            return
        try:
            if self._fetch is not None and wanted != self._context.current.hash:
                await asyncio.to_thread(self._fetch, wanted)
        except IngotError as error:
            self._tell_later(error)
            return
        try:
            await self._swapper.swap(SwapRequest(wanted))
        except Draining:
            return
        except (NotInStore, NoRoom) as error:
            self._tell_later(error)
        except IngotError as error:
            self._done = wanted
            self._tell(str(error))
        else:
            self._done, self._problem = wanted, ""

    def _read(self) -> str:
        """Raises LockError."""
        move = self._lock.now().get(self._name)
        if move is None:
            raise LockError(f"{self._lock.path} has no engine named {self._name} any more")
        return move.hash

    def _tell_later(self, error: IngotError) -> None:
        self._retry_at = time.monotonic() + self._retry_s
        self._tell(f"{error}\n  It is tried again every {self._retry_s:g} s.")

    def _tell_bad(self, problem: str) -> None:
        if problem != self._problem:
            self._context.swaps["bad_lock"] += 1
        self._tell(problem)

    def _tell(self, problem: str) -> None:
        """Once for each problem."""
        if problem != self._problem:
            self._problem = problem
            with contextlib.suppress(OSError):
                print(f"ingot: {self._lock.path}: {problem}\n  The engine {self._context.current.hash[:12]} goes on.",
                      file=sys.stderr, flush=True)
