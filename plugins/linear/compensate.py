"""Rounding to four bits such that later weights of a row make up for the errors of earlier ones.

After GPTQ (Frantar et al. 2023), which rounds the columns of a matrix in order and, after each, moves those that are
left to where the layer's output changes least. What it minimizes is (w - v) H (w - v)^T, v the rounded row and H the
second moment x^T x of the layer's inputs. With H = R R^T, R upper triangular, that is the squared length of (w - v) R,
whose element j depends on the first j columns alone: the best column j is the rounded

    w_j + sum over i < j of (w_i - v_i) R_ij / R_jj

which is the same update without the inverse of H. Rows do not depend on each other: a row whose plain rounding errs
less in that measure keeps it.

The columns whose inputs are largest go first, while there are many others left to make up for them: whole groups in
the order of their inputs' mean square, and so the columns within a group. The grid of a group is chosen when it is
reached, for the least error in that measure.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .grids import GridFormat, Grids

DAMPING = 0.01
"""Added to the diagonal of a moment, as a part of its mean: few tokens leave directions that they do not show."""

SMALL_ERROR = 0.01
"""Rows whose plain rounding is nearer than this (relative, root mean square) stay as they are: they lie on a grid."""

_COLUMNS_AT_ONCE = 32
_GROUPS_AT_ONCE = 2048
"""So many that the arrays of one pass stay in the second-level cache."""


@dataclass(frozen=True)
class FeedbackBlock:
    """begin   of its columns in the matrix, a multiple of the group
    order   int [k]: these columns, counted from begin, in the order in which they are rounded: whole groups
    matrix  float32 [k, k]: R_ij / R_jj, strictly upper triangular; row and column i are of column order[i]. Empty:
            zero
    root    float32 [k]: R_jj
    """

    begin: int
    order: np.ndarray
    matrix: np.ndarray
    root: np.ndarray


@dataclass(frozen=True)
class Feedback:
    """Of the inputs of a layer, in blocks of columns that are taken as if they did not vary together."""

    group: int
    blocks: tuple[FeedbackBlock, ...]

    @property
    def width(self) -> int:
        """Columns, a multiple of the group."""
        return sum(len(block.order) for block in self.blocks)


def feedback(moments: Sequence[np.ndarray], group: int) -> Feedback:
    """moments: [k, k] each, symmetric, of consecutive inputs; all k but the last are multiples of the group, and the
    last is padded to one.

    To be made once for all rows of all matrices that read these inputs.
    """
    total = sum(float(np.trace(moment) if moment.ndim == 2 else moment.sum()) for moment in moments)
    mean, begin, blocks = total / sum(map(len, moments)), 0, []
    for moment in moments:
        blocks.append(_block(moment, begin, group, DAMPING * mean if mean > 0 else 1.0))
        begin += len(moment)
    return Feedback(group, tuple(blocks))


def _block(moment: np.ndarray, begin: int, group: int, damping: float) -> FeedbackBlock:
    k = len(moment)
    padded = np.zeros((-(-k // group) * group,) * moment.ndim)
    padded[(slice(k),) * moment.ndim] = moment
    diagonal = (np.diagonal(padded) if moment.ndim == 2 else padded).reshape(-1, group)
    groups = np.argsort(-diagonal.mean(axis=1), kind="stable")
    order = (groups[:, None] * group + np.argsort(-diagonal[groups], axis=1, kind="stable")).reshape(-1)
    if moment.ndim == 1:
        root = np.sqrt(padded[order] + damping).astype(np.float32)
        return FeedbackBlock(begin, order, np.zeros((0, 0), np.float32), root)
    ordered = padded[np.ix_(order, order)]
    while True:
        ordered.reshape(-1)[::len(ordered) + 1] += damping
        try:
            upper = np.linalg.cholesky(ordered[::-1, ::-1])[::-1, ::-1]
            break
        except np.linalg.LinAlgError:  # stored with an error that outweighs the damping
            damping *= 10
    root = np.diagonal(upper)
    return FeedbackBlock(begin, order, np.triu(upper / root, 1).astype(np.float32), root.astype(np.float32))


def output_error(error: np.ndarray, inputs: Feedback) -> np.ndarray:
    """error float32 [N, K] of weights -> [N]: mean squared error of each output, for these inputs."""
    total = np.zeros(len(error), np.float32)
    for block in inputs.blocks:
        part = error[:, block.begin + block.order]
        part = (part + part @ block.matrix if block.matrix.size else part) * block.root
        total += np.einsum("nk,nk->n", part, part)
    return total


def round_plain(w: np.ndarray, grid: GridFormat) -> tuple[np.ndarray, Grids]:
    """w float32 [N, K], K a multiple of the group -> codes u8 [N, K], grids [N, K / group] each: to nearest."""
    groups = w.reshape(-1, grid.group)
    codes, found = np.empty(groups.shape, np.uint8), []
    for begin in range(0, len(groups), _GROUPS_AT_ONCE):
        part = slice(begin, begin + _GROUPS_AT_ONCE)
        x = np.ascontiguousarray(groups[part].T)
        found.append(grid.fit(x))
        codes[part] = grid.nearest(x, found[-1]).T
    grids = tuple(np.concatenate(parts).reshape(len(w), -1) for parts in zip(*found, strict=True))
    return codes.reshape(w.shape), grids


def dequantized(codes: np.ndarray, grids: Grids, grid: GridFormat) -> np.ndarray:
    """float32 [N, K]."""
    groups = codes.reshape(-1, grid.group)
    return grid.values(groups.T, tuple(array.reshape(-1) for array in grids)).T.reshape(codes.shape)


def round_compensated(w: np.ndarray, grid: GridFormat, inputs: Feedback,
                      plain: tuple[np.ndarray, Grids] | None = None) -> tuple[np.ndarray, Grids]:
    """As round_plain, but for the least error of the layer's output. plain: what is kept where it errs less."""
    assert inputs.group == grid.group and inputs.width == w.shape[1], (inputs.group, inputs.width, w.shape)
    codes, grids = round_plain(w, grid) if plain is None else plain
    error = w - dequantized(codes, grids, grid)
    rows = np.flatnonzero((error * error).sum(axis=1) > SMALL_ERROR ** 2 * (w * w).sum(axis=1))
    if not len(rows):
        return codes, grids
    fitted_codes, fitted_grids = _compensated(w[rows], grid, inputs)
    fitted_error = w[rows] - dequantized(fitted_codes, fitted_grids, grid)
    better = output_error(fitted_error, inputs) < output_error(error[rows], inputs)
    codes[rows[better]] = fitted_codes[better]
    for array, fitted in zip(grids, fitted_grids, strict=True):
        array[rows[better]] = fitted[better]
    return codes, grids


