"""Memory, streams and events of the fake CUDA driver.

Work in a stream is done when somebody waits for it. Where streams of several devices have work, whoever waits lets each
of them go on in a thread of its own, since their kernels wait for each other; so does who asks for the third time.
"""
from __future__ import annotations

import ctypes
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cuda.bindings import driver as real

_CANARY = 4096
STEP_MS = 10.0
"""What everything takes by the clock of events."""


class Refused(Exception):
    """A status other than success, by its name."""


_LIMIT_S = 60.0
_PATIENCE = 3


@dataclass
class Region:
    memory: np.ndarray
    begin: int
    size: int
    device: int


@dataclass
class Stream:
    device: int
    queue: deque[tuple[str, Callable[[], None]]] = field(default_factory=deque)
    thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        return bool(self.queue) or (self.thread is not None and self.thread.is_alive())


@dataclass
class Event:
    timed: bool
    pending: int = 0
    at_ms: float | None = None
    device: int = 0
    asked: int = 0


class FakeMemory:
    """queue: what stands in the streams, (what it is, what it does). time_ms: moves on with everything done.

    memory_bytes: of each device. device_memory, pinned_memory: address -> what was allocated and is not freed.
    """

    def __init__(self, memory_bytes: int | tuple[int, ...]) -> None:
        self._sizes = memory_bytes
        self.device_memory: dict[int, Region] = {}
        self.pinned_memory: dict[int, Region] = {}
        self._arriving: list[Callable[[], None]] = []
        self.time_ms = 0.0
        self._held: dict[str, dict[int, Any]] = {}
        self._owners: dict[int, int] = {}
        self._sticky: dict[int, str] = {}
        self._next = 1000
        self._starting = threading.Lock()

    def here(self) -> int:
        """The device of the current context."""
        raise NotImplementedError

    def memory_of(self, device: int) -> int:
        return self._sizes if isinstance(self._sizes, int) else self._sizes[device]

    @property
    def streams(self) -> list[Stream]:
        return list(self._held.get("CUstream", {}).values())

    @property
    def queue(self) -> list[tuple[str, Callable[[], None]]]:
        return [work for stream in self.streams for work in stream.queue]

    def assert_nothing_held(self) -> None:
        held = {kind: len(entries) for kind, entries in self._held.items() if entries}
        held |= {"device memory": len(self.device_memory)} if self.device_memory else {}
        held |= {"pinned memory": len(self.pinned_memory)} if self.pinned_memory else {}
        assert not held, f"still held: {held}"

    def forget(self) -> None:
        """After a fault the context is lost, and with it all that was taken: nothing can be given back."""
        assert self._sticky, "nothing has failed"
        for entries in self._held.values():
            for handle in [handle for handle in entries if self._owners[handle] in self._sticky]:
                del entries[handle]
        for regions in (self.device_memory, self.pinned_memory):
            for address in [address for address, region in regions.items() if region.device in self._sticky]:
                del regions[address]

    # Handles

    def _new(self, kind: str, value: Any) -> Any:
        self._next += 1
        self._owners[self._next] = self.here()
        self._held.setdefault(kind, {})[self._next] = value
        return getattr(real, kind)(self._next)

    def _get(self, kind: str, handle: Any) -> Any:
        assert isinstance(handle, getattr(real, kind)), f"expected {kind}, got {handle!r}"
        entries = self._held.get(kind, {})
        assert int(handle) in entries, f"{kind} {int(handle)} was destroyed or never made"
        return entries[int(handle)]

    def _destroy(self, kind: str, handle: Any) -> None:
        self._get(kind, handle)
        assert not (self._works() and kind in ("CUstream", "CUevent", "CUmodule", "CUgraphExec")), \
            f"{kind} is destroyed while the stream is at work"
        del self._held[kind][int(handle)]

    def _works(self) -> bool:
        """Whether the device has something to do."""
        return any(stream.busy for stream in self.streams if stream.device == self.here())

    # Memory

    def _cuMemGetInfo(self) -> tuple[int, int]:
        used = sum(region.size for region in self.device_memory.values() if region.device == self.here())
        return self.memory_of(self.here()) - used, self.memory_of(self.here())

    def _allocate(self, regions: dict[int, Region], size: int) -> int:
        assert size > 0
        memory = np.full(size + _CANARY + 512, 0xFF, np.uint8)
        begin = -(-int(memory.ctypes.data) // 512) * 512
        regions[begin] = Region(memory, begin, size, self.here())
        memory[begin - memory.ctypes.data + size:] = 0xA5
        return begin

    def _release(self, regions: dict[int, Region], address: Any) -> None:
        assert not self._works(), "memory is freed while the stream is at work"
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
        mine = {begin: region for begin, region in self.device_memory.items() if region.device == self.here()}
        assert self._inside(mine, int(address), size), f"{size} bytes at {int(address):#x}: no memory of this GPU"
        return int(address)

    def _pinned(self, address: Any, size: int) -> int:
        assert self._inside(self.pinned_memory, int(address), size), \
            f"{size} bytes at {int(address):#x}: an asynchronous copy needs pinned memory"
        return int(address)

    def _put(self, stream: Any, what: str, work: Callable[[], None]) -> None:
        found = self._get("CUstream", stream)
        assert found.device == self.here(), "the stream of another GPU"
        found.queue.append((what, work))

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
        assert not self._works(), "the stream, which waits for nobody, may still write what is read here"
        ctypes.memmove(destination, self._device(source, size), size)

    def _cuMemcpyHtoD(self, destination: Any, source: int, size: int) -> None:
        """Of memory that is not pinned: it has left the host when this returns, and arrives some time later."""
        place, data = self._device(destination, size), ctypes.string_at(source, size)
        self._arriving.append(lambda: _moved(place, data, size))

    def _cuCtxSynchronize(self) -> None:
        for arrive in self._arriving:
            arrive()
        self._arriving.clear()
        for stream in self.streams:
            if stream.device == self.here():
                self._work(stream)

    def _cuMemsetD8Async(self, address: Any, value: int, size: int, stream: Any) -> None:
        place = self._device(address, size)
        self._put(stream, "memset", lambda: _filled(place, value, size))

    # Streams and events

    def _cuStreamCreate(self, flags: Any) -> Any:
        assert flags == real.CUstream_flags.CU_STREAM_NON_BLOCKING
        return self._new("CUstream", Stream(self.here()))

    def _cuStreamDestroy(self, stream: Any) -> None:
        self._destroy("CUstream", stream)

    def _work(self, stream: Stream, until: Callable[[], bool] = lambda: False) -> None:
        """Until all of the stream is done, or what is waited for."""
        if any(other.busy for other in self.streams if other.device != stream.device) or stream.thread is not None:
            self._start()
        if stream.thread is None:
            self._drain(stream, until)
        else:
            stream.thread.join(_LIMIT_S)
            assert not stream.thread.is_alive(), "GPUs wait for each other"
            stream.thread = None
        if stream.device in self._sticky:
            raise Refused(self._sticky[stream.device])

    def _start(self) -> None:
        """Lets every device go on."""
        sys.setswitchinterval(1e-4)
        with self._starting:
            for stream in self.streams:
                if stream.queue and (stream.thread is None or not stream.thread.is_alive()):
                    stream.thread = threading.Thread(target=self._drain, args=(stream, lambda: False), daemon=True)
                    stream.thread.start()

    def _drain(self, stream: Stream, until: Callable[[], bool]) -> None:
        while stream.queue and not until():
            _, work = stream.queue[0]
            self.time_ms += STEP_MS
            try:
                work()
            except Refused as refusal:
                self._sticky[stream.device] = str(refusal)
                stream.queue.clear()
                return
            stream.queue.popleft()

    def _cuStreamSynchronize(self, stream: Any) -> None:
        self._work(self._get("CUstream", stream))

    def _cuEventCreate(self, flags: Any) -> Any:
        return self._new("CUevent", Event(flags == real.CUevent_flags.CU_EVENT_DEFAULT, device=self.here()))

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
        found = self._get("CUevent", event)
        if found.device in self._sticky:
            raise Refused(self._sticky[found.device])
        if not found.pending:
            found.asked = 0
            return
        found.asked += 1
        if found.asked >= _PATIENCE and len({stream.device for stream in self.streams}) > 1:
            self._start()
        raise Refused("CUDA_ERROR_NOT_READY")

    def _cuEventSynchronize(self, event: Any) -> None:
        found = self._get("CUevent", event)
        for stream in self.streams:
            if stream.device == found.device and found.pending:
                self._work(stream, lambda: not found.pending)

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
