"""The meaning of the prologue of attention in numpy."""
from __future__ import annotations

import numpy as np

from ..norm.reference import rms_norm


def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, *, rotary: int, rotary_begin: int = 0,
         interleaved: bool = False) -> np.ndarray:
    """x [T, H, D], cos and sin [T, rotary] (a factor an element) or [T, rotary / 2] (a pair) -> [T, H, D], float64."""
    out = x.astype(np.float64)
    if not rotary:
        return out
    if cos.shape[1] != rotary:
        cos, sin = (np.repeat(t, 2, axis=1) if interleaved else np.tile(t, 2) for t in (cos, sin))
    turned = out[..., rotary_begin:rotary_begin + rotary].copy()
    partner = np.empty_like(turned)
    low, high = ((slice(0, None, 2), slice(1, None, 2)) if interleaved
                 else (slice(0, rotary // 2), slice(rotary // 2, None)))
    partner[..., low], partner[..., high] = -turned[..., high], turned[..., low]
    out[..., rotary_begin:rotary_begin + rotary] = turned * cos[:, None] + partner * sin[:, None]
    return out


def rope_kv_write(q: np.ndarray, k: np.ndarray, cos: np.ndarray, sin: np.ndarray, q_norm: np.ndarray | None,
                  k_norm: np.ndarray | None, *, rotary: int, rotary_begin: int = 0, interleaved: bool = False,
                  norm: bool = False, eps: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """q [T, Hq, D], k [T, Hkv, D] -> both normalised per head (if `norm`) and turned. Values pass unchanged."""
    if norm:
        q, k = rms_norm(q, q_norm, eps=eps), rms_norm(k, k_norm, eps=eps)
    q, k = (rope(x, cos, sin, rotary=rotary, rotary_begin=rotary_begin, interleaved=interleaved) for x in (q, k))
    return q, k
