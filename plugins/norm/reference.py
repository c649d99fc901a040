"""The meaning of the normalisations in numpy, in float64."""
from __future__ import annotations

import numpy as np


def rms_norm(x: np.ndarray, weight: np.ndarray | None = None, *, eps: float) -> np.ndarray:
    """x [.., D], weight [D] -> x / sqrt(mean(x^2) + eps) * weight."""
    wide = x.astype(np.float64)
    y = wide / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return y if weight is None else y * weight


def layer_norm(x: np.ndarray, weight: np.ndarray | None = None, bias: np.ndarray | None = None, *,
               eps: float) -> np.ndarray:
    """x [.., D], weight [D], bias [D] -> (x - mean(x)) / sqrt(var(x) + eps) * weight + bias."""
    y = rms_norm(x.astype(np.float64) - np.mean(x, axis=-1, keepdims=True, dtype=np.float64), weight, eps=eps)
    return y if bias is None else y + bias
