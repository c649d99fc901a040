"""Speed of the attention kernels on this machine, beside its arithmetic and its memory in the same run.

    python -m tools.bench.attention [--isa NAME ..] [--workers 2] [--shape 9x3x64] [--context 512] [--generation 2000]
                                    [--sequences 1 16] [--kv bf16 i8] [--layers 30]

Context: one sequence of so many tokens, causal; share of the float32 multiply-adds that the cores can do at most.
Generation: one token after so many in each of the sequences, 64 MB of keys and values one after the other as the layers
of a model are, so that they come from memory; GB/s of keys and values. A block of the cache holds all layers.
Of several instruction sets, or element types of the cache, each is measured in turn, round by round; behind the time of
each stands the ratio to the first.
"""
from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass

from ingot.compiler.cpu.isa import ISAS, host_isa
from ingot.compiler.tune.machine import Machine
from ingot.compiler.tune.workloads import BLOCK_SIZE, ELEMENT_BYTES, attention_launches, layer_bytes
from ingot.plugins.attention.cpu import Attention, attention, attention_combine

_COLD_BYTES = 64 << 20


@dataclass(frozen=True)
class Way:
    """One of those that are compared."""

    isa: str
    machine: Machine
    problem: Attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--isa", nargs="*", choices=sorted(ISAS), default=[host_isa().name])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--shape", nargs="*", default=["9x3x64", "32x8x128", "4x1x256"], help="Hq x Hkv x D")
    parser.add_argument("--kv", nargs="*", choices=sorted(ELEMENT_BYTES), default=["bf16"], help="element types")
    parser.add_argument("--context", nargs="*", type=int, default=[512])
    parser.add_argument("--generation", nargs="*", type=int, default=[2000])
    parser.add_argument("--sequences", nargs="*", type=int, default=[1], help="that generate in a step")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    problems = {shape: [_problem(shape, kv, options.layers) for kv in options.kv] for shape in options.shape}
    kernels = [kernel(p) for shape in problems.values() for p in shape for kernel in (attention, attention_combine)]
    with ExitStack() as stack:
        machines = {}
        for isa in options.isa:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            machines[isa] = Machine(kernels, isa, options.workers, folder)
            stack.callback(machines[isa].close)
        first = machines[options.isa[0]]
        peak, read = first.multiply_adds("float"), first.read_bytes()
        print(f"{', '.join(options.isa)}, {options.workers} workers: {2 * peak / 1e9:.0f} GFLOP/s, "
              f"reading memory {read / 1e9:.1f} GB/s")
        for shape in problems.values():
            ways = [Way(isa, machine, p) for isa, machine in machines.items() for p in shape]
            for context in options.context:
                _report(ways, context, context, 1, options.rounds, peak)
            for context in options.generation:
                for num_seqs in options.sequences:
                    _report(ways, context, 1, num_seqs, options.rounds, read)


def _problem(shape: str, kv: str, layers: int) -> Attention:
    hq, hkv, dim = map(int, shape.split("x"))
    layer = layer_bytes(Attention(hq, hkv, dim, dim, BLOCK_SIZE, 64, 1.0, kv_dtype=kv))
    return Attention(hq, hkv, dim, dim, BLOCK_SIZE, layers * layer, dim ** -0.5, kv_dtype=kv)


def _report(ways: list[Way], context: int, new: int, num_seqs: int, rounds: int, ceiling: float) -> None:
    """A line for each way of one shape. ceiling: multiply-adds a second of a context, bytes a second of one token."""
    runs = {p: attention_launches(p, context, new, _COLD_BYTES, num_seqs) for p in {way.problem for way in ways}}
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for way, seconds in zip(ways, times, strict=True):
            step, launches = runs[way.problem]
            seconds.append(way.machine.seconds(launches, step) / (len(launches) // 2))
    for way, seconds in zip(ways, times, strict=True):
        p, best = way.problem, min(seconds)
        ratios = sorted(mine / first for mine, first in zip(seconds, times[0], strict=True))
        beside = "" if way is ways[0] else f"  {ratios[len(ratios) // 2]:.2f} x ({ratios[0]:.2f}-{ratios[-1]:.2f})"
        if new > 1:
            done = context * (context + 1) / 2 * p.q_heads * (p.key_dim + p.value_dim)
            what = f"{2 * done / best / 1e9:7.1f} GFLOP/s {done / best / ceiling:4.0%} of peak"
        else:
            size = num_seqs * context * layer_bytes(p) // BLOCK_SIZE
            what = f"{size / best / 1e9:7.1f} GB/s    {size / best / ceiling:4.0%} of read"
        shape = f"{p.q_heads}x{p.kv_heads}x{p.key_dim}"
        print(f"{'context   ' if new > 1 else 'generation'} {shape:9} {p.kv_dtype:4} {way.isa:15} {num_seqs:3} x "
              f"{context:5} tokens {best * 1e6:9.1f} us {what}{beside}", flush=True)


if __name__ == "__main__":
    main()
