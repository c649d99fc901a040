"""Kernels on worker threads, timed; and what this machine can do at most: read memory, multiply."""
from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from ingot.compiler.cpu.isa import ISAS
from ingot.compiler.cpu.toolchain import compile_shared
from ingot.plugins.kernel import INCLUDE_DIR, CpuKernel, translation_unit
from ingot.runtime.devices.native_code import Launch, Step

_READ_BYTES = 256 << 20
_REPEATS = 9
_PEAK_STEPS = 1 << 20

_READ = CpuKernel("read_memory", "cpu/simd.h", """\
vf sums[4] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};
const float *from = args[0];
int begin, end;
ingot_split(step->num_tokens, worker, num_workers, &begin, &end);
for (size_t i = (size_t)begin * 1024; i < (size_t)end * 1024; i += 4 * VF_LANES)
    for (int j = 0; j < 4; j++) sums[j] = vf_max(sums[j], vf_load(from + i + j * VF_LANES));
((float *)args[1])[worker * 16] = vf_hmax(vf_max(vf_max(sums[0], sums[1]), vf_max(sums[2], sums[3])));""")
"""step->num_tokens pages of 4 KiB."""

_LANES = CpuKernel("lanes", "cpu/simd.h", "*(int32_t *)args[0] = VF_LANES;")

_STEPS = {"float": "vf_fma(a, b, sums[j])", "int8": "vi_step_i8(sums[j], a, sums[j])",
          "w4a8": "vi_step_u4(sums[j], a, sums[j])"}
"""The instruction, or the few, that multiply and add on registers: a vector of float32, or of four bytes a lane."""


def _peak(kind: str) -> CpuKernel:
    vector = "vf" if kind == "float" else "vi"
    return CpuKernel(f"peak_{kind}", "linear/integer_vectors.h", f"""\
{vector} sums[12], a, b;
memcpy(&a, args[0], sizeof a);
memcpy(&b, args[0], sizeof b);
for (int j = 0; j < 12; j++) sums[j] = a;
for (int i = 0; i < step->num_tokens; i++) {{
    INGOT_UNROLL for (int j = 0; j < 12; j++) sums[j] = {_STEPS[kind]};
}}
memcpy((char *)args[1] + 1024 * worker, sums, sizeof sums);""")


class Machine:
    """Times are the shortest of a few runs: whatever else the machine does can only lengthen them."""

    def __init__(self, kernels: Iterable[CpuKernel], isa: str, workers: int, folder: str) -> None:
        self._peaks = {kind: _peak(kind) for kind in _STEPS}
        text = translation_unit([*kernels, _READ, _LANES, *self._peaks.values()])
        path = Path(folder, "bench.so")
        compile_shared({"pool.c": (INCLUDE_DIR / "cpu/pool.c").read_text(), "kernels.c": text}, ISAS[isa],
                       [INCLUDE_DIR, INCLUDE_DIR / "cpu"], path, jobs=2)
        self._workers = workers
        self._library = ctypes.CDLL(str(path))
        self._library.ingot_pool_create.restype = ctypes.c_void_p
        self._pool = ctypes.c_void_p(self._library.ingot_pool_create(workers))

    def seconds(self, kernel: CpuKernel, arguments: Sequence[Sequence[np.ndarray]], step: Step) -> float:
        """One run through launches of one kernel with these arguments, one after the other."""
        address = ctypes.cast(getattr(self._library, kernel.symbol), ctypes.c_void_p)
        pointers = [(ctypes.c_void_p * len(each))(*(a.ctypes.data for a in each)) for each in arguments]
        launches = (Launch * len(pointers))(*(Launch(address, ctypes.addressof(p)) for p in pointers))
        times = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            self._library.ingot_run(self._pool, ctypes.byref(step), launches, 0, len(launches))
            times.append(time.perf_counter() - start)
        return min(times)

    def read_bytes(self) -> float:
        """A second, by all workers together."""
        memory, out = np.ones(_READ_BYTES // 4, np.float32), np.zeros(16 * self._workers, np.float32)
        return memory.nbytes / self.seconds(_READ, [(memory, out)], Step(num_tokens=memory.nbytes // 4096))

    def multiply_adds(self, kind: str) -> float:
        """A second, by all workers together, on registers; kind: "float", "int8" or "w4a8"."""
        lanes, out = np.zeros(1, np.int32), np.zeros(1024 * self._workers, np.uint8)
        self.seconds(_LANES, [(lanes,)], Step(num_tokens=1))
        seconds = self.seconds(self._peaks[kind], [(np.zeros(64, np.uint8), out)], Step(num_tokens=_PEAK_STEPS))
        return 12 * _PEAK_STEPS * int(lanes[0]) * (1 if kind == "float" else 4) * self._workers / seconds

    def close(self) -> None:
        self._library.ingot_pool_destroy(self._pool)


def aligned(size_bytes: int) -> np.ndarray:
    """Bytes at a multiple of 64, as all buffers of an engine lie."""
    raw = np.zeros(size_bytes + 128, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start:start + size_bytes]
