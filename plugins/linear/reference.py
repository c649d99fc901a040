"""The meaning of a linear layer by its scheme."""
from __future__ import annotations

import numpy as np

from ..quantize.reference import quantize_values, round_to_bf16
from ..scheme import BLOCK, Scheme
from .pack import dequantize, to_float32


def reference(x: np.ndarray, w: np.ndarray, scheme: Scheme) -> np.ndarray:
    """x float32 [T, K], w [N, K] -> float64 [T, N]: x, rounded where the scheme says so, times the weights as stored.

    The integers and the scales are those of the kernels to the bit; only the sum of their products is taken in float64.
    """
    weights = dequantize(w, scheme).astype(np.float64)
    return effective_input(x, scheme) @ weights.T


def effective_input(x: np.ndarray, scheme: Scheme) -> np.ndarray:
    """x as a kernel sees it, float64."""
    if scheme.act_bits == 16:
        return to_float32(round_to_bf16(x)).astype(np.float64)
    if not scheme.is_integer:
        return x.astype(np.float64)
    q, scale = quantize_values(x, scheme)
    return (q * np.repeat(scale, BLOCK, axis=1).astype(np.float64))[:, :x.shape[1]]
