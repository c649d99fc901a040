"""Kernels joined row by row give the bits of the launches that they take the place of."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ingot.plugins.by_row import Pointer, by_row
from ingot.plugins.norm.cpu import Norm, add_norm
from ingot.plugins.quantize import cpu as quantize_cpu
from ingot.plugins.quantize.reference import row_bytes
from ingot.plugins.scheme import SCHEMES
from tests.plugins.native import HOST_ISAS, Library, Step, aligned, placed

K, SCHEME = 100, SCHEMES["w4a8"]
NORM = add_norm(Norm("rms_norm", "T", K, 1e-6))


def quantize_of(part: int, stride: int) -> quantize_cpu.CpuKernel:
    return quantize_cpu.emit(part, SCHEME, x_stride=stride)


@pytest.mark.parametrize(("tokens", "workers"), [(1, 1), (2, 5), (9, 2), (9, 3)])
@pytest.mark.parametrize("isa", HOST_ISAS)
def test_a_norm_and_what_quantizes_its_rows(isa: str, tokens: int, workers: int, tmp_path: Path) -> None:
    """All of a row, and a range of its columns; sums in the place of an input."""
    whole, part = quantize_of(K, K), quantize_of(64, K)
    norm_args = [*map(Pointer, range(4)), Pointer(0, own=True), Pointer(4)]
    both = by_row("T", [(NORM, norm_args), (whole, [Pointer(0, own=True), Pointer(5)]),
                        (part, [Pointer(0, 4 * 32, own=True), Pointer(6)])], own=[4 * K])
    library = Library([NORM, whole, part, both], isa, tmp_path)
    step, rng = Step.of_tokens(tokens), np.random.default_rng(0)
    x, r = (placed(rng.normal(size=(tokens, K)).astype(np.float32)) for _ in range(2))
    weight = placed(np.ones(K, np.float32))

    def outputs() -> list[np.ndarray]:
        return [placed(r), *(aligned((tokens, row_bytes(k, SCHEME)), np.uint8) for k in (K, 64))]

    y = aligned((tokens, K))
    s, rows, part_rows = outputs()
    library.run(NORM, step, x, s, weight, None, y, s, workers=workers)
    library.run(whole, step, y, rows, workers=workers)
    library.run(part, step, y[:, 32:], part_rows, workers=workers)
    joined = outputs()
    library.run(both, step, x, joined[0], weight, None, joined[0], *joined[1:], workers=workers)
    for plain, other in zip((s, rows, part_rows), joined, strict=True):
        assert plain.any()
        np.testing.assert_array_equal(plain, other)


def test_other_pointers_or_rows_are_another_kernel() -> None:
    def symbol(own: int, *numbers: int) -> str:
        return by_row("T", [(quantize_of(K, K), [Pointer(n) for n in numbers])], own=[own]).symbol

    assert len({symbol(400, 0, 1), symbol(400, 1, 0), symbol(404, 0, 1)}) == 3
