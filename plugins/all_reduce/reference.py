"""The meaning of the exchanges between ranks in numpy."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def all_reduce(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The sum of what each rank has, float32 [T, N], added in the order of the ranks."""
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total = total + part.astype(np.float32)
    return np.asarray(total)


def all_gather(parts: Sequence[np.ndarray]) -> np.ndarray:
    """What each rank has, [T, N], side by side: [T, ranks * N]."""
    return np.concatenate(parts, axis=-1)
