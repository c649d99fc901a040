"""Every linear kernel of every instruction set of this machine against the reference."""
from __future__ import annotations

import numpy as np
import pytest

from ingot.plugins.linear.cpu import Problem, emit
from ingot.plugins.linear.pack import pack
from ingot.plugins.linear.reference import reference
from ingot.plugins.quantize import cpu as quantize_cpu
from ingot.plugins.quantize.reference import quantize, row_bytes
from ingot.plugins.scheme import SCHEMES, Scheme
from tests.plugins.native import TILE_ISAS, Library, Step, aligned, placed, require_scheme, schemes_of

SHAPES = [(1, 640), (17, 43), (33, 1), (1000, 64), (576, 576), (40, 1536)]
BY_ROW = Scheme("int8", 8, 8, 0)
SCHEME_LIST = [*SCHEMES.values(), BY_ROW]
BUCKETS = {1: 1, 8: 7, 64: 45}
"""Tokens of a bucket -> tokens of the step: not full, and tiles of every size take part."""

OPTIONS = [(True, True), (False, True)]
N, K = 40, 1100
"""The shape that options are tried on: neither is a multiple of anything, K more than floats take at a time."""


def buckets(n: int) -> dict[int, int]:
    """Those that a shape is tried with: the middle one differs in its largest tile alone."""
    return {m: tokens for m, tokens in BUCKETS.items() if m != 8 or n == 40}


def problems(schemes: list[Scheme]) -> list[Problem]:
    plain = [Problem(n, k, scheme, m) for n, k in SHAPES for scheme in (*schemes, BY_ROW) for m in buckets(n)]
    with_options = [Problem(N, K, scheme, m, "T", *options) for scheme in schemes for m in (1, 64)
                    for options in OPTIONS]
    strided = [Problem(N, K, scheme, 8, x_stride=K + 28, rows="L", float_input=scheme.rounds_inputs)
               for scheme in schemes]
    return plain + with_options + strided


@pytest.fixture(scope="module", params=TILE_ISAS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    schemes = schemes_of(request.param)
    kernels = [emit(p) for p in problems(schemes)]
    kernels += [quantize_cpu.emit(k, s) for _, k in [*SHAPES, (N, K)] for s in (*schemes, BY_ROW) if s.rounds_inputs]
    return Library(dict.fromkeys(kernels), request.param, tmp_path_factory.mktemp(request.param))


def make_input(rows: int, k: int) -> np.ndarray:
    """One row much larger than the others, one of zeros, one with an outlier."""
    x = np.random.default_rng(k).standard_normal((rows, k)).astype(np.float32)
    if rows > 3:
        x[1] *= 1000
        x[2] = 0
        x[3, k // 2] = 100
    return placed(x)


def make_weights(n: int, k: int) -> np.ndarray:
    return np.random.default_rng(n * 10000 + k).standard_normal((n, k)).astype(np.float32)


def check(got: np.ndarray, want: np.ndarray, x: np.ndarray, w: np.ndarray) -> None:
    """The error of a sum, relative to the sum of the magnitudes of its products: a few roundings of float32."""
    scale = np.abs(x).astype(np.float64) @ np.abs(w).T.astype(np.float64)
    assert np.isfinite(got).all()
    assert (np.abs(got - want) <= 1e-6 * scale + 1e-30).all(), float((np.abs(got - want) / (scale + 1e-30)).max())


@pytest.mark.parametrize("scheme", SCHEME_LIST, ids=lambda s: s.tag)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear(library: Library, shape: tuple[int, int], scheme: Scheme) -> None:
    """Close to the reference; and the same bits for any bucket and number of workers."""
    require_scheme(library.isa, scheme)
    n, k = shape
    w, x = make_weights(n, k), make_input(max(BUCKETS.values()), k)
    packed, want = placed(pack(w, scheme)), reference(x, w, scheme)
    source = placed(quantize(x, scheme)) if scheme.rounds_inputs else x
    results = {}
    for m, tokens in buckets(n).items():
        for workers in (1, 2, 5):
            y = aligned((tokens, n))
            library.run(emit(Problem(n, k, scheme, m)), Step.of_tokens(tokens), source, packed, y, workers=workers)
            check(y, want[:tokens], x[:tokens], w)
            results[m, workers] = y
    largest = results[64, 1]
    for case, y in results.items():
        np.testing.assert_array_equal(y, largest[:len(y)], err_msg=f"bucket and workers {case}")


@pytest.mark.parametrize(("with_bias", "with_residual"), OPTIONS)
@pytest.mark.parametrize("m", [1, 64])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda s: s.tag)
def test_bias_and_residual(library: Library, scheme: Scheme, m: int, with_bias: bool, with_residual: bool) -> None:
    """With the residual's buffer as the output."""
    require_scheme(library.isa, scheme)
    tokens = BUCKETS[m]
    w, x = make_weights(N, K), make_input(tokens, K)
    source = placed(quantize(x, scheme)) if scheme.rounds_inputs else x
    bias, residual = make_weights(1, 48)[0], make_weights(tokens, N)
    y = placed(residual)
    extra = [placed(bias)] * with_bias + [y] * with_residual
    kernel = emit(Problem(N, K, scheme, m, "T", with_bias, with_residual))
    library.run(kernel, Step.of_tokens(tokens), source, placed(pack(w, scheme)), y, *extra, workers=2)
    want = reference(x, w, scheme) + (bias[:N] if with_bias else 0) + (residual if with_residual else 0)
    scale = np.abs(x) @ np.abs(w).T + 10
    assert (np.abs(y - want) <= 1e-6 * scale).all()


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda s: s.tag)
def test_rows_of_logits_and_stride(library: Library, scheme: Scheme) -> None:
    """num_logits rows of a wider matrix; a kernel of rounded inputs rounds them itself, to the same bits."""
    require_scheme(library.isa, scheme)
    step = Step.of_tokens(20, logit_rows=(0, 5, 19))
    w, wide = make_weights(N, K), make_input(3, K + 28)
    x = placed(wide[:, :K])
    y = aligned((4, N))
    packed = placed(pack(w, scheme))
    kernel = emit(Problem(N, K, scheme, 8, x_stride=K + 28, rows="L", float_input=scheme.rounds_inputs))
    library.run(kernel, step, wide, packed, y, workers=2)
    assert np.isnan(y[3]).all(), "a row beyond num_logits was written"
    check(y[:3], reference(x, w, scheme), x, w)
    if scheme.rounds_inputs:
        rows, plain = placed(quantize(x, scheme)), aligned((3, N))
        library.run(emit(Problem(N, K, scheme, 64, residual=True)), Step.of_tokens(3), rows, packed, plain,
                    placed(np.zeros((3, N), np.float32)))
        np.testing.assert_array_equal(y[:3], plain)


