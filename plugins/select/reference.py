"""The meaning of the kernels along the last dimension, in numpy."""
from __future__ import annotations

import numpy as np


def softmax(x: np.ndarray) -> np.ndarray:
    exps = np.exp(x.astype(np.float64) - x.max(axis=-1, keepdims=True))
    return exps / exps.sum(axis=-1, keepdims=True)


def topk(x: np.ndarray, k: int, largest: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """x [R, N] -> values [R, k], indices i32 [R, k]: the best first, of equals the lower index, NaN above infinity."""
    keys = x.astype(np.float64) + 0.0
    number = np.where(np.isnan(keys), 0.0, keys)
    sign = -1 if largest else 1
    order = np.lexsort((np.broadcast_to(np.arange(x.shape[1]), x.shape), sign * number, sign * np.isnan(keys)), axis=-1)
    indices = order[:, :k].astype(np.int32)
    return np.take_along_axis(x, indices, axis=-1), indices


def scatter(x: np.ndarray, index: np.ndarray, source: np.ndarray | float) -> np.ndarray:
    """x [R, N], index [R, n], source [R, >= n] or a scalar; later writes win."""
    y = x.copy()
    for row, targets in enumerate(index):
        for i, target in enumerate(targets):
            y[row, target] = source[row, i] if isinstance(source, np.ndarray) else source
    return y