def _compensated(w: np.ndarray, grid: GridFormat, inputs: Feedback) -> tuple[np.ndarray, Grids]:
    """Columns of w are rows here, so that what is worked on at a time lies together."""
    n, group = len(w), grid.group
    codes = np.empty((w.shape[1], n), np.uint8)
    grids: dict[int, Grids] = {}
    for block in inputs.blocks:
        columns = np.ascontiguousarray(w.T[block.begin + block.order])
        error, k = np.zeros_like(columns), len(columns)
        for begin in range(0, k, group):
            end = begin + group
            wanted = columns[begin:end]
            if block.matrix.size:
                wanted = wanted + block.matrix[:begin, begin:end].T @ error[:begin]
            place = (block.begin + int(block.order[begin])) // group
            chosen = grids[place] = grid.fit(wanted, np.square(block.root[begin:end, None]))
            if not block.matrix.size:
                code = grid.nearest(wanted, chosen)
                codes[block.begin + block.order[begin:end]] = code
                continue
            for first in range(0, group, _COLUMNS_AT_ONCE):
                last = min(first + _COLUMNS_AT_ONCE, group)
                for j in range(first, last):
                    at = begin + j
                    code = grid.nearest(wanted[j], chosen)
                    codes[block.begin + block.order[at]] = code
                    error[at] = columns[at] - grid.values(code, chosen)
                    wanted[j + 1:last] += block.matrix[at, at + 1:begin + last, None] * error[at]
                wanted[last:] += block.matrix[begin + first:begin + last, begin + last:end].T @ \
                    error[begin + first:begin + last]
    arrays = tuple(np.stack([grids[place][i] for place in range(len(grids))], axis=1) for i in range(len(grids[0])))
    return codes.T, arrays


def compensated_rows(w: np.ndarray, nearest: Callable[[np.ndarray], np.ndarray], inputs: Feedback) -> np.ndarray:
    """Values float32 [N, K] for formats with one scale a row, known before: rows that gain are rounded in order, each
    column making up for those before it, the others to nearest.

    nearest: float32 [.., N] -> the nearest value of each row's format.
    """
    plain = nearest(w.T).T
    if not any(block.matrix.size for block in inputs.blocks):  # columns that do not vary together make up for nothing
        return plain
    padded = np.pad(w, ((0, 0), (0, inputs.width - w.shape[1])))
    found = np.zeros((inputs.width, len(w)), np.float32)
    for block in inputs.blocks:
        columns = np.ascontiguousarray(padded.T[block.begin + block.order])
        error = np.zeros_like(columns)
        for begin in range(0, len(columns), _COLUMNS_AT_ONCE):
            end = min(begin + _COLUMNS_AT_ONCE, len(columns))
            wanted = columns[begin:end]
            if block.matrix.size:
                wanted = wanted + block.matrix[:begin, begin:end].T @ error[:begin]
            for at in range(begin, end):
                value = nearest(wanted[at - begin])
                found[block.begin + block.order[at]] = value
                error[at] = columns[at] - value
                if block.matrix.size:
                    wanted[at - begin + 1:] += block.matrix[at, at + 1:end, None] * error[at]
    fitted = found.T[:, :w.shape[1]]

    def size(values: np.ndarray) -> np.ndarray:
        return output_error(np.pad(w - values, ((0, 0), (0, inputs.width - w.shape[1]))), inputs)
    return np.where((size(fitted) < size(plain))[:, None], fitted, plain)
