"""From float weights to integers and scales."""
from __future__ import annotations

import numpy as np

from ..scheme import BLOCK
from . import native

_LEVELS = 15
_F16_MAX = np.float32(65504)
_F16_LEAST = np.float16(2.0**-24)

# Grids that a group is tried on: its span is divided into so many steps, of which the first `below` are cut off.
# Fewer steps than 15 find the grid of a group that was quantized before and does not reach both of its ends; more steps
# give up the outermost weights for a finer grid. More candidates than these lower the error by less than 1 %.
_GRIDS = tuple((np.float32(steps), np.float32(below))
               for steps, below in ((15, 0), (14, 0), (13, 0), (12, 0), (11, 0), (16, 0), (16, 0.5), (16, 1), (17, 1)))

# A group of 32 may be part of a larger one that was quantized before: its weights then span any number of that grid's
# steps. 1 to 7 have a multiple above. Tried where many groups lie on a grid: among others these never win.
_PART_GRIDS = tuple((np.float32(steps), np.float32(0)) for steps in (10, 9, 8))
_EXACT = 1e-4
"""A group lies on a grid if it leaves less than this part of the variance; other weights leave some 5e-3."""

_MANY = 0.02
"""Part of the groups at hand."""

_GROUPS_AT_ONCE = 2048
"""So many that the arrays of one pass stay in the second-level cache."""


