"""Scales that a layer's inputs could have: by how large inputs and weights are, and by what rounding them would cost.

The candidates are those of AWQ (Lin et al. 2023: a power of the inputs' size) and of SmoothQuant (Xiao et al. 2022:
also of the weights' size). Where inputs are int8 by token and weights int8 by row, what rounding costs is known
beforehand: the step of a token is its largest input over 127, that of a row its largest weight over 127, and an error
is spread evenly over a step. With inputs x / s and weights w * s that is, but for a constant,

    mean over t of max_j (x_tj / s_j)^2 * sum over j of s_j^2 m_j
    + sum over n of max_j (w_nj s_j)^2 / e_n * sum over j of h_j / s_j^2

h the mean squares of the inputs, e_n those of the outputs, m_j = sum over n of w_nj^2 / e_n: errors count as parts of
the output they are in. Its minimum over s is one more candidate.
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..weights.expr import WeightExpr
from .statistics import InputStatistics

_POWERS_OF_INPUTS = (0.25, 0.5, 0.75, 1.0)
_SHARES = (0.25, 0.5, 0.75)
_SHARES_OF_INTEGERS = (0.4, 0.5, 0.6)
_LARGEST = 2.0 ** 8

_SHARES_OF_WEIGHTS = (1.0, 3.0)
"""Of the weights' part of the cost, which is counted once and more: the errors of weights, unlike those of inputs, are
the same for every token."""

_STEPS, _RATE, _NORM = 60, 0.1, 8


def spread(values: np.ndarray, scale: WeightExpr, width: int) -> np.ndarray:
    """[width]: those of heads that share them, repeated."""
    if len(values) == width:
        return values
    heads = values.reshape(-1, 1, scale.attr("head"))
    return np.ascontiguousarray(np.broadcast_to(heads, (len(heads), width // len(values), heads.shape[2]))).reshape(-1)


def candidates(w: np.ndarray, matters: np.ndarray, statistics: InputStatistics, scale: WeightExpr, integers: bool,
               ) -> list[np.ndarray]:
    """float32 [scale.shape[0]] each, of geometric mean 1 and none of them all ones.

    w        float32 [R, K]: rows of the matrices, 1 / e_n of each in matters [R]
    integers  inputs are int8 by token, weights int8 by row; else scales are powers of two, which change no digit
    """
    rms = np.sqrt(_gathered(np.maximum(statistics.mean_square, 0), scale, np.mean))
    most = _gathered(statistics.amax, scale, np.max)
    with np.errstate(divide="ignore", invalid="ignore"):
        if integers:
            size = np.sqrt(_gathered(matters @ np.square(w), scale, np.mean))
            found = [inputs ** np.float32(share) / size ** np.float32(1 - share)
                     for inputs in (rms, most) for share in _SHARES_OF_INTEGERS]
            begin = _bounded(np.sqrt(rms / size))
            if begin is not None:
                found += [_least(w, matters, statistics, scale, np.log(begin), share) for share in _SHARES_OF_WEIGHTS]
        else:
            weight = _gathered(np.abs(w).max(axis=0), scale, np.max)
            found = [rms ** np.float32(power) for power in _POWERS_OF_INPUTS]
            found += [most ** np.float32(share) / weight ** np.float32(1 - share) for share in _SHARES]
    distinct: dict[bytes, np.ndarray] = {}
    for values in found:
        candidate = _bounded(values)
        if candidate is None:
            continue
        if not integers:
            candidate = np.exp2(np.rint(np.log2(candidate)))
        candidate = candidate.astype(np.float32)
        if (candidate != 1).any():
            distinct[candidate.tobytes()] = candidate
    return list(distinct.values())


def _bounded(values: np.ndarray) -> np.ndarray | None:
    """Of geometric mean 1, ones where there is nothing to scale; None if that is everywhere."""
    usable = np.isfinite(values) & (values > 0)
    if not usable.any():
        return None
    middle = np.exp(np.log(values[usable]).mean())
    return np.asarray(np.clip(np.where(usable, values / middle, 1), 1 / _LARGEST, _LARGEST))


def _gathered(values: np.ndarray, scale: WeightExpr, reduce: Callable[..., np.ndarray]) -> np.ndarray:
    """[width] -> [heads * head]: the reverse of spread."""
    if len(values) == scale.shape[0]:
        return values
    head = scale.attr("head")
    groups = values.reshape(scale.shape[0] // head, -1, head)
    return np.asarray(reduce(groups, axis=1)).reshape(-1)


def _least(w: np.ndarray, matters: np.ndarray, statistics: InputStatistics, scale: WeightExpr, begin: np.ndarray,
           share: float) -> np.ndarray:
    """The scale for which what rounding costs is least, found by its gradient (Adam, Kingma and Ba 2015) in the
    logarithm. Largest values are taken as norms of a high order, which have one everywhere."""
    inputs = np.abs(statistics.rows).astype(np.float32)
    weights = np.abs(w) * np.sqrt(matters)[:, None].astype(np.float32)
    inputs /= max(float(inputs.max()), 1e-30)
    weights /= max(float(weights.max()), 1e-30)
    sizes = np.square(weights).sum(axis=0, dtype=np.float64)
    squares = np.maximum(statistics.mean_square.astype(np.float64), 0)
    squares *= float(np.square(inputs).sum()) / len(inputs) / max(float(squares.sum()), 1e-30)
    log, mean, square = begin.astype(np.float64), np.zeros(len(begin)), np.zeros(len(begin))
    for step in range(1, _STEPS + 1):
        s = np.exp(spread(log, scale, statistics.width))
        largest, of_largest = _norms(inputs, 1 / s)
        tall, of_tall = _norms(weights, s)
        a, b, of_b, c, of_c, d, of_d = (
            largest.mean(), sizes @ s ** 2, 2 * sizes * s ** 2, tall.sum(), of_tall.sum(axis=0),
            squares @ s ** -2, -2 * squares * s ** -2)
        cost = a * b + share * c * d
        gradient = (a * of_b - of_largest.mean(axis=0) * b + share * (of_c * d + c * of_d)) / max(cost, 1e-300)
        gathered = _gathered(gradient, scale, np.sum)
        mean = 0.9 * mean + 0.1 * gathered
        square = 0.999 * square + 0.001 * gathered ** 2
        rate = _RATE * (1 - (step - 1) / _STEPS)
        log -= rate * (mean / (1 - 0.9 ** step)) / (np.sqrt(square / (1 - 0.999 ** step)) + 1e-12)
    return np.asarray(np.exp(log - log.mean()))


def _norms(rows: np.ndarray, factor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """rows [R, K] times factor [K] -> the squares of their norms [R], and how these change with log factor [R, K]."""
    powers = np.square(rows * factor.astype(np.float32))
    for _ in range(int(np.log2(_NORM)) - 1):
        powers = np.square(powers, out=powers)
    total = powers.sum(axis=1, dtype=np.float64)
    squares = total ** (2 / _NORM)
    return squares, 2 * powers * np.divide(squares, total, out=np.zeros_like(total), where=total > 0)[:, None]
