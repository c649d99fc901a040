"""Linear layers of experts against the reference."""
from __future__ import annotations

import numpy as np
import pytest

from ingot.plugins.expert_linear.cpu import Problem, emit, expert_bytes, pack_experts
from ingot.plugins.expert_linear.reference import reference
from ingot.plugins.quantize.reference import quantize
from ingot.plugins.scheme import SCHEMES, Scheme
from tests.plugins.native import TILE_ISAS, Library, Step, aligned, placed, require_scheme, schemes_of

EXPERTS, CHOICES, N, K = 6, 3, 40, 100
BUCKETS = {1: 1, 8: 5, 4096: 1500}
"""The last one has more pairs than are sorted at a time."""

FUSED = {True: 8, False: 2}
"""Whether x is shared -> the largest bucket for which a kernel rounds its input itself."""


@pytest.fixture(scope="module", params=TILE_ISAS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    schemes = schemes_of(request.param)
    kernels = [emit(problem(scheme, m, shared, bias=m == 8)) for scheme in schemes for m in BUCKETS
               for shared in (True, False)]
    kernels += [emit(problem(scheme, m, shared, float_input=True)) for scheme in schemes if scheme.rounds_inputs
                for shared, m in FUSED.items()]
    return Library(kernels, request.param, tmp_path_factory.mktemp(request.param))


def problem(scheme: Scheme, m: int, shared: bool, bias: bool = False, float_input: bool = False) -> Problem:
    return Problem(EXPERTS, CHOICES, N, K, scheme, m, shared, bias, float_input)


def make(tokens: int, shared: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, ids (one expert is never chosen, one always), w"""
    rng = np.random.default_rng(tokens)
    ids = np.stack([rng.permutation([0, 1, 2, 4])[:CHOICES] for _ in range(tokens)]).astype(np.int32)
    ids[:, -1] = 5
    x = rng.standard_normal((tokens, K) if shared else (tokens, CHOICES, K)).astype(np.float32)
    return placed(x), placed(ids), rng.standard_normal((EXPERTS, N, K)).astype(np.float32)


def close(y: np.ndarray, want: np.ndarray) -> bool:
    return bool((np.abs(y - want) < 1e-6 * K).all())


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "each"])
@pytest.mark.parametrize("m", BUCKETS)
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda s: s.tag)
def test_expert_linear(library: Library, scheme: Scheme, m: int, shared: bool) -> None:
    require_scheme(library.isa, scheme)
    tokens = BUCKETS[m]
    x, ids, w = make(tokens, shared)
    want = reference(x, ids, w, scheme)
    bias = placed(np.random.default_rng(9).standard_normal((EXPERTS, N)).astype(np.float32))
    extra = [bias] if m == 8 else []
    want = want + bias[ids] if extra else want
    source = placed(quantize(x.reshape(-1, K), scheme)) if scheme.rounds_inputs else x
    packed = placed(pack_experts(w, scheme))
    assert packed.size == EXPERTS * expert_bytes(N, K, scheme)
    for workers in (1, 2):
        y = aligned((tokens, CHOICES, N))
        library.run(emit(problem(scheme, m, shared, bool(extra))), Step.of_tokens(tokens), source, ids, packed, y,
                    *extra, workers=workers)
        assert close(y, want)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "each"])
@pytest.mark.parametrize("scheme", [s for s in SCHEMES.values() if s.rounds_inputs], ids=lambda s: s.tag)
def test_rounds_its_input(library: Library, scheme: Scheme, shared: bool) -> None:
    require_scheme(library.isa, scheme)
    m = FUSED[shared]
    x, ids, w = make(m, shared)
    y = aligned((m, CHOICES, N))
    library.run(emit(problem(scheme, m, shared, float_input=True)), Step.of_tokens(m), x, ids,
                placed(pack_experts(w, scheme)), y, workers=2)
    assert close(y, reference(x, ids, w, scheme))
