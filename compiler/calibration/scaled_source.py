"""A checkpoint with the scales that a calibration chose for the inputs of its layers."""
from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..weights.evaluate import TensorSource


class ScaledSource:
    """scales: parameter -> float32 [width]; others are ones. See weights.expr.input_scale."""

    def __init__(self, source: TensorSource, scales: Mapping[str, np.ndarray]) -> None:
        self._source, self._scales = source, scales

    def get(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        return self._source.get(name, begin, end)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def input_scale(self, name: str) -> np.ndarray | None:
        return self._scales.get(name)
