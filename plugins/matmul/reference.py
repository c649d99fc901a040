"""The meaning of matmul in numpy."""
from __future__ import annotations

import numpy as np


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a [.., M, K], b [.., K, N] -> [.., M, N] in float64; the leading dimensions broadcast."""
    return np.matmul(a.astype(np.float64), b.astype(np.float64))
