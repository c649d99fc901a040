"""matmul of activations against numpy."""
from __future__ import annotations

import numpy as np
import pytest

from ingot.plugins.constants import Rows
from ingot.plugins.matmul.cpu import Matmul, matmul
from ingot.plugins.matmul.reference import matmul as reference

from .native import ALL_ISAS, Library, Step, aligned, placed, relative_error

T = 13
STEP = Step.of_tokens(T)
PROBLEMS = {
    "plain": Matmul(("T", 40), (40, 70)),
    "one_row": Matmul((1, 300), (300, 130)),
    "deep": Matmul((9, 700), (700, 33)),
    "inner_tokens": Matmul((4, 5, "T"), (4, "T", 6)),
    "batch_broadcast": Matmul((3, 1, "2*T", 16), (2, 16, 64)),
    "token_batch": Matmul(("T", 4, 8), ("T", 8, 3)),
    "one_matrix_for_all": Matmul((3, "T", 20), (20, 17)),
    "outer": Matmul((7, 1), (1, 200)),
    "b_transposed": Matmul((2, "T", 24), (2, 24, "T"), b_strides=("24*T", 1, 24)),
    "b_transposed_deep": Matmul((50, 520), (520, 70), b_strides=(1, 520)),
    "heads_of_tokens": Matmul((4, "T", 16), (4, 16, "T"), (16, 64, 1), (16, 1, 64)),
    "a_transposed": Matmul((30, "T"), ("T", 50), a_strides=(1, 30)),
}


@pytest.fixture(scope="module", params=ALL_ISAS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library([matmul(p) for p in PROBLEMS.values()], request.param, tmp_path_factory.mktemp("matmul"))


def extent(dim: Rows) -> int:
    if isinstance(dim, int):
        return dim
    return int(dim.rpartition("*")[0] or 1) * T


def operand(shape: tuple[Rows, ...], strides: tuple[Rows, ...] | None, seed: int) -> np.ndarray:
    """Random values, seen through the strides; the memory behind them ends where the values do."""
    extents = tuple(map(extent, shape))
    memory = placed(np.random.default_rng(seed).normal(size=int(np.prod(extents))).astype(np.float32))
    if strides is None:
        return memory.reshape(extents)
    return np.lib.stride_tricks.as_strided(memory, extents, tuple(4 * extent(stride) for stride in strides))


@pytest.mark.parametrize("name", PROBLEMS)
def test_equals_reference(library: Library, name: str) -> None:
    p = PROBLEMS[name]
    a, b = operand(p.a_shape, p.a_strides, 1), operand(p.b_shape, p.b_strides, 2)
    want = reference(a, b)
    results = []
    for workers in (1, 2, 3):
        c = aligned((want.size + 8,))
        library.run(matmul(p), STEP, a, b, c, workers=workers)
        assert np.isnan(c[want.size:]).all(), "wrote past the end"
        results.append(c[:want.size].reshape(want.shape))
        assert relative_error(results[-1], want) < 1e-5
        assert np.array_equal(results[-1], results[0])


def test_extents_that_do_not_match() -> None:
    with pytest.raises(AssertionError, match="do not broadcast"):
        Matmul((2, 4, 5), (3, 5, 6))
