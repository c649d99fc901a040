"""How a layer's matrices are rounded best: scales of its inputs, and error compensation, by the error that they leave.

A scale makes a channel of the weights larger and the same channel of the inputs smaller: what is rounded coarsely is
then what matters less. Candidates are those of AWQ (a power of the inputs' size) and of SmoothQuant (also of the
weights' size), rounded to powers of two, so that scaling alone changes no digit. The error of a layer's outputs has two
parts: that of the rounded weights, by the second moments of the inputs, and that of the rounded inputs, by some inputs
as they are.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ingot.plugins.linear.compensate import dequantized, feedback, round_compensated
from ingot.plugins.linear.gpu_formats import nvfp4_factor
from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES
from ingot.plugins.linear.grids import E2M1Grid, GridFormat, MinimumGrid
from ingot.plugins.linear.pack import dequantize
from ingot.plugins.linear.reference import effective_input
from ingot.plugins.scheme import SCHEMES

from ..weights.evaluate import TensorSource, evaluate
from ..weights.expr import WeightExpr, input_scales
from ..weights.packed import PANELS, PackedWeight
from .statistics import InputStatistics, block_spans

_ROWS = 384
"""Of each matrix that candidates are tried on."""

_COMPENSATED_ROWS = 96
_POWERS_OF_INPUTS = (0.25, 0.5, 0.75, 1.0)
_SHARES = (0.25, 0.5, 0.75)
_LARGEST = 2.0 ** 8
_GAIN = 0.98
"""A scale or a compensation that leaves more than this part of the error is not worth it."""


@dataclass(frozen=True)
class Choice:
    """method: "rtn", "awq", "gptq" or "awq_gptq"; scale float32 [width] as weights.expr.input_scale has it, or None."""

    method: str
    scale: np.ndarray | None = None


@dataclass(frozen=True)
class _Matrix:
    """Some rows of a matrix as the checkpoint has it, and how it will be stored."""

    w: np.ndarray
    packed: PackedWeight

    def stored(self, w: np.ndarray) -> np.ndarray:
        scheme = self.packed.packing.scheme
        return dequantize(w, SCHEMES[scheme]) if self._on_cpu else GPU_SCHEMES[scheme].stored(w)

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
    matrices = [_Matrix(_some_rows(weight, source, _ROWS), weight) for weight in weights]
    chosen, least = None, _error(matrices, statistics, None)
    if scale is not None and method in ("awq", "best"):
        for candidate in _candidates(matrices, statistics, scale):
            error = _error(matrices, statistics, spread(candidate, scale, statistics.width))
            if error < _GAIN * least:
                chosen, least = candidate, error
    if method == "awq" or not compensates:
        fits_grids = any(matrix.grid(matrix.w) is not None for matrix in matrices)
        return Choice("awq" if fits_grids or chosen is not None else "rtn", chosen)
    if method == "gptq":
        return Choice("gptq")
    options = {"gptq": _error(matrices, statistics, None, True)}
    if chosen is not None and scale is not None:
        options["awq_gptq"] = _error(matrices, statistics, spread(chosen, scale, statistics.width), True)
    best = min(options, key=lambda name: options[name])
    return Choice(best, chosen if best == "awq_gptq" else None)


def spread(values: np.ndarray, scale: WeightExpr, width: int) -> np.ndarray:
    """[width]: those of heads that share them, repeated."""
    if len(values) == width:
        return values
    heads = values.reshape(-1, 1, scale.attr("head"))
    return np.ascontiguousarray(np.broadcast_to(heads, (len(heads), width // len(values), heads.shape[2]))).reshape(-1)


def _gathered(values: np.ndarray, scale: WeightExpr, reduce: Callable[..., np.ndarray]) -> np.ndarray:
    """[width] -> [heads * head]: the reverse of spread."""
    if len(values) == scale.shape[0]:
        return values
    head = scale.attr("head")
    groups = values.reshape(scale.shape[0] // head, -1, head)
    return np.asarray(reduce(groups, axis=1)).reshape(-1)


def _candidates(matrices: Sequence[_Matrix], statistics: InputStatistics, scale: WeightExpr) -> list[np.ndarray]:
    rms = np.sqrt(_gathered(np.maximum(statistics.mean_square, 0), scale, np.mean))
    most = _gathered(statistics.amax, scale, np.max)
    weight = _gathered(np.maximum.reduce([np.abs(m.w).max(axis=0) for m in matrices]), scale, np.max)
    found = [rms ** np.float32(power) for power in _POWERS_OF_INPUTS]
    with np.errstate(divide="ignore", invalid="ignore"):
        found += [most ** np.float32(share) / weight ** np.float32(1 - share) for share in _SHARES]
    distinct: dict[bytes, np.ndarray] = {}
    for values in found:
        usable = np.isfinite(values) & (values > 0)
        if not usable.any():
            continue
        middle = np.exp(np.log(values[usable]).mean())
        logs = np.rint(np.log2(np.where(usable, values / middle, 1)))
        candidate = np.exp2(np.clip(logs, -np.log2(_LARGEST), np.log2(_LARGEST))).astype(np.float32)
        if (candidate != 1).any():
            distinct[candidate.tobytes()] = candidate
    return list(distinct.values())


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
           compensated: bool = False) -> float:
    """Mean square over tokens of the error of the outputs, added up over these."""
    scaled, total = statistics if scale is None else statistics.scaled(1 / scale), 0.0
    for matrix in matrices:
        some = matrix.w[:: -(-len(matrix.w) // _COMPENSATED_ROWS)] if compensated else matrix.w
        w = some if scale is None else some * scale
        grid = matrix.grid(w)
        if grid is None:
            error = matrix.stored(w) - w
        else:
            padded = np.pad(w, ((0, 0), (0, -w.shape[1] % grid.group)))
            moments = scaled.blocks if compensated else (scaled.mean_square,)
            found = round_compensated(padded, grid, feedback(moments, grid.group))
            error = dequantized(*found, grid)[:, :w.shape[1]] - w
        total += _of_weights(error, scaled) + _of_inputs(matrix, some, statistics, scale)
    return total


def _of_weights(error: np.ndarray, statistics: InputStatistics) -> float:
    """Mean square of what an error of the weights [N, K] does to the outputs, added up."""
    return sum(float(np.einsum("nk,nk->", error[:, a:b] @ block, error[:, a:b]))
               for block, (a, b) in zip(statistics.blocks, block_spans(statistics.width), strict=True))


def _of_inputs(matrix: _Matrix, w: np.ndarray, statistics: InputStatistics, scale: np.ndarray | None) -> float:
    x = statistics.rows if scale is None else statistics.rows / scale
    error = matrix.inputs(x) - x
    if not error.any():
        return 0.0
    outputs = (error if scale is None else error * scale) @ w.T
    return float(np.square(outputs).sum()) / len(x)
