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
    return _encode(x, _magnitudes(4, 3, 0x7E), 0x80, 0x7F)


def from_e4m3(bits: np.ndarray) -> np.ndarray:
    return _decode(bits, _magnitudes(4, 3, 0x7E), 0x80)


def to_e2m1(x: np.ndarray) -> np.ndarray:
    """float32 -> uint8 in 0..15: 2 bits of exponent, 1 of mantissa; 0, 0.5, 1, 1.5, 2, 3, 4, 6. NaN becomes 0."""
    return _encode(x, _magnitudes(2, 1, 0x7), 0x8, 0)


def from_e2m1(bits: np.ndarray) -> np.ndarray:
    return _decode(bits, _magnitudes(2, 1, 0x7), 0x8)


@cache
def _magnitudes(exponent_bits: int, mantissa_bits: int, largest: int) -> np.ndarray:
    """The values of the codes 0..largest, float32."""
    codes = np.arange(largest + 1)
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    fraction = mantissa / (1 << mantissa_bits)
    values = np.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - bias), fraction * 2.0 ** (1 - bias))
    return values.astype(np.float32)


def _encode(x: np.ndarray, values: np.ndarray, sign: int, nan: int) -> np.ndarray:
    magnitude = np.abs(x).astype(np.float32)
    between = (values[:-1] + values[1:]) / 2
    code = np.searchsorted(between, magnitude, side="left")
    tie = between[np.minimum(code, len(between) - 1)] == magnitude
    code = np.minimum(code + (tie & (code % 2 == 1)), len(values) - 1)
    code = np.where(np.signbit(x), code | sign, code)
    return np.where(np.isnan(x), nan, code).astype(np.uint8)


def _decode(bits: np.ndarray, values: np.ndarray, sign: int) -> np.ndarray:
    code = bits & (sign - 1)
    magnitude = np.where(code < len(values), values[np.minimum(code, len(values) - 1)], np.float32("nan"))
    return np.where(bits & sign, -magnitude, magnitude).astype(np.float32)
