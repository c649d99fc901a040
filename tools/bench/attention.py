"""Speed of the attention kernels on this machine, beside its arithmetic and its memory in the same run.

    python -m tools.bench.attention [--isa NAME] [--workers 2] [--shape 9x3x64] [--context 512] [--generation 2000]
                                    [--layers 30]

Context: one sequence of so many tokens, causal; share of the fused multiply-adds that the cores can do at most.
Generation: one token after so many, bfloat16 keys and values, 64 MB of them one after the other as the layers of a
model are, so that they come from memory; GB/s of keys and values. A block of the cache holds all layers.
"""
from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from ingot.compiler.cpu.isa import ISAS, host_isa
from ingot.compiler.cpu.toolchain import compile_shared
from ingot.plugins.attention.cpu import Attention, attention, attention_combine, scratch_bytes
from ingot.plugins.kernel import INCLUDE_DIR, CpuKernel, translation_unit
from ingot.runtime.devices.native_code import Launch, Step

_BLOCK_SIZE = 16
_COLD_BYTES = 64 << 20
_REPEATS = 9

_MULTIPLY_ADD = CpuKernel("multiply_add", "cpu/gemm.h", """\
vf sum[12];
for (int i = 0; i < 12; i++) sum[i] = vf_set1((float)i);
const vf factor = vf_set1(0.5f), term = vf_set1(1.0f);
for (int n = 0; n < step->num_tokens; n++) {
    INGOT_UNROLL
    for (int i = 0; i < 12; i++) sum[i] = vf_fma(sum[i], factor, term);
}
for (int i = 1; i < 12; i++) sum[0] = sum[0] + sum[i];
((float *)args[0])[worker * 16] = vf_hsum(sum[0]);""")
_LANES = CpuKernel("lanes", "cpu/simd.h", "((int *)args[0])[worker * 16] = VF_LANES;")
_READ = CpuKernel("read_memory", "cpu/simd.h", """\
vf sum[4] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};
const float *from = args[0];
int begin, end;
ingot_split(step->num_tokens, worker, num_workers, &begin, &end);
for (size_t i = (size_t)begin * 1024; i < (size_t)end * 1024; i += 4 * VF_LANES)
    for (int j = 0; j < 4; j++) sum[j] = sum[j] + vf_load(from + i + j * VF_LANES);
((float *)args[1])[worker * 16] = vf_hsum(sum[0] + sum[1] + sum[2] + sum[3]);""")
"""step->num_tokens pages of 4 KiB."""


