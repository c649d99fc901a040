"""Embeddings read from packed matrices."""
from __future__ import annotations

import numpy as np
import pytest

from ingot.plugins.embedding.cpu import emit
from ingot.plugins.embedding.reference import reference
from ingot.plugins.linear.pack import pack
from ingot.plugins.scheme import SCHEMES, Scheme
from tests.plugins.native import MATRIX_ISAS, Library, Step, aligned, placed

WIDTHS = [1, 31, 64, 100]
STORED = [scheme for scheme in SCHEMES.values() if scheme.stored == scheme.name]


@pytest.fixture(scope="module", params=MATRIX_ISAS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    kernels = [emit(k, scheme) for k in WIDTHS for scheme in STORED]
    return Library(kernels, request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("scheme", STORED, ids=lambda s: s.tag)
@pytest.mark.parametrize("k", WIDTHS)
def test_embedding(library: Library, k: int, scheme: Scheme) -> None:
    w = np.random.default_rng(k).standard_normal((50, k)).astype(np.float32)
    ids = placed(np.array([0, 49, 15, 16, 31, 7, 7, 48], np.int32))
    for workers in (1, 3):
        y = aligned((8, k))
        library.run(emit(k, scheme), Step.of_tokens(8), ids, placed(pack(w, scheme)), y, workers=workers)
        np.testing.assert_allclose(y, reference(ids, w, scheme), rtol=0 if scheme.weight_bits > 4 else 1e-6,
                                   atol=0 if scheme.weight_bits > 4 else 1e-6)
