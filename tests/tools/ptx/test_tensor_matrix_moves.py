"""tools/ptx/tensor_matrix_moves.py: what each lane holds of 8 × 8 matrices."""
from __future__ import annotations

import numpy as np
import pytest

from tools.ptx.tensor_matrix_moves import collect_rows, spread_rows


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_lanes_hold_pairs_of_a_row_or_column(count: int, transposed: bool) -> None:
    matrices = np.random.default_rng(1).integers(0, 1 << 16, (2, count, 8, 8)).astype(np.uint16)
    registers = spread_rows(matrices.view(np.uint8), transposed)
    assert registers.shape == (2, count, 32)
    for warp, matrix, lane in ((0, 0, 0), (1, count - 1, 13), (0, count - 1, 31)):
        held = registers[warp, matrix, lane : lane + 1].view(np.uint16)
        whole = matrices[warp, matrix].T if transposed else matrices[warp, matrix]
        assert list(held) == list(whole[lane // 4, 2 * (lane % 4) :][:2])
    assert np.array_equal(collect_rows(registers, transposed), matrices.view(np.uint8))
