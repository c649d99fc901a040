"""From float weights to integers and scales."""
from __future__ import annotations

import numpy as np

from ..scheme import BLOCK


def quantize_w8(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """w float32 [N, K] -> q int8 [N, K] in [-127, 127], scale float32 [N]; w is about scale * q."""
    scale = np.abs(w).max(axis=1, initial=0) / np.float32(127)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    return np.rint(w * inverse[:, None]).clip(-127, 127).astype(np.int8), scale


def quantize_w4(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """w float32 [N, K], K a multiple of 32 -> q uint8 [N, K] in 0..15, step and minimum float16 [N, K / 32]."""
    x = w.reshape(-1, BLOCK)
    lo, hi = x.min(1), x.max(1)
    step = ((hi - lo) / 15).astype(np.float16)
    m = lo.astype(np.float16)
    s = step.astype(np.float32)
    inv = np.divide(1, s, out=np.zeros_like(s), where=s > 0)
    q = np.rint((x - m.astype(np.float32)[:, None]) * inv[:, None]).clip(0, 15).astype(np.uint8)
    return q.reshape(w.shape), step.reshape(w.shape[0], -1), m.reshape(w.shape[0], -1)
