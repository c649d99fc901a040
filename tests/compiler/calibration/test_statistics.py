"""What is kept of a layer's inputs, and in how few bytes."""
from __future__ import annotations

import numpy as np
import pytest

from ingot.compiler.calibration import statistics as module
from ingot.compiler.calibration.statistics import InputStatistics, block_spans


def statistics(width: int, count: int = 500) -> InputStatistics:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((count, 8)) @ rng.standard_normal((8, width))) * np.exp(2 * rng.standard_normal(width))
    x[:, 0] = 0  # a channel that is never used
    blocks = tuple((x[:, a:b].T @ x[:, a:b] / count).astype(np.float32) for a, b in block_spans(width))
    return InputStatistics(np.abs(x).max(axis=0).astype(np.float32), blocks, count, x[:5].astype(np.float32))


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BLOCK", 256)


@pytest.mark.parametrize("width", [1, 96, 256, 300, 700])
def test_bytes_and_back(width: int) -> None:
    given = statistics(width)
    got = InputStatistics.from_bytes(given.to_bytes())
    assert got.count == 500 and np.array_equal(got.amax, given.amax)
    np.testing.assert_allclose(got.rows, given.rows, rtol=2.0 ** -8)
    np.testing.assert_allclose(got.mean_square, given.mean_square, rtol=1e-6)
    for a, b in zip(got.blocks, given.blocks, strict=True):
        root = np.sqrt(np.diagonal(b))
        assert np.abs(a - b).max(initial=0) <= (2e-5 * np.outer(root, root)).max()
        np.testing.assert_array_equal(a, a.T)
    assert len(given.to_bytes()) < 0.6 * 4 * sum(block.size for block in given.blocks) + 28 * width + 64


def test_wrong_length() -> None:
    with pytest.raises(ValueError, match="statistics of 96 channels take"):
        InputStatistics.from_bytes(statistics(96).to_bytes()[:-1])


def test_spans_are_multiples_of_the_largest_group() -> None:
    assert block_spans(256) == [(0, 256)] and block_spans(300) == [(0, 256), (256, 300)]
    assert all(begin % 128 == 0 and end - begin <= 256 for width in range(1, 2000, 37)
               for begin, end in block_spans(width))


def test_scaled_is_of_scaled_inputs() -> None:
    given, factor = statistics(96), np.linspace(0.5, 2, 96).astype(np.float32)
    got = given.scaled(factor)
    np.testing.assert_allclose(got.amax, given.amax * factor, rtol=1e-6)
    np.testing.assert_allclose(got.mean_square, given.mean_square * factor ** 2, rtol=1e-5)


@pytest.mark.parametrize(("begin", "end", "group", "sizes"), [
    (0, 700, 64, [256, 256, 188]), (256, 512, 64, [256]), (128, 384, 128, [128, 128]), (64, 128, 64, [64]),
    (512, 700, 64, [188])])
def test_blocks_between_channels(begin: int, end: int, group: int, sizes: list[int]) -> None:
    given = statistics(700)
    found = given.between(begin, end, group)
    assert [block.shape for block in found] == [(size, size) for size in sizes]
    np.testing.assert_array_equal(np.concatenate([np.diagonal(block) for block in found]),
                                  given.mean_square[begin:end])


@pytest.mark.parametrize("group", [0, 64])
def test_a_span_that_ends_within_a_group_leaves_the_diagonal(group: int) -> None:
    given = statistics(700)
    squares, = given.between(224, 320, group)
    np.testing.assert_array_equal(squares, given.mean_square[224:320])
