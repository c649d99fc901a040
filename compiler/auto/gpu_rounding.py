"""What an engine for a GPU makes of a model's matrices, told in the model's own terms.

An engine's matrices are merged and scaled before they are rounded, so that what is stored of a row is the row times
factors of its channels (scales of the inputs, which are divided by them) and a factor of its own (the scale of an input
that the row's output goes into). Both are taken back here: the model, with these weights and with inputs x rounded as
x / s, times s, gives what the engine gives.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..cache.calibration import Calibration
from ..calibration.scales import spread
from ..calibration.smooth import column_scale
from ..checkpoint.checkpoint import Checkpoint
from ..passes.matrices import Matrix
from ..weights.evaluate import evaluate
from ..weights.packed import PackedWeight
from .units import Unit


@dataclass(frozen=True)
class SchemeWeights:
    """Of a whole model in one scheme: its matrices as the builder of an engine makes them, and how they are rounded."""

    weights: Sequence[PackedWeight]
    calibration: Calibration


class GpuRounding:
    def __init__(self, checkpoint: Checkpoint, schemes: Mapping[str, SchemeWeights], units: Sequence[Unit]) -> None:
        self._checkpoint, self._schemes = checkpoint, schemes
        self._rows = {parameter: matrix.weight.shape[0] for unit in units if unit.role != "experts"
                      for matrix in unit.matrices for parameter in matrix.parameters}
        self._last: tuple[tuple[str, str], np.ndarray] | None = None

    def error(self, unit: Unit, scheme: str) -> np.ndarray | None:
        """float32 [N, K], of experts [E, N, K]: what rounding adds to the unit's weights; None where that is not known.
        """
        if unit.role == "experts":
            return self._error_of_experts(unit, scheme)
        parts = [self._error(matrix, scheme) for matrix in unit.matrices]
        found = [part for part in parts if part is not None]
        return np.concatenate(found) if len(found) == len(parts) else None

    def _error_of_experts(self, unit: Unit, scheme: str) -> np.ndarray | None:
        """They have no scales, and rows are rounded alone: in whatever order the engine has them."""
        known, (matrix,) = self._schemes.get(scheme), unit.matrices
        for weight in known.weights if known is not None else ():
            if weight.parameters == matrix.parameters and weight.expr.shape == matrix.weight.shape:
                assert known is not None
                values = replace(weight, expr=matrix.weight).values(self._checkpoint, known.calibration.moments(weight))
                return np.asarray(values - evaluate(matrix.weight, self._checkpoint))
        return None

    def scale(self, unit: Unit, scheme: str) -> np.ndarray | None:
        """float32 [K]: of the unit's inputs; None for ones."""
        for matrix in unit.matrices:
            if (place := self._place(matrix, scheme)) is not None:
                return self._scale(place[0], scheme)
        return None

    def _scale(self, weight: PackedWeight, scheme: str) -> np.ndarray | None:
        scale = column_scale(weight)
        values = None if scale is None else self._schemes[scheme].calibration.scales.get(scale.attr("name"))
        return None if scale is None or values is None else spread(values, scale, weight.expr.shape[-1])

    def _place(self, matrix: Matrix, scheme: str) -> tuple[PackedWeight, int] | None:
        """The weight that a matrix is part of, and its first row in it."""
        known = self._schemes.get(scheme)
        for weight in known.weights if known is not None else ():
            begin = 0
            for parameter in weight.parameters:
                if parameter in matrix.parameters and weight.expr.shape == (
                        sum(self._rows.get(name, 0) for name in weight.parameters), matrix.weight.shape[-1]):
                    return weight, begin
                begin += self._rows.get(parameter, 0)
        return None

    def _error(self, matrix: Matrix, scheme: str) -> np.ndarray | None:
        place = self._place(matrix, scheme)
        if place is None:
            return None
        weight, begin = place
        rows = slice(begin, begin + matrix.weight.shape[0])
        calibration = self._schemes[scheme].calibration
        source, scale = calibration.source(self._checkpoint), self._scale(weight, scheme)
        if self._last is None or self._last[0] != (scheme, weight.name):
            self._last = (scheme, weight.name), weight.values(source, calibration.moments(weight))
        given, stored = evaluate(weight.expr, source, (rows.start, rows.stop)), self._last[1][rows]
        if scale is not None:
            given, stored = given / scale, stored / scale
        plain = evaluate(matrix.weight, self._checkpoint)
        square = np.square(given).sum(axis=1)
        factor = np.divide((given * plain).sum(axis=1), square, out=np.zeros_like(square), where=square > 0)
        return np.asarray(stored * factor[:, None] - plain)