@pytest.mark.parametrize("scheme", SCHEME_LIST, ids=lambda s: s.tag)
def test_what_lies_behind_is_not_used(library: Library, scheme: Scheme) -> None:
    """Rows and a matrix whose ends are filled up inside a tile: behind them stands what is no number."""
    require_scheme(library.isa, scheme)
    (n, k), tokens = (17, 43), 45
    w, x = make_weights(n, k), make_input(tokens, k)
    source, packed = quantize(x, scheme) if scheme.rounds_inputs else x, pack(w, scheme)
    behind = np.full(4096, 0xFF, np.uint8)
    parts = [placed(np.concatenate([part.reshape(-1).view(np.uint8), behind])) for part in (source, packed)]
    y = aligned((tokens + 1, n))
    library.run(emit(Problem(n, k, scheme, 64)), Step.of_tokens(tokens), *parts, y)
    check(y[:tokens], reference(x, w, scheme), x, w)
    assert np.isnan(y[tokens]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda s: s.tag)
def test_nan_and_infinity_are_not_lost(library: Library, scheme: Scheme, bad: float) -> None:
    """A token that holds one shows it in all outputs; its neighbours are untouched."""
    require_scheme(library.isa, scheme)
    n, k = 576, 576
    w, x = make_weights(n, k), make_input(7, k)
    x[4, 300] = bad
    source = aligned((7, row_bytes(k, scheme)), np.uint8)
    if scheme.rounds_inputs:
        library.run(quantize_cpu.emit(k, scheme), Step.of_tokens(7), x, source)
    y = aligned((7, n), fill=0)
    library.run(emit(Problem(n, k, scheme, 64)), Step.of_tokens(7), source if scheme.rounds_inputs else x,
                placed(pack(w, scheme)), y)
    assert not np.isfinite(y[4]).any()
    assert np.isfinite(y[[0, 1, 2, 3, 5, 6]]).all()


@pytest.mark.parametrize("scheme", SCHEME_LIST, ids=lambda s: s.tag)
def test_what_is_not_finite_is_seen(library: Library, scheme: Scheme) -> None:
    """A token with an infinity or a NaN anywhere has nothing but such results, and no other token has one."""
    require_scheme(library.isa, scheme)
    n, k = 40, 1536
    x = make_input(7, k)
    x[1, 40], x[3, 1500], x[6, 0] = np.inf, np.nan, -np.inf
    rows = aligned((7, row_bytes(k, scheme)), np.uint8) if scheme.rounds_inputs else x
    if scheme.rounds_inputs:
        library.run(quantize_cpu.emit(k, scheme), Step.of_tokens(7), x, rows)
    packed = placed(pack(make_weights(n, k), scheme))
    for m in (8, 64):
        y = aligned((7, n))
        library.run(emit(Problem(n, k, scheme, m)), Step.of_tokens(7), rows, packed, y)
        assert np.isfinite(y[[0, 2, 4, 5]]).all() and not np.isfinite(y[[1, 3, 6]]).any()
