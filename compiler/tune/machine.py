"""Kernels on worker threads, timed; and what this machine can do at most: read memory, multiply."""
from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from ingot.plugins.cpu.ceilings import CEILINGS, CHAINS, OUT_BYTES, READ_PIECE_BYTES
from ingot.plugins.kernel import INCLUDE_DIR, CpuKernel, translation_unit
from ingot.runtime import amx
from ingot.runtime.devices.native_code import Launch, Step

from ..cache.build_cache import BuildCache
from ..cpu.isa import ISAS
from ..cpu.toolchain import Compiler, compile_shared

KERNELS_A_FILE = 6

_READ_BYTES = 256 << 20
_REPEATS = 9
_PEAK_STEPS = 1 << 20


class Machine:
    """Times are the shortest of a few runs: whatever else the machine does can only lengthen them."""

    def __init__(self, kernels: Iterable[CpuKernel], isa: str, workers: int, folder: str | Path,
                 compiler: Compiler = "zig", cache: BuildCache | None = None) -> None:
        """Raises CompileError, NoCompiler; WorkFailed if the system refuses what the instruction set needs."""
        if amx.FEATURE in ISAS[isa].required:
            amx.request_tiles(f"code for {isa}")
        distinct = list(dict.fromkeys(kernels))
        files = {"pool.c": (INCLUDE_DIR / "cpu/pool.c").read_text(), "ceilings.c": translation_unit(CEILINGS.values())}
        for start in range(0, len(distinct), KERNELS_A_FILE):
            files[f"kernels{start}.c"] = translation_unit(distinct[start:start + KERNELS_A_FILE])
        path = Path(folder, "kernels.so")
        compile_shared(files, ISAS[isa], [INCLUDE_DIR, INCLUDE_DIR / "cpu"], path, compiler,
                       len(os.sched_getaffinity(0)), cache)
        self._workers = workers
        self._library = ctypes.CDLL(str(path))
        self._library.ingot_pool_create.restype = ctypes.c_void_p
        self._pool = ctypes.c_void_p(self._library.ingot_pool_create(workers))

    def seconds(self, launches: Sequence[tuple[CpuKernel, Sequence[np.ndarray | None]]], step: Step,
                repeats: int = _REPEATS) -> float:
        """One run through launches with these arguments, one after the other."""
        pointers = [(ctypes.c_void_p * len(args))(*(None if a is None else a.ctypes.data for a in args))
                    for _, args in launches]
        table = (Launch * len(launches))(*(
            Launch(ctypes.cast(getattr(self._library, kernel.symbol), ctypes.c_void_p), ctypes.addressof(p))
            for (kernel, _), p in zip(launches, pointers, strict=True)))
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            self._library.ingot_run(self._pool, ctypes.byref(step), table, 0, len(table))
            times.append(time.perf_counter() - start)
        return min(times)

    def read_bytes(self) -> float:
        """A second, by all workers together."""
        memory = np.ones(_READ_BYTES // 4, np.float32)
        step = Step(num_tokens=memory.nbytes // READ_PIECE_BYTES)
        return memory.nbytes / self.seconds([(CEILINGS["read"], (memory, self._out()))], step)

    def multiply_adds(self, kind: str) -> float:
        """A second, by all workers together, on registers; kind: "float", "int8" or "w4a8"."""
        zeros, products = np.zeros(64, np.uint8), np.zeros(1, np.int32)
        seconds = self.seconds([(CEILINGS[kind], (zeros, self._out(), products))], Step(num_tokens=_PEAK_STEPS))
        return CHAINS * _PEAK_STEPS * int(products[0]) * self._workers / seconds

    def _out(self) -> np.ndarray:
        return np.zeros(OUT_BYTES * self._workers, np.uint8)

    def close(self) -> None:
        self._library.ingot_pool_destroy(self._pool)


def aligned(size_bytes: int) -> np.ndarray:
    """Bytes at a multiple of 64, as all buffers of an engine lie."""
    raw = np.zeros(size_bytes + 128, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start:start + size_bytes]
