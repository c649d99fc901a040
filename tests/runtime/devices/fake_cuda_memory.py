"""Memory, streams and events of the fake CUDA driver."""
from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda.bindings import driver as real

_CANARY = 4096
STEP_MS = 10.0
"""What everything takes by the clock of events."""


class Refused(Exception):
    """A status other than success, by its name."""


@dataclass
class Region:
    memory: np.ndarray
    begin: int
    size: int


@dataclass
class Event:
    timed: bool
    pending: int = 0
    at_ms: float | None = None


class FakeMemory:
    """queue: what stands in the stream, (what it is, what it does). time_ms: moves on with everything done.

    device_memory, pinned_memory: address -> what was allocated and is not freed.
    """

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.device_memory: dict[int, Region] = {}
        self.pinned_memory: dict[int, Region] = {}
        self.queue: deque[tuple[str, Callable[[], None]]] = deque()
        self._arriving: list[Callable[[], None]] = []
        self.time_ms = 0.0
        self._held: dict[str, dict[int, Any]] = {}
        self._sticky: str | None = None
        self._next = 1000

    def assert_nothing_held(self) -> None:
        held = {kind: len(entries) for kind, entries in self._held.items() if entries}
        held |= {"device memory": len(self.device_memory)} if self.device_memory else {}
        held |= {"pinned memory": len(self.pinned_memory)} if self.pinned_memory else {}
        assert not held, f"still held: {held}"

    def forget(self) -> None:
        """After a fault the context is lost, and with it all that was taken: nothing can be given back."""
        assert self._sticky, "nothing has failed"
        self._held.clear()
        self.device_memory.clear()
        self.pinned_memory.clear()

    # Handles

    def _new(self, kind: str, value: Any) -> Any:
        self._next += 1
        self._held.setdefault(kind, {})[self._next] = value
        return getattr(real, kind)(self._next)

    def _get(self, kind: str, handle: Any) -> Any:
        assert isinstance(handle, getattr(real, kind)), f"expected {kind}, got {handle!r}"
        entries = self._held.get(kind, {})
        assert int(handle) in entries, f"{kind} {int(handle)} was destroyed or never made"
        return entries[int(handle)]

    def _destroy(self, kind: str, handle: Any) -> None:
        self._get(kind, handle)
        assert not (self.queue and kind in ("CUstream", "CUevent", "CUmodule", "CUgraphExec")), \
            f"{kind} is destroyed while the stream is at work"
        del self._held[kind][int(handle)]

    # Memory

    def _cuMemGetInfo(self) -> tuple[int, int]:
        used = sum(region.size for region in self.device_memory.values())
        return self.memory_bytes - used, self.memory_bytes

    def _allocate(self, regions: dict[int, Region], size: int) -> int:
        assert size > 0
        memory = np.full(size + _CANARY + 512, 0xFF, np.uint8)
        begin = -(-int(memory.ctypes.data) // 512) * 512
        regions[begin] = Region(memory, begin, size)
        memory[begin - memory.ctypes.data + size:] = 0xA5
        return begin

    def _release(self, regions: dict[int, Region], address: Any) -> None:
        assert not self.queue, "memory is freed while the stream is at work"
        region = regions.pop(int(address), None)
        assert region is not None, f"{int(address):#x} is freed twice, or was never allocated"
        behind = region.memory[region.begin - region.memory.ctypes.data + region.size:]
        assert (behind == 0xA5).all(), f"something wrote behind {region.size} bytes"

    def _cuMemAlloc(self, size: int) -> Any:
        if size > self._cuMemGetInfo()[0]:
            raise Refused("CUDA_ERROR_OUT_OF_MEMORY")
        return real.CUdeviceptr(self._allocate(self.device_memory, size))

    def _cuMemFree(self, address: Any) -> None:
        self._release(self.device_memory, address)

    def _cuMemHostAlloc(self, size: int, flags: int) -> int:
        assert flags == 0
        return self._allocate(self.pinned_memory, size)

    def _cuMemFreeHost(self, address: Any) -> None:
        self._release(self.pinned_memory, address)

    @staticmethod
    def _inside(regions: Mapping[int, Region], address: int, size: int) -> bool:
        return any(region.begin <= address and address + size <= region.begin + region.size
                   for region in regions.values())

    def _device(self, address: Any, size: int) -> int:
        assert self._inside(self.device_memory, int(address), size), f"{size} bytes at {int(address):#x}: no GPU memory"
        return int(address)

    def _pinned(self, address: Any, size: int) -> int:
        assert self._inside(self.pinned_memory, int(address), size), \
            f"{size} bytes at {int(address):#x}: an asynchronous copy needs pinned memory"
        return int(address)

    def _put(self, stream: Any, what: str, work: Callable[[], None]) -> None:
        self._get("CUstream", stream)
        self.queue.append((what, work))

    def _copy_later(self, stream: Any, destination: int, source: int, size: int) -> None:
        assert size > 0
        self._put(stream, "copy", lambda: _moved(destination, source, size))

    def _cuMemcpyHtoDAsync(self, destination: Any, source: int, size: int, stream: Any) -> None:
        self._copy_later(stream, self._device(destination, size), self._pinned(source, size), size)

    def _cuMemcpyDtoHAsync(self, destination: int, source: Any, size: int, stream: Any) -> None:
        self._copy_later(stream, self._pinned(destination, size), self._device(source, size), size)

    def _cuMemcpyDtoDAsync(self, destination: Any, source: Any, size: int, stream: Any) -> None:
        to, origin = self._device(destination, size), self._device(source, size)
        assert abs(to - origin) >= size, "the two overlap"
        self._copy_later(stream, to, origin, size)

    def _cuMemcpyDtoH(self, destination: int, source: Any, size: int) -> None:
        assert not self.queue, "the stream, which waits for nobody, may still write what is read here"
        ctypes.memmove(destination, self._device(source, size), size)

    def _cuMemcpyHtoD(self, destination: Any, source: int, size: int) -> None:
        """Of memory that is not pinned: it has left the host when this returns, and arrives some time later."""
        place, data = self._device(destination, size), ctypes.string_at(source, size)
        self._arriving.append(lambda: _moved(place, data, size))

    def _cuCtxSynchronize(self) -> None:
        for arrive in self._arriving:
            arrive()
        self._arriving.clear()
        self._work()

    def _cuMemsetD8Async(self, address: Any, value: int, size: int, stream: Any) -> None:
        place = self._device(address, size)
        self._put(stream, "memset", lambda: _filled(place, value, size))

    # Streams and events

    def _cuStreamCreate(self, flags: Any) -> Any:
        assert flags == real.CUstream_flags.CU_STREAM_NON_BLOCKING
        return self._new("CUstream", None)

    def _cuStreamDestroy(self, stream: Any) -> None:
        self._destroy("CUstream", stream)

    def _work(self, until: Callable[[], bool] = lambda: False) -> None:
        while self.queue and not until():
            _, work = self.queue.popleft()
            self.time_ms += STEP_MS
            try:
                work()
            except Refused as refusal:
                self._sticky = str(refusal)
                self.queue.clear()
                raise

    def _cuStreamSynchronize(self, stream: Any) -> None:
        self._get("CUstream", stream)
        self._work()

    def _cuEventCreate(self, flags: Any) -> Any:
        return self._new("CUevent", Event(flags == real.CUevent_flags.CU_EVENT_DEFAULT))

    def _cuEventDestroy(self, event: Any) -> None:
        self._destroy("CUevent", event)

    def _mark(self, event: Event) -> None:
        event.pending -= 1
        event.at_ms = self.time_ms

    def _cuEventRecord(self, event: Any, stream: Any) -> None:
        found = self._get("CUevent", event)
        found.pending += 1
        self._put(stream, "event", lambda: self._mark(found))

    def _cuEventQuery(self, event: Any) -> None:
        if self._get("CUevent", event).pending:
            raise Refused("CUDA_ERROR_NOT_READY")

    def _cuEventSynchronize(self, event: Any) -> None:
        found = self._get("CUevent", event)
        self._work(lambda: not found.pending)

    def _cuEventElapsedTime(self, begin: Any, end: Any) -> float:
        first, second = self._get("CUevent", begin), self._get("CUevent", end)
        if not (first.timed and second.timed) or first.at_ms is None or second.at_ms is None:
            raise Refused("CUDA_ERROR_INVALID_HANDLE")
        if first.pending or second.pending:
            raise Refused("CUDA_ERROR_NOT_READY")
        return float(second.at_ms - first.at_ms)


def _moved(to: int, origin: int | bytes, size: int) -> None:
    ctypes.memmove(to, origin, size)


def _filled(to: int, value: int, size: int) -> None:
    ctypes.memset(to, value, size)