def quantize_w8(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """w float32 [N, K] -> q int8 [N, K] in [-127, 127], scale float32 [N]; w is about scale * q."""
    scale = np.abs(w).max(axis=1, initial=0) / np.float32(127)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    return np.rint(w * inverse[:, None]).clip(-127, 127).astype(np.int8), scale


def quantize_w8_groups(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """w float32 [N, K], K a multiple of 32 -> q int8 [N, K] in [-127, 127], scale float16 [N, K / 32].

    Weights of GGUF's Q8_0 keep their numbers and scales to the bit. Groups below 4e-6 lose bits: float16 ends there.
    """
    groups = w.reshape(len(w), -1, BLOCK)
    most = np.maximum(groups.max(axis=2), -groups.min(axis=2))
    scale = np.where(most > 0, np.maximum(_to_f16(most / np.float32(127)), _F16_LEAST), np.float16(0))
    # Where float16 ends, a step rounded down may cut the largest weight off.
    short = (most - 127 * scale.astype(np.float32) > scale) & (scale < _F16_MAX)
    scale[short] = np.nextafter(scale[short], np.float16(np.inf))
    q = np.rint(groups * _reciprocal(scale.astype(np.float32))[..., None])
    return q.clip(-127, 127).astype(np.int8).reshape(w.shape), scale


def quantize_w4(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """w float32 [N, K], K a multiple of 32 -> q uint8 [N, K] in 0..15, step and minimum float16 [N, K / 32].

    w is about step * q + minimum, with the least squared error that a search over a few grids finds; weights that lie
    on a grid of 16 levels already keep it, and those of GGUF's Q4_0 and Q4_1 come out to the bit. A step may be
    negative. Groups that span less than 1e-6 become constant: float16 ends there.
    """
    groups = w.reshape(-1, BLOCK)
    q = np.empty(groups.shape, np.uint8)
    step, minimum = np.empty(len(groups), np.float16), np.empty(len(groups), np.float16)
    for begin in range(0, len(groups), _GROUPS_AT_ONCE):
        part = slice(begin, begin + _GROUPS_AT_ONCE)
        x = np.ascontiguousarray(groups[part].T)  # sums over a group are then sums of rows, which are fast
        step[part], minimum[part] = fit_w4(x)
        settle_exact(x, step[part], minimum[part])
        q[part] = nearest_level(x, step[part], minimum[part]).T
    return q.reshape(w.shape), step.reshape(len(w), -1), minimum.reshape(len(w), -1)


def fit_w4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Step and minimum, float16, for each group of weights, which are the columns of x [group, groups]."""
    if (done := native.fit_columns(x)) is not None:
        return done
    fitted_step, fitted_minimum = _fit(x)
    step = _to_f16(fitted_step)
    # The step as rounded to float16; the minimum that suits it best.
    levels = nearest_level(x, step, fitted_minimum)
    return step, _to_f16((x - levels * step.astype(np.float32)).mean(axis=0))


def settle_exact(x: np.ndarray, step: np.ndarray, minimum: np.ndarray) -> None:
    """Step and minimum, in place, of the columns of x [group, groups] that some pair of float16 gives to the bit.

    A grid of 16 levels whose minimum is no float16 may have another end that is one: GGUF's Q4_0 has the largest
    magnitude at 8 steps, of either sign. Then levels are counted from there, downwards by a negative step.
    """
    if not (x.view(np.uint32) & 0xFFFF).any():  # bfloat16, which no longer lies on any grid exactly
        return
    got = nearest_level(x, step, minimum) * step.astype(np.float32) + minimum.astype(np.float32)
    rounding = np.abs(minimum.astype(np.float32)) / 2048
    near = np.abs(got - x).max(axis=0) <= 0.05 * np.abs(step.astype(np.float32)) + rounding
    left = np.flatnonzero(near & (got != x).any(axis=0))
    for steps in range(_LEVELS, 0, -1):
        if not len(left):
            return
        some = x[:, left]
        low, high = some.min(axis=0), some.max(axis=0)
        unit = _to_f16((high - low) / np.float32(steps))
        settled = np.zeros(len(left), bool)
        for begin in range(_LEVELS - steps + 1):
            for signed, end in ((unit, low), (-unit, high)):
                start = _to_f16(end - np.float32(begin) * signed.astype(np.float32))
                levels = nearest_level(some, signed, start)
                exact = ~settled & (levels * signed.astype(np.float32) + start.astype(np.float32) == some).all(axis=0)
                step[left[exact]], minimum[left[exact]] = signed[exact], start[exact]
                settled |= exact
            if settled.all():
                break
        left = left[~settled]


def _fit(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Step and minimum of each column of x [group, groups] for the least squared error, float32."""
    group = len(x)
    low = x.min(axis=0)
    span = x.max(axis=0) - low
    unit = (x - low) * _reciprocal(span)  # 0 .. 1
    unit_sum = unit.sum(axis=0)
    most, step, minimum = np.full_like(low, -1), np.zeros_like(low), np.zeros_like(low)
    q, product = np.empty_like(x), np.empty_like(x)

    def try_grid(steps: np.float32, below: np.float32) -> None:
        np.multiply(unit, steps, out=q)
        if below:
            np.subtract(q, below, out=q)
        np.rint(q, out=q)
        if steps > _LEVELS:
            np.clip(q, 0, _LEVELS, out=q)
        # The straight line through the points (q, unit); it explains cov^2 / var of the sum of squares.
        q_sum = q.sum(axis=0)
        var = np.multiply(q, q, out=product).sum(axis=0) - q_sum * q_sum / group
        cov = np.multiply(q, unit, out=product).sum(axis=0) - q_sum * unit_sum / group
        slope = cov * _reciprocal(var)
        explained = slope * cov
        better = explained > most
        np.copyto(most, explained, where=better)
        np.copyto(step, slope, where=better)
        np.copyto(minimum, (unit_sum - slope * q_sum) / group, where=better)

    for grid in _GRIDS:
        try_grid(*grid)
    variance = np.multiply(unit, unit, out=product).sum(axis=0) - unit_sum * unit_sum / group
    if np.mean((variance > 0) & (variance - most <= _EXACT * variance)) > _MANY:
        for grid in _PART_GRIDS:
            try_grid(*grid)
    step, minimum = step * span, minimum * span + low
    # The best line may suit other integers better than those it was drawn through: once more.
    q = nearest_level(x, step, minimum)
    q_sum, x_sum = q.sum(axis=0), x.sum(axis=0)
    slope = ((q * x).sum(axis=0) - q_sum * x_sum / group) * _reciprocal((q * q).sum(axis=0) - q_sum * q_sum / group)
    return slope, (x_sum - slope * q_sum) / group


def nearest_level(x: np.ndarray, step: np.ndarray, minimum: np.ndarray) -> np.ndarray:
    """The nearest of the 16 levels of each weight, 0..15 as float32."""
    q = x - minimum.astype(np.float32)
    scale = step.astype(np.float32)
    q *= np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    np.rint(q, out=q)
    return np.clip(q, 0, _LEVELS, out=q)


def _reciprocal(a: np.ndarray) -> np.ndarray:
    """1 / a, and 0 where a is not positive."""
    return np.divide(1, a, out=np.zeros_like(a), where=a > 0)


def _to_f16(a: np.ndarray) -> np.ndarray:
    return np.clip(a, -_F16_MAX, _F16_MAX).astype(np.float16)
