"""The 8-bit floating-point types of checkpoints, as tables of their 256 values."""
from __future__ import annotations

import numpy as np


def _values(exponent_bits: int, bias: int, has_infinity: bool) -> np.ndarray:
    """f32 [256] of sign, exponent, mantissa."""
    codes = np.arange(256)
    mantissa_bits = 7 - exponent_bits
    exponent = codes >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = codes & ((1 << mantissa_bits) - 1)
    fraction = np.where(exponent > 0, 1.0, 0.0) + mantissa / (1 << mantissa_bits)
    values = np.ldexp(fraction, np.maximum(exponent, 1) - bias)
    if has_infinity:
        last = exponent == (1 << exponent_bits) - 1
        values = np.where(last, np.where(mantissa == 0, np.inf, np.nan), values)
    else:
        values = np.where(codes & 127 == 127, np.nan, values)
    return np.where(codes >= 128, -values, values).astype(np.float32)


def _exponents() -> np.ndarray:
    return np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))


FLOAT8_VALUES = {"F8_E4M3": _values(4, 7, False), "F8_E5M2": _values(5, 15, True), "F8_E8M0": _exponents()}
"""Name in safetensors -> value of each code. e4m3 is the finite variant that PyTorch calls float8_e4m3fn (OCP 8-bit
Floating Point Specification 1.0); e8m0 holds a power of two, without a sign."""
