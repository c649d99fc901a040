"""Rounding to four bits for a layer's inputs: the output's error falls, and nothing else changes."""
from __future__ import annotations

import numpy as np
import pytest

from ingot.plugins.linear.compensate import (
    DAMPING,
    Feedback,
    dequantized,
    feedback,
    output_error,
    round_compensated,
    round_plain,
)
from ingot.plugins.linear.gpu_formats import FORMATS
from ingot.plugins.linear.gpu_formats import pack as pack_gpu
from ingot.plugins.linear.gpu_formats import unpack as unpack_gpu
from ingot.plugins.linear.grids import E2M1Grid, GridFormat, MinimumGrid, SymmetricGrid
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


def mean_error(got: np.ndarray, w: np.ndarray, moment: np.ndarray) -> float:
    """Mean square of the error of the outputs, relative to the outputs."""
    error = (got - w).astype(np.float64)
    return float(np.sum(error @ moment * error) / np.sum(w @ moment * w))


@pytest.mark.parametrize(("n", "k"), [(40, 256), (33, 200)], ids=str)
def test_outputs_are_nearer_than_by_plain_rounding(n: int, k: int) -> None:
    """The second width is no multiple of 32."""
    w, moment = weights(n, k), correlated(k)
    plain = mean_error(dequantize(w, W4), w, moment)
    assert mean_error(rounded(w, feedback([moment], 32)), w, moment) < 0.3 * plain


def test_inputs_that_do_not_vary_together_gain_next_to_nothing() -> None:
    w, moment = weights(40, 128), np.eye(128, dtype=np.float32)
    got, plain = (np.square(v - w).sum(axis=1) for v in (rounded(w, feedback([moment], 32)), dequantize(w, W4)))
    assert (got <= plain).all() and got.sum() > 0.97 * plain.sum()


def test_feedback_is_the_factor_of_the_moment() -> None:
    """H = R R^T with R = U D, U of unit diagonal, D diagonal: then U^-1 H U^-T is diagonal. Largest inputs first."""
    moment = correlated(64)
    found, = feedback([moment], 32).blocks
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
    np.testing.assert_array_equal(pack(w, W4, feedback([correlated(256)], 32)), pack(w, W4))


def test_rows_do_not_depend_on_each_other() -> None:
    """So a matrix can be packed piece by piece. Only the order of sums may differ with the number of rows."""
    w, inputs = weights(48, 128), feedback([correlated(128)], 32)
    pieces = np.concatenate([rounded(w[:16], inputs), rounded(w[16:], inputs)])
    assert np.mean(pieces != rounded(w, inputs)) < 0.01
    np.testing.assert_array_equal(pack(w, W4, inputs), pack(w, W4, feedback([correlated(128)], 32)))


def test_channels_that_are_never_seen() -> None:
    """Such a channel gets its own weights rounded; where none was seen, all are."""
    w, moment = weights(16, 64), correlated(64)
    moment[:, 5] = moment[5] = 0
    got = rounded(w, feedback([moment], 32))
    assert np.isfinite(got).all() and np.abs(got - w)[:, 5].max() < 0.5 < np.abs(got - w).max()
    silent = rounded(w, feedback([np.zeros_like(moment)], 32))
    assert np.square(silent - w).sum() <= np.square(dequantize(w, W4) - w).sum()


