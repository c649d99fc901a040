"""What the operators for LoRA adapters mean. A slot holds bfloat16 matrices at given bytes."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..gpu.floats import from_bf16


def matrix(slots: np.ndarray, slot: int, offset: int, rows: int, width: int) -> np.ndarray:
    """float32 [rows, width]. slots u8 [N, bytes]."""
    return from_bf16(slots[slot, offset:offset + 2 * rows * width].view(np.uint16)).reshape(rows, width)


def shrink(x: np.ndarray, adapters: np.ndarray, slots: np.ndarray, rank: int, a: Sequence[int]) -> np.ndarray:
    """h [T, len(a) * rank] = x aᵀ for each module that reads x [T, K]; 0 for tokens without adapter.

    adapters  i32 [T], slot of each token, -1: none
    a         where each module's bf16 [rank, K] begins in a slot, in bytes
    """
    h = np.zeros((len(x), len(a) * rank), np.float32)
    for slot in np.unique(adapters[adapters >= 0]):
        rows = adapters == slot
        for number, offset in enumerate(a):
            h[rows, number * rank:(number + 1) * rank] = x[rows] @ matrix(slots, slot, offset, rank, x.shape[1]).T
    return h


def expand(y: np.ndarray, h: np.ndarray, adapters: np.ndarray, slots: np.ndarray, rank: int,
           parts: Sequence[tuple[int, int, int, int]]) -> np.ndarray:
    """y [T, N] plus h b in the columns of each part: (first column, columns, byte of bf16 [rank, columns] in a slot,
    first column of h [T, W])."""
    out = y.copy()
    for slot in np.unique(adapters[adapters >= 0]):
        rows = adapters == slot
        for start, width, offset, column in parts:
            out[rows, start:start + width] += h[rows, column:column + rank] @ matrix(slots, slot, offset, rank, width)
    return out