class Machine:
    """The kernels, compiled, and worker threads to run them."""

    def __init__(self, kernels: list[CpuKernel], isa: str, workers: int, folder: str) -> None:
        sources = {"pool.c": (INCLUDE_DIR / "cpu/pool.c").read_text(), "kernels.c": translation_unit(kernels)}
        path = Path(folder, "bench.so")
        compile_shared(sources, ISAS[isa], [INCLUDE_DIR, INCLUDE_DIR / "cpu"], path)
        self.workers = workers
        self._library = ctypes.CDLL(str(path))
        self._library.ingot_pool_create.restype = ctypes.c_void_p
        self._pool = ctypes.c_void_p(self._library.ingot_pool_create(workers))

    def seconds(self, step: Step, launches: list[tuple[CpuKernel, list[np.ndarray | None]]]) -> float:
        """Median time of the launches, one after the other."""
        pointers = [(ctypes.c_void_p * len(args))(*(None if a is None else a.ctypes.data for a in args))
                    for _, args in launches]
        table = (Launch * len(launches))(*(
            Launch(ctypes.cast(getattr(self._library, kernel.symbol), ctypes.c_void_p), ctypes.addressof(p))
            for (kernel, _), p in zip(launches, pointers, strict=True)))
        times = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            self._library.ingot_run(self._pool, ctypes.byref(step), table, 0, len(table))
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    def multiply_adds(self) -> float:
        """A second, of all workers together."""
        out, lanes, count = np.zeros(16 * self.workers, np.float32), np.zeros(16 * self.workers, np.int32), 1 << 21
        self.seconds(Step(num_tokens=1), [(_LANES, [lanes])])
        seconds = self.seconds(Step(num_tokens=count), [(_MULTIPLY_ADD, [out])])
        return 12 * count * int(lanes[0]) * self.workers / seconds

    def read_bytes(self) -> float:
        """A second, of all workers together."""
        memory, out = np.ones(_COLD_BYTES // 2, np.float32), np.zeros(16 * self.workers, np.float32)
        return memory.nbytes / self.seconds(Step(num_tokens=memory.nbytes // 4096), [(_READ, [memory, out])])


def one_sequence(context: int, new: int, blocks: int) -> tuple[Step, list[np.ndarray]]:
    """A step, and the arrays that it points to, the last of them its block table."""
    positions = np.arange(context - new, context, dtype=np.int32)
    table = np.random.default_rng(0).permutation(blocks).astype(np.int32)
    arrays = [positions, np.zeros(new, np.int32), np.array([0, new], np.int32), np.array([context], np.int32), table]
    names = ("positions", "token_seq", "query_start", "context_len")
    pointers = {name: array.ctypes.data for name, array in zip(names, arrays, strict=False)}
    return Step(num_tokens=new, num_seqs=1, max_blocks=blocks, **pointers), arrays


def layer_bytes(p: Attention) -> int:
    """Of one layer in a block: keys, then values of the same size, bfloat16."""
    return p.kv_heads * _BLOCK_SIZE * (p.key_dim + p.value_dim) * 2


def measure(machine: Machine, problem: Attention, context: int, new: int, count: int) -> float:
    """Seconds of one of `count` layers, of as many sequences as it takes, that run one after the other."""
    p, rng = problem, np.random.default_rng(0)
    layers = p.block_bytes // layer_bytes(p)
    blocks = -(-context // _BLOCK_SIZE)
    step, alive = one_sequence(context, new, blocks)
    q, out = (rng.normal(size=(new, p.q_heads, dim)).astype(np.float32) for dim in (p.key_dim, p.value_dim))
    scratch = np.empty(scratch_bytes(p, new, 1), np.uint8)
    shape = -(-count // layers), blocks, layers, 2, layer_bytes(p) // 4
    cache = rng.integers(0x3E80, 0x3F80, shape, dtype=np.uint16)
    launches: list[tuple[CpuKernel, list[np.ndarray | None]]] = []
    for i in range(count):
        k, v = (cache[i // layers, :, i % layers, part] for part in range(2))
        launches += [(attention(p), [q, k, v, alive[-1], None, scratch, out]),
                     (attention_combine(p), [scratch, None, None, out])]
    seconds = machine.seconds(step, launches) / count
    del alive
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--isa", choices=sorted(ISAS), default=host_isa().name)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--shape", nargs="*", default=["9x3x64", "32x8x128", "4x1x256"], help="Hq x Hkv x D")
    parser.add_argument("--context", nargs="*", type=int, default=[512])
    parser.add_argument("--generation", nargs="*", type=int, default=[2000])
    parser.add_argument("--layers", type=int, default=30)
    options = parser.parse_args()
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shape]
    problems = [Attention(hq, hkv, dim, dim, _BLOCK_SIZE, options.layers * hkv * _BLOCK_SIZE * dim * 4, dim ** -0.5)
                for hq, hkv, dim in shapes]
    kernels = [kernel(p) for p in problems for kernel in (attention, attention_combine)]
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine([*kernels, _MULTIPLY_ADD, _LANES, _READ], options.isa, options.workers, folder)
        peak, read = machine.multiply_adds(), machine.read_bytes()
        print(f"{options.isa}, {options.workers} workers: {2 * peak / 1e9:.0f} GFLOP/s, "
              f"reading memory {read / 1e9:.1f} GB/s")
        for p in problems:
            name = f"{p.q_heads}x{p.kv_heads}x{p.key_dim}"
            for context in options.context:
                seconds = measure(machine, p, context, context, 1)
                done = context * (context + 1) / 2 * p.q_heads * (p.key_dim + p.value_dim)
                print(f"context    {name:9} {context:5} tokens {seconds * 1e6:9.1f} us {2 * done / seconds / 1e9:7.1f} "
                      f"GFLOP/s {done / seconds / peak:4.0%} of peak", flush=True)
            for context in options.generation:
                size = context * p.kv_heads * (p.key_dim + p.value_dim) * 2
                seconds = measure(machine, p, context, 1, max(1, _COLD_BYTES // size))
                print(f"generation {name:9} {context:5} tokens {seconds * 1e6:9.1f} us {size / seconds / 1e9:7.1f} "
                      f"GB/s    {size / seconds / read:4.0%} of read", flush=True)


if __name__ == "__main__":
    main()
