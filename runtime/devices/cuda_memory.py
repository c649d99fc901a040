"""Memory of a GPU and pinned memory of the host: what was taken is given back, once, whatever happens in between."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import WorkFailed
from .cuda_driver import CudaError, Driver, GpuInfo

ALIGNMENT = 256
"""Of what shares an allocation; cuMemAlloc aligns to as much."""

# Two pinned buffers: one is filled from the file while the other travels. Long enough to hide what a copy costs to
# start, short enough to be filled from cache.
STAGING_BYTES = 16 << 20

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes by what they are for, in the order in which they are told; kv_bytes_per_sequence: of the longest one."""

    parts: tuple[tuple[str, int], ...]
    kv_bytes_per_sequence: int

    @property
    def total(self) -> int:
        return sum(size for _, size in self.parts)

    def error(self, gpu: GpuInfo, free: int, why: str) -> WorkFailed:
        """The sum, against what there is."""
        rows = [*self.parts, ("together", self.total), ("free on the GPU now", free),
                ("the GPU in all", gpu.memory_bytes), ("KV of one sequence of full length", self.kv_bytes_per_sequence)]
        width = max(len(name) for name, _ in rows)
        table = "\n".join(f"  {name:<{width}}  {size / 2**30:9.3f} GiB" for name, size in rows)
        return WorkFailed(
            f"not enough memory on cuda:{gpu.ordinal} ({gpu.name}): {why}\n{table}\n  Free memory on the GPU, ask for "
            "less KV cache (--kv-cache-tokens), or use an engine of lower precision or smaller limits.")


class CudaContext:
    """The primary context of a GPU, with one stream: what this device and others of the process (torch's) share.
    handle: the driver's.

    Everything that is taken through it is released by `close`, the last first, after the stream has come to rest.
    """

    def __init__(self, driver: Driver, gpu: GpuInfo) -> None:
        self.driver, self.gpu = driver, gpu
        self._owned = ExitStack()
        device = driver.call("cuDeviceGet", gpu.ordinal)
        self.handle = driver.call("cuDevicePrimaryCtxRetain", device)
        self._release_later("cuDevicePrimaryCtxRelease", device)
        try:
            self.enter()
            # Work of others on the default stream is not waited for.
            flags = driver.enum("CUstream_flags", "CU_STREAM_NON_BLOCKING")
            self.stream = driver.call("cuStreamCreate", flags)
        except BaseException:
            self.close()
            raise
        self._release_later("cuStreamDestroy", self.stream)

    def enter(self) -> None:
        """Makes the context current for this thread."""
        self.driver.call("cuCtxSetCurrent", self.handle)

    def synchronize(self) -> None:
        self.driver.call("cuStreamSynchronize", self.stream)

    def close(self) -> None:
        """Gives everything back; further calls do nothing. A device that has failed refuses, and then frees all by
        itself at the end of the process: such errors are not told again."""
        with suppress(CudaError):
            self.enter()
            if hasattr(self, "stream"):
                self.synchronize()
        self._owned.close()

    def _release_later(self, function: str, *args: Any) -> None:
        def release() -> None:
            with suppress(CudaError):
                self.driver.call(function, *args)

        self._owned.callback(release)

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """What is taken inside is released at the end of the block, not by `close`."""
        outer, self._owned = self._owned, ExitStack()
        try:
            yield
        finally:
            inner, self._owned = self._owned, outer
            with suppress(CudaError):  # what failed inside has left copies on their way
                self.synchronize()
            inner.close()

    def own(self, handle: Any, destroy: str) -> Any:
        """`handle`, which close() gives to the function `destroy`."""
        self._release_later(destroy, handle)
        return handle

    def free_bytes(self) -> int:
        free, _ = self.driver.call("cuMemGetInfo")
        return int(free)

    def allocate(self, size: int) -> int:
        """The address of so many bytes of the GPU, not cleared; 0 bytes take the room of some. Raises CudaError."""
        address = self.driver.call("cuMemAlloc", max(size, ALIGNMENT))
        self._release_later("cuMemFree", address)
        return int(address)

    def clear(self, address: int, size: int) -> None:
        """Zeroes, in the stream's order."""
        if size:
            self.driver.call("cuMemsetD8Async", address, 0, size, self.stream)

    def pinned(self, size: int, what: str) -> Bytes:
        """u8 [size], zeroed memory of the host that the GPU reads and writes while the host does something else."""
        try:
            address = int(self.driver.call("cuMemHostAlloc", max(size, ALIGNMENT), 0))
        except CudaError as error:
            raise WorkFailed(f"no pinned memory for {what}: {size} bytes are refused ({error})") from None
        self._release_later("cuMemFreeHost", address)
        ctypes.memset(address, 0, max(size, ALIGNMENT))
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    def event(self, timed: bool = False) -> Any:
        flags = "CU_EVENT_DEFAULT" if timed else "CU_EVENT_DISABLE_TIMING"
        return self.own(self.driver.call("cuEventCreate", self.driver.enum("CUevent_flags", flags)), "cuEventDestroy")

    def record(self, event: Any) -> None:
        self.driver.call("cuEventRecord", event, self.stream)

    def to_device(self, address: int, source: int, size: int) -> None:
        """Starts a copy from pinned memory."""
        self.driver.call("cuMemcpyHtoDAsync", address, source, size, self.stream)

    def to_host(self, destination: int, address: int, size: int) -> None:
        """Starts a copy to pinned memory."""
        self.driver.call("cuMemcpyDtoHAsync", destination, address, size, self.stream)

    def write(self, address: int, data: Bytes) -> None:
        """Copies any memory of the host to the GPU; done when this returns."""
        if data.size:
            self.driver.call("cuMemcpyHtoD", address, data.ctypes.data, data.size)
            # From memory that is not pinned it may still be on its way, and the stream does not wait for that.
            self.driver.call("cuCtxSynchronize")

    def read(self, address: int, size: int) -> Bytes:
        """A copy of memory of the GPU, after all that is in the stream."""
        self.synchronize()
        data = np.empty(size, np.uint8)
        if size:
            self.driver.call("cuMemcpyDtoH", data.ctypes.data, address, size)
        return data


def free_of(driver: Driver, gpu: GpuInfo) -> int:
    """Bytes of a GPU's memory that are free now."""
    context = CudaContext(driver, gpu)
    try:
        return context.free_bytes()
    finally:
        context.close()


def upload(context: CudaContext, pieces: Iterator[tuple[int, Bytes]],
           progress: Callable[[int], None] = lambda size: None) -> None:
    """Copies (address, u8 array) pairs to the GPU through two pinned buffers, so that a file is read while what was
    read before travels; no more than the two buffers are held. Returns when all is there."""
    with context.temporary():
        buffers = [context.pinned(STAGING_BYTES, "loading weights") for _ in range(2)]
        sent = [context.event() for _ in buffers]
        turn = 0
        for address, data in pieces:
            for begin in range(0, data.size, STAGING_BYTES):
                part = data[begin : begin + STAGING_BYTES]
                buffer, event = buffers[turn % 2], sent[turn % 2]
                if turn >= 2:
                    context.driver.call("cuEventSynchronize", event)
                np.copyto(buffer[: part.size], part)
                context.to_device(address + begin, int(buffer.ctypes.data), part.size)
                context.record(event)
                progress(part.size)
                turn += 1
        context.synchronize()
