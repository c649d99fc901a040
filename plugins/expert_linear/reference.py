"""The meaning of a linear layer of experts by its scheme."""
from __future__ import annotations

import numpy as np

from ..linear.reference import reference as linear_reference
from ..scheme import Scheme


def reference(x: np.ndarray, ids: np.ndarray, w: np.ndarray, scheme: Scheme) -> np.ndarray:
    """x float32 [T, K] or [T, k, K], ids [T, k], w [E, N, K] -> float64 [T, k, N]."""
    x = np.broadcast_to(x[:, None] if x.ndim == 2 else x, (*ids.shape, x.shape[-1]))
    out = np.zeros((*ids.shape, w.shape[1]))
    for expert in np.unique(ids):
        rows = ids == expert
        out[rows] = linear_reference(x[rows], w[expert], scheme)
    return out
