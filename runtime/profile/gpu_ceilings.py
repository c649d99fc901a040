"""What a GPU can do at most, as far as the driver alone can tell: how fast its memory is."""

from __future__ import annotations

from ..devices.cuda_driver import find_gpu, load_driver
from ..devices.cuda_memory import CudaContext
from .ceilings import Ceilings

_MOST_BYTES = 2 << 30
_SHARE = 8
"""Of the free memory, what one of the two buffers takes at most."""
_REPEATS = 6


def measure_gpu_ceilings(ordinal: int) -> Ceilings:
    """Bytes that a large copy within the GPU's memory reads and writes a second; of operations nothing is known: no
    kernel that only multiplies comes with an engine. Raises NoGpu, CudaError."""
    driver = load_driver()
    context = CudaContext(driver, find_gpu(driver, ordinal))
    try:
        size = min(_MOST_BYTES, context.free_bytes() // _SHARE)
        source, target = context.allocate(size), context.allocate(size)
        context.clear(source, size)
        begin, end = context.event(timed=True), context.event(timed=True)
        best_ms = float("inf")
        for _ in range(_REPEATS):
            context.record(begin)
            driver.call("cuMemcpyDtoDAsync", target, source, size, context.stream)
            context.record(end)
            context.synchronize()
            best_ms = min(best_ms, float(driver.call("cuEventElapsedTime", begin, end)))
        return Ceilings(2 * size / (1e-3 * best_ms), {})
    finally:
        context.close()
