"""How a layer's matrices are rounded best: scales of its inputs, and error compensation, by the error that they leave.

A scale makes a channel of the weights larger and the same channel of the inputs smaller: what is rounded coarsely is
then what matters less. The error of a layer's outputs has two parts: that of the rounded weights, by the second moments
of the inputs, and that of the rounded inputs, by some inputs as they are.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ingot.plugins.linear.compensate import Feedback, dequantized, feedback, round_compensated
from ingot.plugins.linear.gpu_formats import nvfp4_factor
from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES
from ingot.plugins.linear.grids import E2M1Grid, GridFormat, MinimumGrid
from ingot.plugins.linear.pack import dequantize
from ingot.plugins.linear.reference import effective_input
from ingot.plugins.scheme import SCHEMES

from ..weights.evaluate import TensorSource, evaluate
from ..weights.expr import WeightExpr, input_scales
from ..weights.packed import PANELS, PackedWeight
from .scales import candidates, spread
from .statistics import InputStatistics, block_spans

_ROWS = 384
"""Of each matrix that candidates are tried on."""

_COMPENSATED_ROWS = 96
_GAIN = 0.98
"""A scale or a compensation that leaves more than this part of the error is not worth it."""

_CAUTION = 2.0
"""What an error of int8 weights counts beside one of their inputs: it is the same for every token."""

_LEAST_ENERGY = 0.1
"""Outputs count as if they had at least this part of their mean square: what is next to nothing anyway may err."""


@dataclass(frozen=True)
class Choice:
    """method: "rtn", "awq", "gptq" or "awq_gptq"; scale float32 [width] as weights.expr.input_scale has it, or None."""

    method: str
    scale: np.ndarray | None = None


@dataclass(frozen=True)
class _Matrix:
    """Some rows [R, K] of a matrix as the checkpoint has it, and how it will be stored.

    matters: float32 [R], how much the square of each output's error counts
    """

    w: np.ndarray
    matters: np.ndarray
    packed: PackedWeight

    def some(self, count: int) -> _Matrix:
        step = -(-len(self.w) // count)
        return replace(self, w=self.w[::step], matters=self.matters[::step])

    def stored(self, w: np.ndarray, inputs: Feedback | None = None) -> np.ndarray:
        """inputs: for GPUs alone."""
        scheme = self.packed.packing.scheme
        return dequantize(w, SCHEMES[scheme]) if self._on_cpu else GPU_SCHEMES[scheme].stored(w, inputs)

    def inputs(self, x: np.ndarray) -> np.ndarray:
        scheme = self.packed.packing.scheme
        return effective_input(x, SCHEMES[scheme]).astype(np.float32) if self._on_cpu else GPU_SCHEMES[scheme].inputs(x)

    def grid(self, w: np.ndarray) -> GridFormat | None:
        if not self.packed.group or (not self._on_cpu and GPU_SCHEMES[self.packed.packing.scheme].weights.bits != 4):
            return None
        if self._on_cpu:
            return MinimumGrid()
        form = GPU_SCHEMES[self.packed.packing.scheme].weights
        return form.grid if form.is_int4 else E2M1Grid(nvfp4_factor(w))

    @property
    def is_integer(self) -> bool:
        """Inputs int8 by token, weights int8 by row."""
        return not self._on_cpu and GPU_SCHEMES[self.packed.packing.scheme].format == "int8"

    @property
    def _on_cpu(self) -> bool:
        return self.packed.packing.layout == PANELS


def column_scale(weight: PackedWeight) -> WeightExpr | None:
    """The scale of a weight's inputs, if it has one."""
    return next((part for part in input_scales(weight.expr) if not part.attr("inverse")), None)


def choose(weights: Sequence[PackedWeight], scale: WeightExpr | None, source: TensorSource,
           statistics: InputStatistics, method: str) -> Choice:
    """For matrices that read the same inputs. method: key of record.METHODS but "rtn".

    source: without scales.
    """
    compensates = any(weight.group for weight in weights)
    if scale is None and method != "awq":
        return Choice("gptq" if compensates else "rtn")
    matrices = _matrices(weights, source, statistics)
    chosen = None
    if scale is not None and method in ("awq", "best"):
        chosen = _best_scale(matrices, statistics, scale)
    if method == "awq" or not compensates:
        fits_grids = any(matrix.grid(matrix.w) is not None for matrix in matrices)
        return Choice("awq" if fits_grids or chosen is not None else "rtn", chosen)
    if method == "gptq":
        return Choice("gptq")
    some = [matrix.some(_COMPENSATED_ROWS) for matrix in matrices]
    options = {"gptq": sum(_error(some, statistics, None, True))}
    if chosen is not None and scale is not None:
        options["awq_gptq"] = sum(_error(some, statistics, spread(chosen, scale, statistics.width), True))
    best = min(options, key=lambda name: options[name])
    return Choice(best, chosen if best == "awq_gptq" else None)


