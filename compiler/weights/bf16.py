"""bfloat16 in numpy, which has no such type: carried as u16 bits."""
from __future__ import annotations

import numpy as np


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """u16 bits -> f32, exact."""
    out = np.empty(bits.shape, np.uint32)
    np.left_shift(bits, np.uint32(16), out=out, dtype=np.uint32)
    return out.view(np.float32)


def f32_to_bf16(values: np.ndarray) -> np.ndarray:
    """f32 -> u16 bits, rounded to nearest, ties to even. A NaN stays a NaN (its payload is not kept)."""
    bits = np.ascontiguousarray(values, np.float32).reshape(values.shape).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    if np.isnan(values).any():
        rounded[np.isnan(values)] = 0x7FC0
    return rounded
