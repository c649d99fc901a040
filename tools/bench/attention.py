"""Speed of the attention kernels on this machine, beside its arithmetic and its memory in the same run.

    python -m tools.bench.attention [--isa NAME] [--workers 2] [--shape 9x3x64] [--context 512] [--generation 2000]
                                    [--kv bf16 i8] [--layers 30]

Context: one sequence of so many tokens, causal; share of the fused multiply-adds that the cores can do at most.
Generation: one token after so many, 64 MB of keys and values one after the other as the layers of a model are, so that
they come from memory; GB/s of keys and values. A block of the cache holds all layers.
Of several element types of the cache, each is measured in turn, round by round; behind the time of each stands the
ratio to the first.
"""
from __future__ import annotations

import argparse
import tempfile

from ingot.compiler.cpu.isa import ISAS, host_isa
from ingot.compiler.tune.machine import Machine
from ingot.compiler.tune.workloads import BLOCK_SIZE, ELEMENT_BYTES, attention_launches, layer_bytes
from ingot.plugins.attention.cpu import Attention, attention, attention_combine

_COLD_BYTES = 64 << 20
_ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--isa", choices=sorted(ISAS), default=host_isa().name)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--shape", nargs="*", default=["9x3x64", "32x8x128", "4x1x256"], help="Hq x Hkv x D")
    parser.add_argument("--kv", nargs="*", choices=sorted(ELEMENT_BYTES), default=["bf16"], help="element types")
    parser.add_argument("--context", nargs="*", type=int, default=[512])
    parser.add_argument("--generation", nargs="*", type=int, default=[2000])
    parser.add_argument("--layers", type=int, default=30)
    options = parser.parse_args()
    cases = []
    for shape in options.shape:
        hq, hkv, dim = map(int, shape.split("x"))
        for kv in options.kv:
            layer = layer_bytes(Attention(hq, hkv, dim, dim, BLOCK_SIZE, 64, 1.0, kv_dtype=kv))
            cases.append(Attention(hq, hkv, dim, dim, BLOCK_SIZE, options.layers * layer, dim ** -0.5, kv_dtype=kv))
    with tempfile.TemporaryDirectory() as folder:
        kernels = [kernel(p) for p in cases for kernel in (attention, attention_combine)]
        machine = Machine(kernels, options.isa, options.workers, folder)
        peak, read = machine.multiply_adds("float"), machine.read_bytes()
        print(f"{options.isa}, {options.workers} workers: {2 * peak / 1e9:.0f} GFLOP/s, "
              f"reading memory {read / 1e9:.1f} GB/s")
        for start in range(0, len(cases), len(options.kv)):
            group = cases[start:start + len(options.kv)]
            for context in options.context:
                _report(machine, group, context, context, peak, read)
            for context in options.generation:
                _report(machine, group, context, 1, peak, read)
        machine.close()


def _report(machine: Machine, group: list[Attention], context: int, new: int, peak: float, read: float) -> None:
    """A line for each element type of one shape."""
    runs = [attention_launches(p, context, new, _COLD_BYTES) for p in group]
    times: list[list[float]] = [[] for _ in group]
    for _ in range(_ROUNDS):
        for (step, launches), seconds in zip(runs, times, strict=True):
            seconds.append(machine.seconds(launches, step) / (len(launches) // 2))
    for p, seconds in zip(group, times, strict=True):
        name = f"{p.q_heads}x{p.kv_heads}x{p.key_dim}"
        best = min(seconds)
        ratios = sorted(mine / first for mine, first in zip(seconds, times[0], strict=True))
        beside = "" if p is group[0] else (f"  {ratios[len(ratios) // 2]:.2f} x {group[0].kv_dtype} "
                                           f"({ratios[0]:.2f}-{ratios[-1]:.2f})")
        if new > 1:
            done = context * (context + 1) / 2 * p.q_heads * (p.key_dim + p.value_dim)
            what = f"{2 * done / best / 1e9:7.1f} GFLOP/s {done / best / peak:4.0%} of peak"
        else:
            size = context * layer_bytes(p) // BLOCK_SIZE
            what = f"{size / best / 1e9:7.1f} GB/s    {size / best / read:4.0%} of read"
        print(f"{'context   ' if new > 1 else 'generation'} {name:9} {p.kv_dtype:4} {context:5} tokens "
              f"{best * 1e6:9.1f} us {what}{beside}", flush=True)


if __name__ == "__main__":
    main()
