"""bfloat16 as its bits: the upper half of a float32."""

from __future__ import annotations

import numpy as np


def widen(bits: np.ndarray) -> np.ndarray:
    """u16 [...] -> the same values as f32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_to_bf16(values: np.ndarray) -> np.ndarray:
    """f32 [...], finite -> u16, to the nearest, ties to even. Values beyond the largest bfloat16 become infinite."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
