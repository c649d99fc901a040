"""Numbers that a checkpoint holds in a GPU format already: laid out for the kernels, not rounded again."""
from __future__ import annotations

import numpy as np

from ..gpu.floats import from_e4m3, to_e2m1, to_e4m3
from .gpu_formats import BLOCK, Format, Packed, pack_nibbles

KINDS = {"fp8": ("e4m3",), "fp8_block": ("e4m3",), "int8": ("int8",), "nvfp4": ("nvfp4", "mxfp4")}
"""Format -> the numbers that it holds: e4m3, int8, and e2m1 with scales in e4m3 and a factor (nvfp4) or with powers of
two (mxfp4)."""

_LEAST_POWER, _LARGEST_POWER = np.float32(2.0 ** -9), np.float32(2.0 ** 8)
"""Of the powers of two that e4m3 has."""


def power_factor(scales: np.ndarray) -> float:
    """The factor of an nvfp4 matrix whose block scales are powers of two: it makes the largest of them the largest
    that e4m3 has."""
    most = np.abs(scales).max(initial=0)
    return float(np.float32(most) / _LARGEST_POWER) if most else 1.0


def hold(codes: np.ndarray, scales: np.ndarray, format: Format, factor: float = 1.0) -> Packed:
    """codes [N, K]: numbers of a kind that the format holds; scales float32 [N, K], equal wherever it has one for all.

    What is packed is worth codes * scales * factor to the bit, if scales of nvfp4 are values of e4m3. Powers of two
    below the least of these, 2^-9, become that, and their codes are rounded: with power_factor, blocks whose scale is
    less than 2^-17 of the largest.
    """
    k = codes.shape[1]
    if format.name == "nvfp4":
        blocks = scales[:, ::BLOCK]
        bits = to_e4m3(blocks)
        stored = from_e4m3(bits)
        if not np.array_equal(stored, blocks):
            bits = to_e4m3(np.maximum(blocks, _LEAST_POWER))
            stored = from_e4m3(bits)
            by = np.divide(blocks, stored, out=np.zeros_like(blocks), where=stored > 0)
            codes = codes * by.repeat(BLOCK, axis=1)
        return Packed(format, k, pack_nibbles(to_e2m1(codes)), bits, factor=factor)
    rows = scales[::format.rows_per_scale, ::format.channels_per_scale or k]
    compact = np.ascontiguousarray(rows if format.channels_per_scale else rows[:, 0], np.float32)
    w = codes.astype(np.int8) if format.name == "int8" else to_e4m3(codes)
    return Packed(format, k, w, compact)


def holds(kind: str, format: Format, shape: tuple[int, ...]) -> bool:
    """Whether a matrix [N, K], or matrices [E, N, K], of such numbers can lie in the format."""
    n, k = shape[-2:]
    if kind not in KINDS.get(format.name, ()) or (format.channels_per_scale and k % format.channels_per_scale):
        return False
    return len(shape) == 2 or n % format.rows_per_scale == 0
