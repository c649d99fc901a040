"""Small floating-point types that numpy lacks, as bits: bf16, e4m3 (FP8) and e2m1 (FP4). Rounding is to nearest, ties
to even; values beyond the largest become the largest."""
from __future__ import annotations

from functools import cache

import numpy as np

E4M3_MAX = np.float32(448)
E2M1_MAX = np.float32(6)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 -> uint16 bits. NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """float32 -> uint8 bits: 4 bits of exponent, 3 of mantissa, no infinities (Micikevicius et al. 2022)."""
    return _encode(x, 4, 3, 0x7E, 0x7F)


def from_e4m3(bits: np.ndarray) -> np.ndarray:
    return _values(4, 3, 0x7E)[bits]


def to_e2m1(x: np.ndarray) -> np.ndarray:
    """float32 -> uint8 in 0..15: 2 bits of exponent, 1 of mantissa; 0, 0.5, 1, 1.5, 2, 3, 4, 6. NaN becomes 0."""
    return _encode(x, 2, 1, 0x7, 0)


def from_e2m1(bits: np.ndarray) -> np.ndarray:
    return _values(2, 1, 0x7)[bits]


@cache
def _magnitudes(exponent_bits: int, mantissa_bits: int, largest: int) -> np.ndarray:
    """The values of the codes 0..largest, float32."""
    codes = np.arange(largest + 1)
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    fraction = mantissa / (1 << mantissa_bits)
    values = np.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - bias), fraction * 2.0 ** (1 - bias))
    return values.astype(np.float32)


def _encode(x: np.ndarray, exponent_bits: int, mantissa_bits: int, largest: int, nan: int) -> np.ndarray:
    """Rounds the float32 mantissa to the bits that stay; below the smallest normal number, to multiples of a step."""
    bias, sign = (1 << (exponent_bits - 1)) - 1, 1 << (exponent_bits + mantissa_bits)
    magnitude = np.minimum(np.abs(x), _magnitudes(exponent_bits, mantissa_bits, largest)[-1], dtype=np.float32)
    bits, shift = magnitude.view(np.uint32), 23 - mantissa_bits
    rounded = (bits + ((1 << (shift - 1)) - 1) + ((bits >> shift) & 1)) >> shift
    code = np.minimum(rounded.astype(np.int32) - ((127 - bias) << mantissa_bits), largest)
    small = magnitude < np.float32(2.0 ** (1 - bias))
    with np.errstate(invalid="ignore"):  # NaN
        steps = np.rint(magnitude * np.float32(2.0 ** (bias - 1 + mantissa_bits))).astype(np.int32)
    code = np.where(small, steps, code)
    code = np.where(np.signbit(x), code | sign, code)
    return np.where(np.isnan(x), nan, code).astype(np.uint8)


@cache
def _values(exponent_bits: int, mantissa_bits: int, largest: int) -> np.ndarray:
    """Of all 256 bytes, float32; the bits above the sign do not count."""
    sign = 1 << (exponent_bits + mantissa_bits)
    code = np.arange(256) & (sign - 1)
    known = _magnitudes(exponent_bits, mantissa_bits, largest)
    magnitude = np.where(code < len(known), known[np.minimum(code, len(known) - 1)], np.float32("nan"))
    return np.where(np.arange(256) & sign, -magnitude, magnitude).astype(np.float32)
