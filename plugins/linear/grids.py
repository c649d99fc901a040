"""Grids of 16 values on which a group of weights is rounded: how each format lays one, and which value is nearest.

Groups are the columns of x [group, n], so that sums over a group are sums of rows.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..gpu.floats import E2M1_MAX, from_e2m1, from_e4m3, to_e2m1, to_e4m3
from ..scheme import BLOCK
from .quantize_weights import fit_w4, nearest_level, settle_exact

Grids = tuple[np.ndarray, ...]
"""What tells the grid of each group, arrays [n]."""


class GridFormat(Protocol):
    @property
    def group(self) -> int:
        """Channels of K that share a grid."""
        ...

    def fit(self, x: np.ndarray, weight: np.ndarray | None = None) -> Grids:
        """float32 x [group, n] -> the grids with the least squared error that a short search finds.

        weight: float32 [group, 1], how much the error of each row of x matters; equally without it.
        """
        ...

    def nearest(self, x: np.ndarray, grids: Grids) -> np.ndarray:
        """float32 x [.., n] -> codes u8 of the nearest values."""
        ...

    def values(self, codes: np.ndarray, grids: Grids) -> np.ndarray:
        """codes [.., n] -> float32."""
        ...


@dataclass(frozen=True)
class MinimumGrid:
    """step * code + minimum, both float16: CPUs' w4a8, for 32 channels, and GPUs' int4 with minimums."""

    group: int = BLOCK

    def fit(self, x: np.ndarray, weight: np.ndarray | None = None) -> Grids:
        """A straight line through the points (code, weight), once more with what matters most."""
        plain = fit_w4(x)
        if weight is None:
            settle_exact(x, *plain)
            return plain
        best, error = plain, _error(self, x, plain, weight)
        for _ in range(2):
            codes = nearest_level(x, *best)
            total = weight.sum()
            q_mean, x_mean = (weight * codes).sum(axis=0) / total, (weight * x).sum(axis=0) / total
            spread = (weight * (codes - q_mean) ** 2).sum(axis=0)
            slope = (weight * (codes - q_mean) * (x - x_mean)).sum(axis=0)
            step = np.divide(slope, spread, out=plain[0].astype(np.float32), where=spread > 0)
            tried = _half(step), _half(x_mean - step * q_mean)
            found = _error(self, x, tried, weight)
            better = found < error
            best = tuple(np.where(better, new, old) for new, old in zip(tried, best, strict=True))  # type: ignore
            error = np.where(better, found, error)
        return best

    def nearest(self, x: np.ndarray, grids: Grids) -> np.ndarray:
        return nearest_level(x, *grids).astype(np.uint8)

    def values(self, codes: np.ndarray, grids: Grids) -> np.ndarray:
        return codes * grids[0].astype(np.float32) + grids[1].astype(np.float32)


# What the largest weight of a group is divided by: 8 levels lie on one side of zero and 7 on the other, and the scale
# has a sign, so that the weight farthest from zero always gets the side with 8. Lower ones waste the outermost level,
# higher ones cut the largest weight off for a finer grid.
_DIVISORS = (8.0, 7.5, 7.0, 8.5, 9.0, 9.6)

# A group that lies on a grid already may not reach its outermost level; 1 to 4 steps have a multiple among these and 8.
_PART_DIVISORS = (6.0, 5.0)
_EXACT, _MANY = 1e-5, 0.02
"""A group lies on a grid if less than that part of its square is left; where so many do, others are tried for parts."""

_MIDDLE = np.float32(8)


@dataclass(frozen=True)
class SymmetricGrid:
    """GPUs' int4 without minimums: (code - 8) * scale, scale float16 with a sign."""

    group: int

    def fit(self, x: np.ndarray, weight: np.ndarray | None = None) -> Grids:
        most = np.take_along_axis(x, np.abs(x).argmax(axis=0)[None], 0)[0]
        best, found = np.full(x.shape[1], np.inf, np.float32), np.zeros(x.shape[1], np.float16)

        def attempt(divisor: float) -> None:
            candidate = (most / np.float32(-divisor)).astype(np.float32)
            shifted = _codes(x, candidate) - _MIDDLE
            matters = shifted if weight is None else shifted * weight
            square, product = np.einsum("gn,gn->n", matters, shifted), np.einsum("gn,gn->n", matters, x)
            tried = _half(np.divide(product, square, out=candidate.copy(), where=square > 0))
            error = _error(self, x, (tried,), weight)
            better = error < best
            np.copyto(best, error, where=better)
            np.copyto(found, tried, where=better)

        for divisor in _DIVISORS:
            attempt(divisor)
        if weight is None and np.mean((most != 0) & (best <= _EXACT * np.einsum("gn,gn->n", x, x))) > _MANY:
            for divisor in _PART_DIVISORS:
                attempt(divisor)
        return (found,)

    def nearest(self, x: np.ndarray, grids: Grids) -> np.ndarray:
        return _codes(x, grids[0].astype(np.float32)).astype(np.uint8)

    def values(self, codes: np.ndarray, grids: Grids) -> np.ndarray:
        return (codes - _MIDDLE) * grids[0].astype(np.float32)


def _error(grid: GridFormat, x: np.ndarray, grids: Grids, weight: np.ndarray | None) -> np.ndarray:
    """Squared error of each group, float32 [n]."""
    difference = grid.values(grid.nearest(x, grids), grids) - x
    return np.asarray(np.einsum("gn,gn->n", difference if weight is None else difference * weight, difference))


def _half(values: np.ndarray) -> np.ndarray:
    return np.clip(values, -65504, 65504).astype(np.float16)


def _codes(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float32 0..15."""
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    codes = x * inverse
    codes += _MIDDLE
    np.rint(codes, out=codes)
    return np.clip(codes, 0, 15, out=codes)


@dataclass(frozen=True)
class E2M1Grid:
    """nvfp4: the values of e2m1 times an e4m3 scale for 16 channels, times the factor of the whole matrix."""

    factor: float
    group: int = 16

    def fit(self, x: np.ndarray, weight: np.ndarray | None = None) -> Grids:
        """The largest weight becomes the largest value, 6, or the next, 4, whose neighbours are nearer, or something
        between."""
        most = np.abs(x).max(axis=0) / np.float32(self.factor)
        best, scale = np.full(x.shape[1], np.inf, np.float32), np.zeros(x.shape[1], np.uint8)
        for top in (float(E2M1_MAX), 5.0, 4.0) if weight is None else (float(E2M1_MAX), 5.5, 5.0, 4.5, 4.0, 7.0):
            candidate = to_e4m3(most / np.float32(top))
            error = _error(self, x, (candidate,), weight)
            better = error < best
            best, scale = np.where(better, error, best), np.where(better, candidate, scale)
        return (scale,)

    def nearest(self, x: np.ndarray, grids: Grids) -> np.ndarray:
        scale = from_e4m3(grids[0]) * np.float32(self.factor)
        return to_e2m1(x * np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0))

    def values(self, codes: np.ndarray, grids: Grids) -> np.ndarray:
        return (from_e2m1(codes) * (from_e4m3(grids[0]) * np.float32(self.factor))).astype(np.float32)
