from __future__ import annotations

import pytest

from ingot.compiler.ir.types import DType
from ingot.compiler.passes.scale_embedding import scale_embedding
from tests.compiler.graphs import Builder, expect_same_meaning, only, ops


@pytest.mark.parametrize("swapped", [False, True])
def test_a_factor_becomes_part_of_the_embedding(swapped: bool) -> None:
    b = Builder()
    y = b.op("embedding", b.weight("w", 9, 4), b.x("ids_below9", "T", dtype=DType.I32), scheme="bf16")
    graph = b.made(b.op("mul", *((25.5, y) if swapped else (y, 25.5))))
    scaled = scale_embedding(graph)
    assert ops(scaled) == ["embedding"] and only(scaled, "embedding").attrs["factor"] == 25.5
    expect_same_meaning(graph, scaled)


def test_an_embedding_that_others_read_stays() -> None:
    b = Builder()
    y = b.op("embedding", b.weight("w", 9, 4), b.x("ids_below9", "T", dtype=DType.I32), scheme="bf16")
    graph = b.made(b.op("mul", y, 2.0), b.op("neg", y))
    assert scale_embedding(graph) == graph
