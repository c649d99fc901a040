"""Speed of the linear kernels on this machine, beside what its memory gives in the same run.

    python -m tools.bench.linear [--isa NAME] [--scheme w4a8] [--shape 1536x576] [--tokens 1 8 512] [--workers 2]

One line a case: microseconds, GB/s of weights (few tokens: the limit is the memory), GOP/s (many: the arithmetic).
The launches of a run go through different matrices, 256 MB of them for one token, so that no cache keeps them.
"""
from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ingot.compiler.cpu.isa import ISAS, host_isa
from ingot.compiler.cpu.toolchain import compile_shared
from ingot.plugins.kernel import INCLUDE_DIR, CpuKernel, translation_unit
from ingot.plugins.linear.cpu import Problem, emit
from ingot.plugins.linear.pack import packed_size
from ingot.plugins.quantize.reference import row_bytes
from ingot.plugins.scheme import SCHEMES, Scheme
from ingot.runtime.devices.native_code import Launch, Step

_COLD_BYTES = 256 << 20
_REPEATS = 7

_READ = CpuKernel("read_memory", "cpu/simd.h", """\
vf sums[4] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};
const float *from = args[0];
int begin, end;
ingot_split(step->num_tokens, worker, num_workers, &begin, &end);
for (size_t i = (size_t)begin * 1024; i < (size_t)end * 1024; i += 4 * VF_LANES)
    for (int j = 0; j < 4; j++) sums[j] = vf_max(sums[j], vf_load(from + i + j * VF_LANES));
((float *)args[1])[worker * 16] = vf_hmax(vf_max(vf_max(sums[0], sums[1]), vf_max(sums[2], sums[3])));""")
"""step->num_tokens pages of 4 KiB, read once."""


def aligned(size_bytes: int) -> np.ndarray:
    raw = np.zeros(size_bytes + 128, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start:start + size_bytes]


class Bench:
    def __init__(self, kernels: list[CpuKernel], isa: str, workers: int, folder: str) -> None:
        path = Path(folder, "bench.so")
        sources = {"pool.c": (INCLUDE_DIR / "cpu/pool.c").read_text(), "kernels.c": translation_unit(kernels)}
        compile_shared(sources, ISAS[isa], [INCLUDE_DIR, INCLUDE_DIR / "cpu"], path)
        self._library = ctypes.CDLL(str(path))
        self._library.ingot_pool_create.restype = ctypes.c_void_p
        self._pool = ctypes.c_void_p(self._library.ingot_pool_create(workers))

    def seconds(self, kernel: CpuKernel, arguments: Sequence[tuple[np.ndarray, ...]], tokens: int) -> float:
        """Median time of one run through a list of launches."""
        address = ctypes.cast(getattr(self._library, kernel.symbol), ctypes.c_void_p)
        pointers = [(ctypes.c_void_p * len(each))(*(a.ctypes.data for a in each)) for each in arguments]
        launches = (Launch * len(pointers))(*(Launch(address, ctypes.addressof(p)) for p in pointers))
        step = Step(num_tokens=tokens, num_logits=tokens)
        times = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            self._library.ingot_run(self._pool, ctypes.byref(step), launches, 0, len(launches))
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    def close(self) -> None:
        self._library.ingot_pool_destroy(self._pool)


def case(bench: Bench, problem: Problem, tokens: int, read_gb_s: float) -> str:
    n, k, scheme = problem.n, problem.k, problem.scheme
    size = packed_size(n, k, scheme)
    count = max(1, _COLD_BYTES // size) if tokens <= 8 else max(1, min(8, int(2e11 / (2 * n * k * tokens))))
    weights = aligned(size * count)
    weights[:] = np.resize(np.random.default_rng(0).integers(0, 60, 4099, dtype=np.uint8), weights.size)
    x, y = aligned(row_bytes(k, scheme) * tokens if scheme.is_integer else 4 * k * tokens), aligned(4 * n * tokens)
    launches = [(x, weights[size * i:], y) for i in range(count)]
    seconds = bench.seconds(emit(problem), launches, tokens) / count
    share = f"{size / seconds / 1e9 / read_gb_s:4.0%} of read" if tokens <= 8 else ""
    return (f"{scheme.tag:9} {n:6}x{k:<6} T={tokens:<4} {seconds * 1e6:9.1f} us {size / seconds / 1e9:7.1f} GB/s "
            f"{2 * n * k * tokens / seconds / 1e9:8.0f} GOP/s  {share}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--isa", choices=sorted(ISAS), default=host_isa().name)
    parser.add_argument("--scheme", nargs="*", default=list(SCHEMES))
    parser.add_argument("--act-group", type=int, help="activation group of the integer schemes")
    parser.add_argument("--shape", nargs="*", default=["3072x576", "576x1536", "4096x4096"], help="NxK")
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 8, 64, 512])
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    schemes = [SCHEMES[name] for name in options.scheme]
    if options.act_group is not None:
        schemes = [Scheme(s.name, s.weight_bits, s.act_bits, options.act_group) if s.is_integer else s for s in schemes]
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shape]
    problems = [(Problem(n, k, scheme, m), m) for scheme in schemes for n, k in shapes for m in options.tokens]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench([_READ, *(emit(problem) for problem, _ in problems)], options.isa, options.workers, folder)
        pages = np.ones(_COLD_BYTES // 4, np.float32)
        read = pages.nbytes / bench.seconds(_READ, [(pages, np.zeros(16 * options.workers, np.float32))],
                                            pages.nbytes // 4096) / 1e9
        print(f"{options.isa}, {options.workers} workers, reading memory: {read:.1f} GB/s")
        for problem, tokens in problems:
            print(case(bench, problem, tokens, read), flush=True)
        bench.close()


if __name__ == "__main__":
    main()
