"""The normalisations against their references."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ingot.plugins.norm.cpu import Norm, add_norm, norm
from ingot.plugins.norm.reference import layer_norm, rms_norm

from .native import ALL_ISAS, Library, Step, aligned, placed, relative_error

PROBLEMS = [replace(Norm("rms_norm", rows, dim, 1e-6), kind=kind, x_stride=gap and dim + gap, r_stride=gap and dim + 2,
                    y_stride=gap and dim + 1)
            for kind in ("rms_norm", "layer_norm")
            for rows, dim, gap in (("T", 576, 0), ("3*T", 64, 17), ("L", 37, 0), (2, 1, 0), ("T", 130, 5))]
HEADS = Norm("rms_norm", "3*T", 64, 1e-6, x_stride=300, x_group=3)
STEP = Step([(7, 7)], logit_rows=[1, 2, 6])
ROWS = {"T": 7, "3*T": 21, "L": 3, 2: 2}


@pytest.fixture(scope="module", params=ALL_ISAS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library([kernel(p) for p in [*PROBLEMS, HEADS] for kernel in (norm, add_norm)], request.param,
                   tmp_path_factory.mktemp("norm"))


def reference(problem: Norm, x: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None) -> np.ndarray:
    if problem.kind == "rms_norm":
        return rms_norm(x, weight, eps=problem.eps)
    return layer_norm(x, weight, bias, eps=problem.eps)


def rows_of(problem: Norm, stride: int, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=(ROWS[problem.rows], stride or problem.dim)) * 3 + 1
    return placed(values.astype(np.float32))


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p.kind}-{p.rows}-{p.dim}")
def test_equals_reference(library: Library, problem: Norm) -> None:
    p = problem
    x, r = rows_of(p, p.x_stride, 1), rows_of(p, p.r_stride, 2)
    weight, bias = (placed(np.random.default_rng(i).normal(size=p.dim).astype(np.float32)) for i in (3, 4))
    values = x[:, :p.dim]
    for w, b in ((None, None), (weight, None), (weight, bias)):
        for workers in (1, 2, 3):
            y = aligned((len(x), p.y_stride or p.dim))
            library.run(norm(p), STEP, x, w, b, y, workers=workers)
            assert relative_error(y[:, :p.dim], reference(p, values, w, b)) < 1e-5
            assert np.isnan(y[:, p.dim:]).all()

            y, s = aligned(y.shape), aligned(y.shape)
            library.run(add_norm(p), STEP, x, r, w, b, y, s, workers=workers)
            total = values + r[:, :p.dim]
            assert np.array_equal(s[:, :p.dim], total)
            assert relative_error(y[:, :p.dim], reference(p, total, w, b)) < 1e-5


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if not p.x_stride], ids=lambda p: f"{p.kind}-{p.dim}")
def test_in_place(library: Library, problem: Norm) -> None:
    x, r = rows_of(problem, 0, 1), rows_of(problem, 0, 2)
    want, total = reference(problem, x + r, None, None), x + r
    for target in (0, 1):
        operands, y = [placed(x), placed(r)], aligned(x.shape)
        library.run(add_norm(problem), STEP, *operands, None, None, y, operands[target], workers=2)
        assert np.array_equal(operands[target], total)
        assert relative_error(y, want) < 1e-5
    library.run(norm(problem), STEP, x, None, None, x, workers=2)
    assert relative_error(x, reference(problem, rows_of(problem, 0, 1), None, None)) < 1e-5


def test_heads_of_wider_rows(library: Library) -> None:
    """Three heads of 64 out of rows of 300."""
    x, y = placed(np.random.default_rng(0).normal(size=(7, 300)).astype(np.float32)), aligned((21, 64))
    library.run(norm(HEADS), STEP, x, None, None, y, workers=2)
    assert relative_error(y, rms_norm(x[:, :192].reshape(21, 64), eps=HEADS.eps)) < 1e-5


def test_large_mean(library: Library) -> None:
    """A mean a thousand times the deviation: the variance is summed about the mean."""
    problem = PROBLEMS[5]
    assert problem.kind == "layer_norm"
    x = rows_of(problem, 0, 1)
    x[...] += 3000
    y = aligned(x.shape)
    library.run(norm(problem), STEP, x, None, None, y)
    assert relative_error(y, layer_norm(x, eps=problem.eps)) < 1e-4
