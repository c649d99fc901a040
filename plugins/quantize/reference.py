"""The meaning of rounded activations, to the bit."""
from __future__ import annotations

import numpy as np

from ..linear.pack import bf16_bits, to_float32
from ..scheme import BLOCK, Scheme

_SMALLEST_MAXIMUM = np.float32(2.0**-100)


def num_scales(k: int, scheme: Scheme) -> int:
    """Scales that the row of a token holds."""
    return 1 if scheme.weight_bits == 8 and scheme.act_group == 0 else -(-k // BLOCK)


def row_bytes(k: int, scheme: Scheme) -> int:
    """Bytes of one rounded token of k channels; quantize.h tells what they are."""
    if scheme.act_bits == 16:
        return (-(-2 * k // 64) | 1) * 64
    return -(-(-(-k // BLOCK) * BLOCK + 8 * num_scales(k, scheme)) // 64) * 64


def quantize_values(x: np.ndarray, scheme: Scheme) -> tuple[np.ndarray, np.ndarray]:
    """x float32 [T, K] -> q int8 [T, K32], scale float32 [T, K32 / BLOCK]; x is about scale * q."""
    k = x.shape[1]
    k32 = -(-k // BLOCK) * BLOCK
    span = scheme.act_group or k32
    padded = np.zeros((x.shape[0], -(-k // span) * span), np.float32)
    padded[:, :k] = x
    groups = padded.reshape(x.shape[0], -1, span)
    most = np.abs(groups).max(axis=2)
    finite, zero = np.isfinite(most), most < _SMALLEST_MAXIMUM
    scale = np.where(zero, np.float32(0), most / np.float32(127))
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(finite & ~zero, np.float32(127) / most, np.float32(0))
        values = np.where(finite[..., None], np.rint(groups * inverse[..., None]), 0)
    q = values.astype(np.int8).reshape(x.shape[0], -1)[:, :k32]
    return q, np.repeat(scale, span // BLOCK, axis=1)[:, :k32 // BLOCK]


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """Bits of bfloat16, to nearest even; subnormal numbers become zeros, as the instruction has it."""
    bits = bf16_bits(x)
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, bits & 0x8000, bits).astype(np.uint16)


def quantize(x: np.ndarray, scheme: Scheme) -> np.ndarray:
    """x float32 [T, K] -> uint8 [T, row_bytes]: the rows as the kernel writes them, padding zero."""
    if scheme.act_bits == 16:
        bits = np.zeros((x.shape[0], row_bytes(x.shape[1], scheme) // 2), np.uint16)
        bits[:, :x.shape[1]] = round_to_bf16(x)
        return bits.view(np.uint8)
    q, scale = quantize_values(x, scheme)
    sums = q.reshape(*scale.shape, BLOCK).sum(axis=2, dtype=np.int32)
    if num_scales(x.shape[1], scheme) == 1:
        scale, sums = scale[:, :1], sums.sum(axis=1, keepdims=True, dtype=np.int32)
    last = scale * sums.astype(np.float32) if scheme.weight_bits == 4 else -128 * sums
    rows = np.zeros((x.shape[0], row_bytes(x.shape[1], scheme)), np.uint8)
    parts = np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in (q, scale, last)], axis=1)
    rows[:, :parts.shape[1]] = parts
    return rows


def dequantize_rows(rows: np.ndarray, k: int, scheme: Scheme) -> np.ndarray:
    """uint8 [T, row_bytes] as `quantize` writes them -> float32 [T, K]: the values that they stand for."""
    if scheme.act_bits == 16:
        return to_float32(np.ascontiguousarray(rows).view(np.uint16)[:, :k])
    k32, scales = -(-k // BLOCK) * BLOCK, num_scales(k, scheme)
    q = rows[:, :k32].view(np.int8).astype(np.float32)
    scale = np.ascontiguousarray(rows[:, k32:k32 + 4 * scales]).view(np.float32)
    return (q * np.repeat(scale, k32 // scales, axis=1))[:, :k]
