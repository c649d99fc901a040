"""What a kernel is timed on: launches over memory as an engine has it.

With few tokens weights, and keys and values, come from memory that no cache holds; with many they stay in the caches.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ingot.plugins.attention.cpu import Attention, attention, attention_combine, scratch_bytes
from ingot.plugins.kernel import CpuKernel
from ingot.plugins.linear import cpu as linear_cpu
from ingot.plugins.linear.pack import packed_size
from ingot.plugins.quantize.reference import row_bytes
from ingot.runtime.devices.native_code import Step

from .machine import aligned

BLOCK_SIZE = 16
ELEMENT_BYTES = {"bf16": 2, "f32": 4, "i8": 1}
_FEW_TOKENS = 8

Launches = list[tuple[CpuKernel, Sequence[np.ndarray | None]]]


class Memory:
    """Weights for matrices, as much as `cold_bytes` and shared by all of them: what they hold does not matter."""

    def __init__(self, cold_bytes: int) -> None:
        self.cold_bytes = cold_bytes
        self._bytes = aligned(0)

    def of(self, size_bytes: int) -> np.ndarray:
        if self._bytes.size < size_bytes:
            self._bytes = aligned(size_bytes)
            self._bytes[:] = np.resize(np.random.default_rng(0).integers(0, 60, 4099, dtype=np.uint8), size_bytes)
        return self._bytes


def linear_launches(problem: linear_cpu.Problem, tokens: int, memory: Memory) -> tuple[Step, Launches]:
    """One launch, or up to 8 tokens so many that each reads its weights from memory."""
    n, k, scheme = problem.n, problem.k, problem.scheme
    size = packed_size(n, k, scheme)
    count = max(1, memory.cold_bytes // size) if tokens <= _FEW_TOKENS else 1
    weights = memory.of(size * count)
    rounded = scheme.rounds_inputs and not problem.float_input
    x = aligned(row_bytes(k, scheme) * tokens if rounded else 4 * (problem.x_stride or k) * tokens)
    y = aligned(4 * n * tokens)
    extra = [aligned(4 * n + 64)] * problem.bias + [y] * problem.residual
    kernel = linear_cpu.emit(problem)
    step = Step(num_tokens=tokens, num_logits=tokens)
    return step, [(kernel, (x, weights[size * i:], y, *extra)) for i in range(count)]


def layer_bytes(p: Attention) -> int:
    """Of one layer in a block: keys with their scales, then values likewise."""
    return sum(part_bytes(p))


def part_bytes(p: Attention) -> tuple[int, int]:
    rows, element = p.kv_heads * BLOCK_SIZE, ELEMENT_BYTES[p.kv_dtype]
    scales = 4 * rows if p.kv_dtype == "i8" else 0
    key, value = (-(-rows * dim * element // 64) * 64 + scales for dim in (p.key_dim, p.value_dim))
    return key, value


def attention_launches(p: Attention, context: int, new: int, cold_bytes: int,
                       num_seqs: int = 1) -> tuple[Step, Launches]:
    """A step of sequences with `new` tokens each at their ends: for so many layers that single tokens read their keys
    and values from memory, or for one. p.block_bytes: a multiple of layer_bytes(p)."""
    rng = np.random.default_rng(0)
    blocks, tokens = -(-context // BLOCK_SIZE), num_seqs * new
    size = num_seqs * context * layer_bytes(p) // BLOCK_SIZE
    count, layers = max(1, cold_bytes // size) if new == 1 else 1, p.block_bytes // layer_bytes(p)
    q, out = (rng.normal(size=(tokens, p.q_heads * dim)).astype(np.float32) for dim in (p.key_dim, p.value_dim))
    scratch = np.empty(scratch_bytes(p, tokens, num_seqs), np.uint8)
    caches = [_filled(p, num_seqs * blocks, rng) for _ in range(-(-count // layers))]
    step, table, alive = _step(context, new, blocks, num_seqs)
    launches: Launches = []
    for i in range(count):
        cache = _parts(p, caches[i // layers], i % layers)
        launches += [(attention(p), (q, *cache, table, None, scratch, out, *alive)),
                     (attention_combine(p), (scratch, None, None, out))]
    return step, launches


def _step(context: int, new: int, blocks: int, num_seqs: int) -> tuple[Step, np.ndarray, list[np.ndarray]]:
    """A step, its block table, and the arrays that the step points to, which must live as long."""
    table = np.random.default_rng(0).permutation(num_seqs * blocks).astype(np.int32)
    arrays = {"positions": np.tile(np.arange(context - new, context, dtype=np.int32), num_seqs),
              "token_seq": np.repeat(np.arange(num_seqs, dtype=np.int32), new),
              "query_start": np.arange(num_seqs + 1, dtype=np.int32) * np.int32(new),
              "context_len": np.full(num_seqs, context, np.int32)}
    pointers = {name: array.ctypes.data for name, array in arrays.items()}
    step = Step(num_tokens=num_seqs * new, num_seqs=num_seqs, max_blocks=blocks, **pointers)
    return step, table, list(arrays.values())


def _parts(p: Attention, cache: np.ndarray, layer: int) -> list[np.ndarray | None]:
    """Keys, values and the scales of both of one layer in `cache` u8 [blocks, block_bytes]."""
    key, value = part_bytes(p)
    begin = layer * (key + value)
    if p.kv_dtype != "i8":
        return [cache[:, begin:], cache[:, begin + key:], None, None]
    scales = 4 * p.kv_heads * BLOCK_SIZE
    ends = begin + key - scales, begin + key + value - scales
    return [cache[:, begin:], cache[:, begin + key:], *(cache[:, end:] for end in ends)]


def _filled(p: Attention, blocks: int, rng: np.random.Generator) -> np.ndarray:
    """Blocks of plausible keys and values, u8 [blocks, block_bytes]."""
    cache: np.ndarray = rng.integers(0x3E80, 0x3F80, (blocks, p.block_bytes // 2), dtype=np.uint16).view(np.uint8)
    for layer in range(p.block_bytes // layer_bytes(p)):
        for scales in _parts(p, cache, layer)[2:]:
            if scales is not None:
                scales[:, :4 * p.kv_heads * BLOCK_SIZE].view(np.float32)[...] = 0.02
    return cache
