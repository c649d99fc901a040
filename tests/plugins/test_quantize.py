"""Quantization of activations: the kernel writes the reference's bytes."""
from __future__ import annotations

import numpy as np
import pytest

from ingot.compiler.cpu.isa import ISAS
from ingot.plugins.quantize.cpu import emit
from ingot.plugins.quantize.reference import quantize, quantize_values, row_bytes
from ingot.plugins.scheme import Scheme
from tests.plugins.native import MATRIX_ISAS, Library, Step, aligned, from_bf16, placed, require_scheme

WIDTHS = [1, 31, 32, 64, 100, 576, 1000]
SCHEMES = [Scheme(name, bits, 8, group) for name, bits in (("int8", 8), ("w4a8", 4)) for group in (0, 32, 64, 128)]
PAIRS = Scheme("bf16_pairs", 16, 16)


@pytest.fixture(scope="module", params=MATRIX_ISAS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    kernels = [emit(k, scheme) for k in WIDTHS for scheme in SCHEMES]
    kernels += [emit(100, SCHEMES[0], "L", 128), emit(100, SCHEMES[0], "3*T")]
    if ISAS[request.param].multiplies_pairs:
        kernels += [emit(k, PAIRS) for k in WIDTHS]
    return Library(kernels, request.param, tmp_path_factory.mktemp(request.param))


def make_input(k: int) -> np.ndarray:
    rng = np.random.default_rng(k)
    x = rng.standard_normal((9, k)) * np.exp(rng.normal(0, 3, (9, k)))
    x[2] = 0
    x[3] *= 1e-20
    x[4] *= 1e-34  # counts as zero
    x[5, k // 2], x[6, k // 2], x[7, 0] = np.nan, -np.inf, 3e38
    x[8] = np.arange(k) / 2  # ties of rounding
    return placed(x.astype(np.float32))


@pytest.mark.parametrize("k", WIDTHS)
def test_pairs_equal_the_reference(library: Library, k: int) -> None:
    """Subnormal numbers and zeros of either sign included; the padding is zero, which pairs of weights meet."""
    require_scheme(library.isa, PAIRS)
    x = make_input(k)
    x[0, -1], x[1, 0], x[4, :] = 1e-40, -1e-39, -0.0
    rows = aligned((9, row_bytes(k, PAIRS)), np.uint8)
    rows[:] = 0xFF
    library.run(emit(k, PAIRS), Step.of_tokens(9), x, rows, workers=2)
    used = -(-k // 32) * 32
    want, rows = (np.ascontiguousarray(found.view(np.uint16)[:, :used]) for found in (quantize(x, PAIRS), rows))
    assert ((rows == want) | np.isnan(from_bf16(want)) & np.isnan(from_bf16(rows))).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.tag)
@pytest.mark.parametrize("k", WIDTHS)
def test_bytes_equal_the_reference(library: Library, k: int, scheme: Scheme) -> None:
    x = make_input(k)
    rows = aligned((9, row_bytes(k, scheme)), np.uint8)
    library.run(emit(k, scheme), Step.of_tokens(9), x, rows, workers=2)
    with np.errstate(invalid="ignore"):
        want = quantize(x, scheme)
    nan = np.isnan(want[:, :want.shape[1] // 4 * 4].view(np.float32))  # the sign and payload of a NaN are free
    same = rows.view(np.uint32) == want.view(np.uint32)
    assert (same | nan & np.isnan(rows.view(np.float32))).all()


def test_rows_of_logits_and_stride(library: Library) -> None:
    x, scheme = placed(np.random.default_rng(1).standard_normal((4, 128)).astype(np.float32)), SCHEMES[0]
    rows = aligned((4, row_bytes(100, scheme)), np.uint8)
    library.run(emit(100, scheme, "L", 128), Step.of_tokens(50, logit_rows=(1, 2, 3)), x, rows)
    np.testing.assert_array_equal(rows[:3], quantize(x[:3, :100], scheme))
    assert not rows[3].any()


def test_rows_of_experts(library: Library) -> None:
    x, scheme = placed(np.random.default_rng(1).standard_normal((6, 100)).astype(np.float32)), SCHEMES[0]
    rows = aligned((6, row_bytes(100, scheme)), np.uint8)
    library.run(emit(100, scheme, "3*T"), Step.of_tokens(2), x, rows, workers=2)
    np.testing.assert_array_equal(rows, quantize(x, scheme))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.tag)
def test_error_is_at_most_half_a_step(scheme: Scheme) -> None:
    x = np.random.default_rng(0).standard_normal((5, 200)).astype(np.float32)
    q, scale = quantize_values(x, scheme)
    scale = np.repeat(scale, 32, axis=1)[:, :200]
    assert (np.abs(x - q[:, :200] * scale) <= scale * 0.5001).all()
    assert np.abs(q).max() == 127