GRIDS = [MinimumGrid(), SymmetricGrid(128), SymmetricGrid(64), MinimumGrid(64), MinimumGrid(128),
         E2M1Grid(0.002)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_grid_gains_and_no_row_loses(grid: GridFormat) -> None:
    w, moment = weights(24, 256), correlated(256)
    inputs = feedback([moment], grid.group)
    plain, fitted = (dequantized(*found, grid) - w
                     for found in (round_plain(w, grid), round_compensated(w, grid, inputs)))
    assert (output_error(fitted, inputs) <= output_error(plain, inputs) * 1.0001).all()
    assert output_error(fitted, inputs).sum() < 0.5 * output_error(plain, inputs).sum()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_what_lies_on_a_grid_stays_there(grid: GridFormat) -> None:
    codes, grids = round_plain(weights(8, 256), grid)
    w = dequantized(codes, grids, grid)
    again = dequantized(*round_plain(w, grid), grid)
    assert np.linalg.norm(again - w) <= 2e-3 * np.linalg.norm(w)


@pytest.mark.parametrize(("grid", "mean"), [(SymmetricGrid(128), 0.0), (MinimumGrid(128), 0.5)], ids=str)
def test_a_search_errs_less_than_the_largest_weight_at_the_last_level(grid: GridFormat, mean: float) -> None:
    w = weights(64, 256) + np.float32(mean)
    groups = w.reshape(-1, 128)
    scale = np.abs(groups).max(axis=1, keepdims=True) / 7.5
    simple = (np.rint(groups / scale).clip(-8, 7) * scale).reshape(w.shape)
    assert np.square(dequantized(*round_plain(w, grid), grid) - w).sum() < 0.93 * np.square(simple - w).sum()


def test_output_error_is_that_of_the_moment() -> None:
    moment, error = correlated(64), weights(5, 64) / 10
    damped = moment + DAMPING * np.diagonal(moment).mean() * np.eye(64)
    want = np.einsum("nk,kl,nl->n", error, damped, error)
    np.testing.assert_allclose(output_error(error, feedback([moment], 32)), want, rtol=1e-3)


def test_blocks_of_a_moment_are_compensated_apart() -> None:
    """As two layers of half the width, one after the other."""
    w, moment = weights(16, 256), correlated(256)
    halves = [moment[:128, :128], moment[128:, 128:]]
    got = dequantized(*round_compensated(w, SymmetricGrid(64), feedback(halves, 64)), SymmetricGrid(64))
    assert np.linalg.norm(got - w) > 0
    for part, half in ((slice(0, 128), halves[0]), (slice(128, 256), halves[1])):
        alone = feedback([half], 64)
        plain = dequantized(*round_plain(w[:, part], SymmetricGrid(64)), SymmetricGrid(64)) - w[:, part]
        assert output_error(got[:, part] - w[:, part], alone).sum() < 0.6 * output_error(plain, alone).sum()


def test_a_moment_that_is_no_moment_is_damped_until_it_is_one() -> None:
    moment = correlated(64)
    moment[0, 1] = moment[1, 0] = 3 * np.sqrt(moment[0, 0] * moment[1, 1])
    inputs = feedback([moment], 32)
    assert np.isfinite(inputs.blocks[0].matrix).all() and np.isfinite(rounded(weights(8, 64), inputs)).all()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_grids_are_chosen_for_what_matters(grid: GridFormat) -> None:
    """Sizes of the inputs alone: nothing is made up for, but the channels that count are nearer."""
    w, sizes = weights(24, 256), np.ones(256, np.float32)
    sizes[::grid.group] = 900
    inputs = feedback([sizes], grid.group)
    plain, fitted = (dequantized(*found, grid) - w
                     for found in (round_plain(w, grid), round_compensated(w, grid, inputs)))
    assert (output_error(fitted, inputs) <= output_error(plain, inputs) * 1.0001).all()
    assert output_error(fitted, inputs).sum() < 0.6 * output_error(plain, inputs).sum()


@pytest.mark.parametrize("form", ["fp8", "int8"])
def test_eight_bits_by_rows_gain_and_no_row_loses(form: str) -> None:
    w, moment = weights(24, 200), correlated(200)
    inputs = feedback([moment], 32)
    plain, fitted = (unpack_gpu(pack_gpu(w, FORMATS[form], inputs=given)) - w for given in (None, inputs))
    before, after = (output_error(np.pad(error, ((0, 0), (0, 24))), inputs) for error in (plain, fitted))
    assert (after <= before * 1.0001).all() and after.sum() < 0.4 * before.sum()
    again = pack_gpu(w, FORMATS[form], inputs=inputs)
    np.testing.assert_array_equal(unpack_gpu(again) - w, fitted)
