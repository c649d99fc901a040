"""The GPUs of one engine, one for each rank: their contexts, which reach each other's memory, and what the kernels by
which they exchange values need (gpu_collective.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import permutations
from threading import RLock
from time import sleep
from typing import TYPE_CHECKING

import numpy as np

from ..errors import RequestError, WorkFailed
from .cuda_driver import CudaError, Driver, GpuInfo, reaches
from .cuda_memory import Bytes, CudaContext
from .gpu_collective import GIVEN_UP, peer_table

if TYPE_CHECKING:
    from .cuda_rank import CudaRank

_enabled: Counter[tuple[int, int, int]] = Counter()
"""How many engines of this process use the access of one GPU to another: a server loads the next one beside the first.
"""
_lock = RLock()  # an engine that nobody holds any more may be closed at any time, by any thread
_turn = RLock()
"""Held by the engine on several GPUs that launches a step."""
_launched: list[CudaGroup] = []
"""Those whose step may still run."""

_POLL_S = 2e-5
"""Where several GPUs are at work each is asked again and again: if one fails, the others' kernels would wait for it."""


class NoPeerAccess(RequestError):
    """Two GPUs cannot read each other's memory."""


def check_peers(driver: Driver, gpus: Sequence[GpuInfo]) -> None:
    """Raises NoPeerAccess that names the pairs of GPUs that do not reach each other."""
    apart = [f"cuda:{one.ordinal} ({one.name}) does not reach the memory of cuda:{other.ordinal} ({other.name})"
             for one, other in permutations(gpus, 2) if not reaches(driver, one, other)]
    if apart:
        listed = "\n  ".join(apart)
        raise NoPeerAccess(
            f"the GPUs of an engine read each other's memory, and some of these cannot:\n  {listed}\n"
            "  Choose others (--device cuda:0,1; `ingot doctor` tells which reach which). Within a virtual machine, an "
            "IOMMU or the machine's settings may be in the way; most GeForce cards cannot.")


class CudaGroup:
    """contexts: in the order of the ranks. Everything that is taken through them is released by `close`.

    ranks: what runs there, once it is loaded.
    """

    def __init__(self, driver: Driver, gpus: Sequence[GpuInfo]) -> None:
        """gpus: reach each other (check_peers). Raises CudaError; then nothing is held."""
        self._driver = driver
        self.contexts: list[CudaContext] = []
        self._enabled: list[tuple[CudaContext, CudaContext]] = []
        self._signals: list[int] = []
        self._rescue: list[object] = []
        """A stream on each GPU, beside the one whose kernels may wait for a signal that does not come."""
        self.ranks: Sequence[CudaRank] = ()
        self._has_given_up = False
        try:
            for gpu in gpus:
                self.contexts.append(CudaContext(driver, gpu))
            for one, other in permutations(self.contexts, 2):
                self._enable(one, other)
        except BaseException:
            self.close()
            raise

    def connect(self, arenas: Sequence[int], signal_bytes: int) -> list[int]:
        """Signals for all ranks, and tables by which their kernels find each other: the address of each rank's table.

        arenas: the address of each rank's. Raises CudaError, WorkFailed.
        """
        for context, _ in zip(self.contexts, arenas, strict=True):
            context.enter()
            self._signals.append(context.allocate(signal_bytes))
            context.clear(self._signals[-1], signal_bytes)
            flags = self._driver.enum("CUstream_flags", "CU_STREAM_NON_BLOCKING")
            self._rescue.append(context.own(self._driver.call("cuStreamCreate", flags), "cuStreamDestroy"))
        self._given_up: Bytes = self.contexts[-1].pinned(signal_bytes, "signals between GPUs")
        self._given_up.fill(GIVEN_UP)
        tables = []
        for rank, context in enumerate(self.contexts):
            context.enter()
            table = peer_table(rank, arenas, self._signals).view(np.uint8)
            tables.append(context.allocate(table.size))
            context.write(tables[-1], table)
        return tables

    @contextmanager
    def launching(self) -> Iterator[None]:
        """While a step is launched. On several GPUs steps of the engines of this process follow each other, whichever
        thread launches them: blocks of two would wait for each other's room, those of one on this GPU, those of the
        other on that.

        Raises WorkFailed after `give_up`: kernels that no longer wait for each other would give wrong numbers.
        """
        if len(self.contexts) == 1:
            yield
            return
        if self._has_given_up:
            raise WorkFailed("a step of this engine, which is divided among GPUs, was broken off: it takes no others.\n"
                             "  Load the engine again.")
        with _turn:
            for other in [other for other in _launched if other is not self and self._meets(other)]:
                try:
                    other.watch()
                except CudaError:  # told to whoever waits for that step
                    other.give_up()
                _launched.remove(other)
            if self not in _launched:
                _launched.append(self)
            yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """If one GPU fails, kernels on the others no longer wait for it."""
        try:
            yield
        except BaseException:
            self.give_up()
            raise

    def is_pending(self) -> bool:
        """Whether the step may still run on any GPU. Raises CudaError, if one has failed, whatever the others do."""
        pending = [rank.is_pending() for rank in self.ranks]
        return any(pending)

    def watch(self) -> None:
        """Until the step has ended. One GPU's end is the driver's to wait for, several are asked."""
        if len(self.ranks) == 1:
            self.ranks[0].wait()
            return
        while self.is_pending():
            sleep(_POLL_S)

    def give_up(self) -> None:
        """Lets kernels go on that wait for a rank: what they compute then is nothing. For when one GPU has failed, or
        the host no longer waits. No other step can begin."""
        self._has_given_up = True
        for context, address, stream in zip(self.contexts, self._signals, self._rescue, strict=False):  # one has none
            with suppress(CudaError):  # the one that has failed
                context.enter()
                self._driver.call("cuMemcpyHtoDAsync", address, int(self._given_up.ctypes.data), self._given_up.size,
                                  stream)
                self._driver.call("cuStreamSynchronize", stream)

    def close(self) -> None:
        """Gives everything back when all GPUs have come to rest; further calls do nothing."""
        for context in self.contexts:
            with suppress(CudaError):
                context.enter()
                context.synchronize()
        with _turn:
            if self in _launched:
                _launched.remove(self)
        while self._enabled:
            self._disable(*self._enabled.pop())
        for context in reversed(self.contexts):
            context.close()

    def _meets(self, other: CudaGroup) -> bool:
        """Whether both run on one GPU."""
        return not {context.gpu.ordinal for context in self.contexts}.isdisjoint(
            context.gpu.ordinal for context in other.contexts)

    def _enable(self, one: CudaContext, other: CudaContext) -> None:
        key = self._key(one, other)
        one.enter()
        with _lock:
            if not _enabled[key]:
                try:
                    self._driver.call("cuCtxEnablePeerAccess", other.handle, 0)
                except CudaError as error:
                    if error.name != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":  # by others of the process, who keep it
                        raise
                    return
            _enabled[key] += 1
            self._enabled.append((one, other))

    def _disable(self, one: CudaContext, other: CudaContext) -> None:
        key = self._key(one, other)
        with _lock, suppress(CudaError):
            _enabled[key] -= 1
            if not _enabled[key]:
                one.enter()
                self._driver.call("cuCtxDisablePeerAccess", other.handle)

    def _key(self, one: CudaContext, other: CudaContext) -> tuple[int, int, int]:
        return id(self._driver.api), one.gpu.ordinal, other.gpu.ordinal
