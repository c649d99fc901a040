"""The small floating-point types against their definition, value by value."""
from __future__ import annotations

import numpy as np
import pytest

from ingot.plugins.gpu.floats import from_bf16, from_e2m1, from_e4m3, to_bf16, to_e2m1, to_e4m3


def test_values_of_e4m3() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = from_e4m3(codes)
    assert values[0x7E] == 448 and values[0x01] == 2.0**-9 and values[0x08] == 2.0**-6 and values[0x38] == 1
    assert np.isnan(values[[0x7F, 0xFF]]).all() and (values[128:255] == -values[:127]).all()
    finite = np.isfinite(values)
    assert np.array_equal(to_e4m3(values[finite]), codes[finite]), "what can be held is held"


def test_values_of_e2m1() -> None:
    values = from_e2m1(np.arange(16, dtype=np.uint8))
    assert values.tolist()[:8] == [0, 0.5, 1, 1.5, 2, 3, 4, 6] and (values[8:] == -values[:8]).all()
    assert np.array_equal(to_e2m1(values), np.arange(16))


@pytest.mark.parametrize(("x", "e4m3", "e2m1"), [
    (0.25, 0.25, 0), (0.75, 0.75, 1), (1.25, 1.25, 1), (1.75, 1.75, 2), (2.5, 2.5, 2), (3.5, 3.5, 4), (5, 5, 4),
    (1.0625, 1, 1), (1.1875, 1.25, 1), (464, 448, 6), (1e30, 448, 6), (-5.0001, -5, -6), (2.0**-10, 0, 0),
    (1.5 * 2.0**-9, 2.0**-8, 0), (np.inf, 448, 6)])
def test_nearest_ties_to_even(x: float, e4m3: float, e2m1: float) -> None:
    assert from_e4m3(to_e4m3(np.array([x], np.float32)))[0] == e4m3
    assert from_e2m1(to_e2m1(np.array([x], np.float32)))[0] == e2m1


def test_e4m3_is_the_nearest() -> None:
    x = np.random.default_rng(0).standard_normal(4000).astype(np.float32) * np.float32(50)
    every = from_e4m3(np.arange(127, dtype=np.uint8))
    nearest = np.abs(np.abs(x)[:, None] - every[None]).min(axis=1)
    assert np.array_equal(np.abs(from_e4m3(to_e4m3(x)) - x), nearest)


def test_bf16() -> None:
    x = np.array([1, 1 + 2.0**-8, 1 + 3 * 2.0**-8, -1e38, np.inf, 1e-40, 3.4e38], np.float32)
    assert from_bf16(to_bf16(x)).tolist()[:3] == [1, 1, 1 + 2.0**-6]
    assert np.allclose(from_bf16(to_bf16(x))[3:6], x[3:6], rtol=2.0**-8) and np.isinf(from_bf16(to_bf16(x))[4])
    assert np.isnan(from_bf16(to_bf16(np.array([np.nan], np.float32))))[0]
