"""Rounding to four bits for a layer's inputs: the output's error falls, and nothing else changes."""
from __future__ import annotations

import numpy as np
import pytest

from ingot.plugins.linear.compensate import DAMPING, Feedback, feedback
from ingot.plugins.linear.pack import dequantize, pack, unpack
from ingot.plugins.scheme import SCHEMES

W4 = SCHEMES["w4a8"]


def correlated(k: int, tokens: int = 2000) -> np.ndarray:
    """Mean of x^T x of inputs that lie near a space of k / 4 dimensions, some channels much larger than others."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((tokens, k // 4)) @ rng.standard_normal((k // 4, k)) + rng.standard_normal((tokens, k)) / 4
    x *= np.exp(rng.standard_normal(k))
    return (x.T @ x / tokens).astype(np.float32)


def weights(n: int, k: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((n, k)).astype(np.float32)


def rounded(w: np.ndarray, inputs: Feedback | None) -> np.ndarray:
    return unpack(pack(w, W4, inputs), w.shape[0], w.shape[1], W4)


def output_error(got: np.ndarray, w: np.ndarray, moment: np.ndarray) -> float:
    """Mean square of the error of the outputs, relative to the outputs."""
    error = (got - w).astype(np.float64)
    return float(np.sum(error @ moment * error) / np.sum(w @ moment * w))


@pytest.mark.parametrize(("n", "k"), [(40, 256), (33, 200)], ids=str)
def test_outputs_are_nearer_than_by_plain_rounding(n: int, k: int) -> None:
    """The second width is no multiple of 32."""
    w, moment = weights(n, k), correlated(k)
    plain = output_error(dequantize(w, W4), w, moment)
    assert output_error(rounded(w, feedback(moment)), w, moment) < 0.3 * plain


def test_inputs_that_do_not_vary_together_leave_plain_rounding() -> None:
    w, moment = weights(40, 128), np.eye(128, dtype=np.float32)
    np.testing.assert_array_equal(rounded(w, feedback(moment)), dequantize(w, W4))


def test_feedback_is_the_factor_of_the_moment() -> None:
    """H = R R^T with R = U D, U of unit diagonal, D diagonal: then U^-1 H U^-T is diagonal. Largest inputs first."""
    moment = correlated(64)
    found = feedback(moment)
    groups = found.order.reshape(2, 32)
    sizes = np.diagonal(moment)[groups]
    assert sorted(found.order) == list(range(64)) and len(set((groups // 32).reshape(-1)[:32])) == 1
    assert sizes[0].mean() >= sizes[1].mean() and (np.diff(sizes, axis=1) <= 0).all()
    damped = moment[np.ix_(found.order, found.order)] + DAMPING * np.diagonal(moment).mean() * np.eye(64)
    inverse = np.linalg.inv(found.matrix.astype(np.float64) + np.eye(64))
    diagonal = inverse @ damped @ inverse.T
    assert np.abs(diagonal - np.diag(np.diagonal(diagonal))).max() < 1e-4 * np.diagonal(diagonal).max()


def test_weights_on_a_grid_stay() -> None:
    rng = np.random.default_rng(0)
    grid = ((rng.integers(0, 16, (40, 8, 32)) - 7) * rng.uniform(1, 2, (40, 8, 1)) / 64).astype(np.float32)
    w = grid.reshape(40, 256)
    np.testing.assert_array_equal(pack(w, W4, feedback(correlated(256))), pack(w, W4))


def test_rows_do_not_depend_on_each_other() -> None:
    """So a matrix can be packed piece by piece. Only the order of sums may differ with the number of rows."""
    w, inputs = weights(48, 128), feedback(correlated(128))
    pieces = np.concatenate([rounded(w[:16], inputs), rounded(w[16:], inputs)])
    assert np.mean(pieces != rounded(w, inputs)) < 0.01
    np.testing.assert_array_equal(pack(w, W4, inputs), pack(w, W4, feedback(correlated(128))))


def test_channels_that_are_never_seen() -> None:
    """Such a channel gets its own weights rounded; where none was seen, all are."""
    w, moment = weights(16, 64), correlated(64)
    moment[:, 5] = moment[5] = 0
    got = rounded(w, feedback(moment))
    assert np.isfinite(got).all() and np.abs(got - w)[:, 5].max() < 0.5 < np.abs(got - w).max()
    np.testing.assert_array_equal(rounded(w, feedback(np.zeros_like(moment))), dequantize(w, W4))