def _matrices(weights: Sequence[PackedWeight], source: TensorSource, statistics: InputStatistics) -> list[_Matrix]:
    """In int8 an output's error counts as a part of the output: what is merged, such as q, k and v, differs much in
    size, and less in what its errors do."""
    found = [_Matrix(w, np.ones(len(w), np.float32), weight) for weight in weights
             for w in (_some_rows(weight, source, _ROWS),)]
    if not all(matrix.is_integer for matrix in found):
        return found
    return [replace(matrix, matters=_by_energy(matrix.w, statistics)) for matrix in found]


def _by_energy(w: np.ndarray, statistics: InputStatistics) -> np.ndarray:
    energy = _of_weights(w, statistics)
    return np.asarray(1 / np.maximum(energy + _LEAST_ENERGY * energy.mean(), 1e-30), np.float32)


def _best_scale(matrices: Sequence[_Matrix], statistics: InputStatistics, scale: WeightExpr) -> np.ndarray | None:
    """None if no scale is worth it."""
    integers = all(matrix.is_integer for matrix in matrices)
    w, matters = (np.concatenate(parts) for parts in zip(*((m.w, m.matters) for m in matrices), strict=True))
    caution = _CAUTION if integers else 1.0

    def error(values: np.ndarray | None) -> float:
        full = None if values is None else spread(values, scale, statistics.width)
        of_inputs, of_weights = _error(matrices, statistics, full)
        return of_inputs + caution * of_weights

    chosen, least = None, error(None)
    for candidate in candidates(w, matters, statistics, scale, integers):
        if (found := error(candidate)) < _GAIN * least:
            chosen, least = candidate, found
    return chosen


def _some_rows(weight: PackedWeight, source: TensorSource, count: int) -> np.ndarray:
    """float32 [R, K], spread over the matrix."""
    n = weight.expr.shape[0]
    if n <= count:
        return evaluate(weight.expr, source)
    parts = 8
    each = count // parts
    begins = [part * (n - each) // (parts - 1) for part in range(parts)]
    return np.concatenate([evaluate(weight.expr, source, (begin, begin + each)) for begin in begins])


def _error(matrices: Sequence[_Matrix], statistics: InputStatistics, scale: np.ndarray | None,
           compensated: bool = False) -> tuple[float, float]:
    """Mean square over tokens of the error of the outputs, added up over these: what comes of the rounded inputs, and
    what of the rounded weights."""
    scaled, of_inputs, of_weights = statistics if scale is None else statistics.scaled(1 / scale), 0.0, 0.0
    for matrix in matrices:
        w = matrix.w if scale is None else matrix.w * scale
        grid = matrix.grid(w)
        if grid is not None:
            padded = np.pad(w, ((0, 0), (0, -w.shape[1] % grid.group)))
            moments = scaled.blocks if compensated else (scaled.mean_square,)
            found = round_compensated(padded, grid, feedback(moments, grid.group))
            error = dequantized(*found, grid)[:, :w.shape[1]] - w
        elif compensated and matrix.packed.group:
            error = matrix.stored(w, feedback(scaled.blocks, matrix.packed.group)) - w
        else:
            error = matrix.stored(w) - w
        of_weights += float(_of_weights(error, scaled) @ matrix.matters)
        of_inputs += _of_inputs(matrix, statistics, scale)
    return of_inputs, of_weights


def _of_weights(error: np.ndarray, statistics: InputStatistics) -> np.ndarray:
    """Mean square of what an error of the weights [N, K] does to each output, [N]."""
    total = np.zeros(len(error), np.float32)
    for block, (a, b) in zip(statistics.blocks, block_spans(statistics.width), strict=True):
        total += np.einsum("nk,nk->n", error[:, a:b] @ block, error[:, a:b])
    return np.asarray(np.maximum(total, 0))


def _of_inputs(matrix: _Matrix, statistics: InputStatistics, scale: np.ndarray | None) -> float:
    x = statistics.rows if scale is None else statistics.rows / scale
    error = matrix.inputs(x) - x
    if not error.any():
        return 0.0
    outputs = (error if scale is None else error * scale) @ matrix.w.T
    return float((np.square(outputs) @ matrix.matters).sum()) / len(x)
