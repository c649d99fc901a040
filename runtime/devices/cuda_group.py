"""The GPUs of one engine, one for each rank: their contexts, which reach each other's memory, and what the kernels by
which they exchange values need (gpu_collective.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import permutations
from threading import Lock

import numpy as np

from ..errors import RequestError, WorkFailed
from .cuda_driver import CudaError, Driver, GpuInfo, reaches
from .cuda_memory import Bytes, CudaContext
from .gpu_collective import GIVEN_UP, peer_table

_enabled: Counter[tuple[int, int, int]] = Counter()
"""How many engines of this process use the access of one GPU to another: a server loads the next one beside the first.
"""
_lock = Lock()
_turn = Lock()
"""Of engines on several GPUs: held by the one whose step runs. Blocks of two would wait for each other's room, those of
one on this GPU, those of the other on that."""


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
    """contexts: in the order of the ranks. Everything that is taken through them is released by `close`."""

    def __init__(self, driver: Driver, gpus: Sequence[GpuInfo]) -> None:
        """gpus: reach each other (check_peers). Raises CudaError; then nothing is held."""
        self._driver = driver
        self.contexts: list[CudaContext] = []
        self._enabled: list[tuple[CudaContext, CudaContext]] = []
        self._signals: list[int] = []
        self._rescue: list[object] = []
        """A stream on each GPU, beside the one whose kernels may wait for a signal that does not come."""
        self._has_turn = self._has_given_up = False
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

    def begin_step(self) -> None:
        """Waits until no other engine of this process runs a step on several GPUs, if this is one that does.

        Raises WorkFailed after `give_up`: kernels that no longer wait for each other would give wrong numbers.
        """
        if len(self.contexts) > 1:
            if self._has_given_up:
                raise WorkFailed("a step of this engine, which is divided among GPUs, was broken off: it takes no "
                                 "others.\n  Load the engine again.")
            _turn.acquire()
            self._has_turn = True

    def end_step(self) -> None:
        """Lets others begin; nothing if no step has begun."""
        if self._has_turn:
            self._has_turn = False
            _turn.release()

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
        self.end_step()
        while self._enabled:
            self._disable(*self._enabled.pop())
        for context in reversed(self.contexts):
            context.close()

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
