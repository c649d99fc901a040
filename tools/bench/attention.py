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

import numpy as np

from ingot.compiler.cpu.isa import ISAS, host_isa
from ingot.plugins.attention.cpu import Attention, attention, attention_combine, scratch_bytes
from ingot.plugins.kernel import CpuKernel
from ingot.runtime.devices.native_code import Step
from tools.bench.machine import Machine

_BLOCK_SIZE = 16
_COLD_BYTES = 64 << 20
_ROUNDS = 5
_ELEMENT_BYTES = {"bf16": 2, "f32": 4, "i8": 1}


def one_sequence(context: int, new: int, blocks: int) -> tuple[Step, list[np.ndarray]]:
    """A step, and the arrays that it points to, the last of them its block table."""
    positions = np.arange(context - new, context, dtype=np.int32)
    table = np.random.default_rng(0).permutation(blocks).astype(np.int32)
    arrays = [positions, np.zeros(new, np.int32), np.array([0, new], np.int32), np.array([context], np.int32), table]
    names = ("positions", "token_seq", "query_start", "context_len")
    pointers = {name: array.ctypes.data for name, array in zip(names, arrays, strict=False)}
    return Step(num_tokens=new, num_seqs=1, max_blocks=blocks, **pointers), arrays


def layer_bytes(p: Attention) -> int:
    """Of one layer in a block: keys with their scales, then values likewise, both of the same size."""
    rows = p.kv_heads * _BLOCK_SIZE
    return 2 * rows * (p.key_dim * _ELEMENT_BYTES[p.kv_dtype] + (4 if p.kv_dtype == "i8" else 0))


def parts_of(p: Attention, cache: np.ndarray, layer: int) -> list[np.ndarray | None]:
    """Keys, values and the scales of both of one layer in `cache` u8 [blocks, block_bytes]."""
    half = layer_bytes(p) // 2
    begin = layer * layer_bytes(p)
    scale = p.kv_heads * _BLOCK_SIZE * p.key_dim if p.kv_dtype == "i8" else None
    scales = [None if scale is None else cache[:, at + scale:] for at in (begin, begin + half)]
    return [cache[:, begin:], cache[:, begin + half:], *scales]


def filled(p: Attention, blocks: int, rng: np.random.Generator) -> np.ndarray:
    """Blocks of plausible keys and values, u8 [blocks, block_bytes]."""
    bits = rng.integers(0x3E80, 0x3F80, (blocks, p.block_bytes // 2), dtype=np.uint16)
    cache: np.ndarray = bits.view(np.uint8)
    if p.kv_dtype == "i8":  # scales are float32 of about 2^-6
        for layer in range(p.block_bytes // layer_bytes(p)):
            for scales in parts_of(p, cache, layer)[2:]:
                assert scales is not None
                scales[:, :4 * p.kv_heads * _BLOCK_SIZE].view(np.float32)[...] = 0.02
    return cache


def launches_of(p: Attention, context: int, new: int) -> tuple[Step, list[tuple[CpuKernel, list[np.ndarray | None]]]]:
    """A step of one sequence, for as many layers as take _COLD_BYTES, or for one if it computes more tokens."""
    rng, size = np.random.default_rng(0), context * layer_bytes(p) // _BLOCK_SIZE
    count = max(1, _COLD_BYTES // size) if new == 1 else 1
    layers, blocks = p.block_bytes // layer_bytes(p), -(-context // _BLOCK_SIZE)
    step, alive = one_sequence(context, new, blocks)
    q, out = (rng.normal(size=(new, p.q_heads, dim)).astype(np.float32) for dim in (p.key_dim, p.value_dim))
    scratch = np.empty(scratch_bytes(p, new, 1), np.uint8)
    caches = [filled(p, blocks, rng) for _ in range(-(-count // layers))]
    launches: list[tuple[CpuKernel, list[np.ndarray | None]]] = []
    for i in range(count):
        cache = parts_of(p, caches[i // layers], i % layers)
        launches += [(attention(p), [q, *cache, alive[-1], None, scratch, out]),
                     (attention_combine(p), [scratch, None, None, out])]
    launches[0][1].extend(alive)  # what the step points to lives as long as the launches do
    return step, launches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--isa", choices=sorted(ISAS), default=host_isa().name)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--shape", nargs="*", default=["9x3x64", "32x8x128", "4x1x256"], help="Hq x Hkv x D")
    parser.add_argument("--kv", nargs="*", choices=sorted(_ELEMENT_BYTES), default=["bf16"], help="element types")
    parser.add_argument("--context", nargs="*", type=int, default=[512])
    parser.add_argument("--generation", nargs="*", type=int, default=[2000])
    parser.add_argument("--layers", type=int, default=30)
    options = parser.parse_args()
    cases = []
    for shape in options.shape:
        hq, hkv, dim = map(int, shape.split("x"))
        for kv in options.kv:
            layer = layer_bytes(Attention(hq, hkv, dim, dim, _BLOCK_SIZE, 64, 1.0, kv_dtype=kv))
            cases.append(Attention(hq, hkv, dim, dim, _BLOCK_SIZE, options.layers * layer, dim ** -0.5, kv_dtype=kv))
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
    runs = [launches_of(p, context, new) for p in group]
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
            size = context * layer_bytes(p) // _BLOCK_SIZE
            what = f"{size / best / 1e9:7.1f} GB/s    {size / best / read:4.0%} of read"
        print(f"{'context   ' if new > 1 else 'generation'} {name:9} {p.kv_dtype:4} {context:5} tokens "
              f"{best * 1e6:9.1f} us {what}{beside}", flush=True)


if __name__ == "__main__":
    main()
