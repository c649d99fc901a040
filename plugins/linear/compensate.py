"""Rounding to four bits such that later weights of a row make up for the errors of earlier ones.

After GPTQ (Frantar et al. 2023), which rounds the columns of a matrix in order and, after each, moves those that are
left to where the layer's output changes least. What it minimizes is (w - v) H (w - v)^T, v the rounded row and H the
second moment x^T x of the layer's inputs. With H = R R^T, R upper triangular, that is the squared length of (w - v) R,
whose element j depends on the first j columns alone: the best column j is the rounded

    w_j + sum over i < j of (w_i - v_i) R_ij / R_jj

which is the same update without the inverse of H. Rows do not depend on each other.

The columns whose inputs are largest go first, while there are many others left to make up for them: groups of 32 in
the order of their inputs' mean square, and so the columns within a group. Step and minimum of a group are chosen when
it is reached.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..scheme import BLOCK
from .quantize_weights import fit_w4, nearest_level, quantize_w4

DAMPING = 0.01
"""Added to the diagonal of a moment, as a part of its mean: few tokens leave directions that they do not show."""

SMALL_ERROR = 0.01
"""Rows whose plain rounding is nearer than this (relative, root mean square) stay as they are: they lie on a grid."""


@dataclass(frozen=True)
class Feedback:
    """order   int [K]: the columns in the order in which they are rounded, whole groups of 32
    matrix  float32 [K, K]: R_ij / R_jj, strictly upper triangular; row and column i are of column order[i]
    """

    order: np.ndarray
    matrix: np.ndarray


def feedback(moment: np.ndarray) -> Feedback:
    """moment [K, K], symmetric, of a layer's inputs; K is padded to a multiple of 32.

    To be made once for all rows of all matrices that read these inputs.
    """
    k = len(moment)
    padded = np.zeros((-(-k // BLOCK) * BLOCK,) * 2)
    padded[:k, :k] = moment
    diagonal = np.diagonal(padded).reshape(-1, BLOCK)
    groups = np.argsort(-diagonal.mean(axis=1), kind="stable")
    order = (groups[:, None] * BLOCK + np.argsort(-diagonal[groups], axis=1, kind="stable")).reshape(-1)
    mean = diagonal.sum() / k
    ordered = padded[np.ix_(order, order)]
    ordered.reshape(-1)[::len(ordered) + 1] += DAMPING * mean if mean > 0 else 1.0
    upper = np.linalg.cholesky(ordered[::-1, ::-1])[::-1, ::-1]
    return Feedback(order, np.triu(upper / np.diagonal(upper), 1).astype(np.float32))


def quantize_w4_compensated(w: np.ndarray, inputs: Feedback) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As quantize_w4, which see, but for the least error of the layer's output."""
    q, step, minimum = quantize_w4(w)
    plain = q.reshape(len(w), -1, BLOCK) * step.astype(np.float32)[..., None] + minimum.astype(np.float32)[..., None]
    error = w - plain.reshape(w.shape)
    rows = np.flatnonzero((error * error).sum(axis=1) > SMALL_ERROR ** 2 * (w * w).sum(axis=1))
    if len(rows):
        q[rows], step[rows], minimum[rows] = _compensated(w[rows], inputs)
    return q, step, minimum


def _compensated(w: np.ndarray, inputs: Feedback) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Columns of w are rows here, so that what is worked on at a time lies together."""
    columns = w.T[inputs.order]
    k, n = columns.shape
    error, q = np.zeros_like(columns), np.empty((k, n), np.uint8)
    step, minimum = np.empty((k // BLOCK, n), np.float16), np.empty((k // BLOCK, n), np.float16)
    for begin in range(0, k, BLOCK):
        end, group = begin + BLOCK, inputs.order[begin] // BLOCK
        wanted = columns[begin:end] + inputs.matrix[:begin, begin:end].T @ error[:begin]
        step[group], minimum[group] = fit_w4(wanted)
        scale, low = step[group].astype(np.float32), minimum[group].astype(np.float32)
        for j in range(begin, end):
            level = nearest_level(wanted[j - begin], scale, low)
            q[inputs.order[j]] = level
            error[j] = columns[j] - (level * scale + low)
            wanted[j - begin + 1:] += inputs.matrix[j, j + 1:end, None] * error[j]
    return q.T, step.T, minimum.T
