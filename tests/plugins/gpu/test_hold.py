from __future__ import annotations

import numpy as np

from ingot.plugins.gpu.floats import from_e2m1
from ingot.plugins.linear.gpu_formats import FORMATS, unpack
from ingot.plugins.linear.gpu_hold import hold, holds, power_factor


def test_powers_of_two_are_exact_over_seventeen_of_them() -> None:
    """What lies further below the largest is rounded, and by less than half a step of the least scale."""
    form, rng = FORMATS["nvfp4"], np.random.default_rng(0)
    codes = from_e2m1(rng.integers(0, 16, (4, 32 * 24)).astype(np.uint8))
    exponents = np.arange(24)[None, :, None] - 30
    scales = np.ldexp(np.float32(1), np.broadcast_to(exponents, (4, 24, 32))).reshape(4, -1).astype(np.float32)
    factor = power_factor(scales)
    assert factor == 2.0 ** (-7 - 8)
    got = unpack(hold(codes, scales / np.float32(factor), form, factor))
    want, least = codes * scales, 2.0 ** -9 * factor
    exact = scales >= least
    assert exact.mean() == 18 / 24
    np.testing.assert_array_equal(got[exact], want[exact])
    assert np.abs(got - want)[~exact].max() <= 0.25 * least
    assert power_factor(np.zeros((2, 32), np.float32)) == 1


def test_all_of_int8_is_held() -> None:
    """-128 too, which rounding never gives."""
    codes, scales = np.arange(-128, 128, dtype=np.int32)[None], np.full((1, 256), 0.3, np.float32)
    packed = hold(codes, scales, FORMATS["int8"])
    np.testing.assert_array_equal(packed.w, codes)
    np.testing.assert_array_equal(unpack(packed), codes.astype(np.float32) * np.float32(0.3))


def test_which_matrices_a_format_holds() -> None:
    block = FORMATS["fp8_block"]
    assert holds("e4m3", block, (100, 256)) and not holds("e4m3", block, (128, 200))
    assert holds("e4m3", block, (3, 128, 256)) and not holds("e4m3", block, (3, 100, 256))
    assert holds("mxfp4", FORMATS["nvfp4"], (3, 5, 32)) and not holds("int8", FORMATS["nvfp4"], (5, 32))
    assert not holds("e4m3", FORMATS["bf16"], (5, 32)) and not holds("", FORMATS["fp8"], (5, 32))
