"""Softmax, cumsum, topk, sort, argmax, gather and scatter against their references."""
from __future__ import annotations

import numpy as np
import pytest

from ingot.plugins.select import cpu
from ingot.plugins.select.reference import scatter, softmax, topk

from .native import ALL_ISAS, Library, Step, aligned, placed, relative_error

STEP = Step([(5, 5)], logit_rows=[4, 0, 3])
WIDTHS = (1, 7, 16, 61, 130)
TOPK = [(1, 1, True, "f32"), (60, 4, True, "f32"), (128, 8, True, "f32"), (33, 33, True, "f32"), (20, 6, False, "f32"),
        (20, 1, True, "i32"), (50, 9, False, "i32")]
KERNELS = [
    *(cpu.softmax("2*T", n) for n in WIDTHS), *(cpu.cumsum("2*T", n, t) for n in WIDTHS for t in ("f32", "i32")),
    *(cpu.argmax("2*T", n, t) for n in WIDTHS for t in ("f32", "i32")),
    *(cpu.topk("T", n, k, largest, t) for n, k, largest, t in TOPK),
    *(cpu.sort("T", 70, descending, t) for descending in (True, False) for t in ("f32", "i32")),
    *(kernel("T", 12, 5, size) for kernel in (cpu.gather, cpu.take) for size in (1, 2, 4)),
    *(cpu.scatter("T", 12, 5, source, size) for source in (0, 5, 9) for size in (1, 4)),
    cpu.gather_rows("L", 37), cpu.gather_rows("L", 37, x_stride=50), cpu.gather_rows("T", 3, 1),
]


@pytest.fixture(scope="module", params=ALL_ISAS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(KERNELS, request.param, tmp_path_factory.mktemp("select"))


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def rows_of(rows: int, width: int, dtype: str = "f32", ties: bool = False) -> np.ndarray:
    values = rng().integers(-3, 3, (rows, width)) if ties or dtype == "i32" else rng().normal(size=(rows, width)) * 3
    return placed(values.astype(np.float32 if dtype == "f32" else np.int32))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("workers", [1, 3])
def test_softmax(library: Library, width: int, workers: int) -> None:
    x, y = rows_of(10, width), aligned((10, width))
    x[1] += 500
    x[2, ::2] = -np.inf
    if width == 1:
        x[2] = 0
    want = softmax(x)
    library.run(cpu.softmax("2*T", width), STEP, x, y, workers=workers)
    assert relative_error(y, want) < 1e-6
    library.run(cpu.softmax("2*T", width), STEP, x, x, workers=workers)
    assert np.array_equal(x, y)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", ["f32", "i32"])
def test_cumsum_and_argmax(library: Library, width: int, dtype: str) -> None:
    for ties in (False, True):
        x = rows_of(10, width, dtype, ties)
        sums, best = aligned(x.shape, x.dtype.type), aligned((10,), np.int32)
        library.run(cpu.cumsum("2*T", width, dtype), STEP, x, sums, workers=2)
        assert relative_error(sums, np.cumsum(x, axis=-1, dtype=np.float64)) < 1e-6
        library.run(cpu.argmax("2*T", width, dtype), STEP, x, best, workers=2)
        assert np.array_equal(best, np.argmax(x, axis=-1))


def test_argmax_of_nan_and_infinities(library: Library) -> None:
    x, best = rows_of(10, 61), aligned((10,), np.int32)
    x[0, 5], x[0, 9:11], x[1] = np.inf, np.nan, -np.inf
    library.run(cpu.argmax("2*T", 61), STEP, x, best)
    assert best[0] == 9 and best[1] == 0 and np.array_equal(best[2:], np.argmax(x[2:], axis=-1))


@pytest.mark.parametrize(("width", "k", "largest", "dtype"), TOPK)
@pytest.mark.parametrize("ties", [False, True])
def test_topk(library: Library, width: int, k: int, largest: bool, dtype: str, ties: bool) -> None:
    x = rows_of(5, width, dtype, ties)
    if dtype == "f32":
        x[0, ::3], x[1, ::4], x[2, ::2], x[3, -1] = np.nan, np.inf, -0.0, -np.inf
    values, indices = aligned((5, k), x.dtype.type), aligned((5, k), np.int32)
    library.run(cpu.topk("T", width, k, largest, dtype), STEP, x, values, indices, workers=2)
    want_values, want_indices = topk(x, k, largest)
    assert np.array_equal(indices, want_indices)
    assert np.array_equal(values, want_values, equal_nan=dtype == "f32")


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("dtype", ["f32", "i32"])
def test_sort(library: Library, descending: bool, dtype: str) -> None:
    for ties in (False, True):
        x = rows_of(5, 70, dtype, ties)
        values, indices = aligned(x.shape, x.dtype.type), aligned(x.shape, np.int32)
        library.run(cpu.sort("T", 70, descending, dtype), STEP, x, values, indices, workers=3)
        order = np.argsort(-x if descending else x, axis=-1, kind="stable")
        assert np.array_equal(indices, order)
        assert np.array_equal(values, np.take_along_axis(x, order, -1))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gather_and_take(library: Library, size: int) -> None:
    dtype = {1: np.uint8, 2: np.uint16, 4: np.float32}[size]
    x, index = placed(rng().integers(0, 200, (5, 12)).astype(dtype)), placed(rng().integers(0, 12, (5, 5), np.int32))
    y = aligned((5, 5), dtype)
    library.run(cpu.gather("T", 12, 5, size), STEP, x, index, y, workers=2)
    assert np.array_equal(y, np.take_along_axis(x, index, -1))
    library.run(cpu.take("T", 12, 5, size), STEP, x, index[3].copy(), y, workers=2)
    assert np.array_equal(y, x[:, index[3]])


@pytest.mark.parametrize("source_width", [0, 5, 9])
@pytest.mark.parametrize("size", [1, 4])
def test_scatter(library: Library, source_width: int, size: int) -> None:
    dtype = {1: np.uint8, 4: np.float32}[size]
    x, index = placed(rng().integers(0, 200, (5, 12)).astype(dtype)), placed(rng().integers(0, 12, (5, 5), np.int32))
    source = placed(rng().integers(0, 200, (5, source_width or 1)).astype(dtype))
    y = aligned(x.shape, dtype)
    want = scatter(x, index, source if source_width else source[0, 0].item())
    library.run(cpu.scatter("T", 12, 5, source_width, size), STEP, x, index, source, y, workers=2)
    assert np.array_equal(y, want)
    library.run(cpu.scatter("T", 12, 5, source_width, size), STEP, x, index, source, x, workers=2)
    assert np.array_equal(x, want)


def test_gather_rows(library: Library) -> None:
    x, y = placed(rng().normal(size=(5, 50)).astype(np.float32)), aligned((3, 37))
    library.run(cpu.gather_rows("L", 37, x_stride=50), STEP, x, STEP.logit_rows, y, workers=2)
    assert np.array_equal(y, x[[4, 0, 3], :37])
    dense = placed(x[:, :37])
    library.run(cpu.gather_rows("L", 37), STEP, dense, STEP.logit_rows, y, workers=2)
    assert np.array_equal(y, dense[[4, 0, 3]])
    flags, index = placed(rng().integers(0, 2, (9, 3)).astype(np.uint8)), np.array([8, 0, 0, 5, 7], np.int32)
    out = aligned((5, 3), np.uint8)
    library.run(cpu.gather_rows("T", 3, 1), STEP, flags, index, out, workers=2)
    assert np.array_equal(out, flags[index])
