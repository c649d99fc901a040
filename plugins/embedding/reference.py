"""The meaning of an embedding by its scheme."""
from __future__ import annotations

import numpy as np

from ..linear.pack import dequantize
from ..scheme import Scheme


def reference(ids: np.ndarray, w: np.ndarray, scheme: Scheme) -> np.ndarray:
    """ids [T], w [V, H] -> float32 [T, H]: the rows of the weights as stored."""
    return dequantize(w, scheme)[ids]
