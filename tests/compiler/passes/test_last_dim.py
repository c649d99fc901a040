from __future__ import annotations

import pytest

from ingot.compiler.ir.types import DType
from ingot.compiler.passes.last_dim import bring_last
from tests.compiler.graphs import Builder, expect_same_meaning, ops


@pytest.mark.parametrize(("op", "attrs"), [
    ("softmax", {}), ("cumsum", {}), ("sort", {"descending": True}), ("topk", {"k": 2, "largest": True}),
    ("argmax", {"keepdim": False}), ("argmax", {"keepdim": True})])
def test_along_an_inner_dimension(op: str, attrs: dict[str, object]) -> None:
    b = Builder()
    graph = b.made(*b.add(op, [b.x("x", "T", 3, 4)], dim=1, **attrs))
    brought = bring_last(graph)
    node, = (node for node in brought.nodes if node.op == op)
    assert node.attrs["dim"] == 2
    expect_same_meaning(graph, brought, 0.0)


@pytest.mark.parametrize("op", ["softmax", "cumsum"])
def test_along_the_last_dimension_nothing_changes(op: str) -> None:
    b = Builder()
    graph = b.made(b.op(op, b.x("x", "T", 3, 4), dim=2))
    assert bring_last(graph) == graph


@pytest.mark.parametrize("dim", [1, 2])
def test_scatter_of_a_number(dim: int) -> None:
    b = Builder()
    index = b.op("mod", b.x("i", "T", *((1, 4) if dim == 1 else (3, 1)), dtype=DType.I32), 3)
    graph = b.made(b.op("scatter", b.x("x", "T", 3, 4), index, 1, dim=dim))
    brought = bring_last(graph)
    assert "full" in ops(brought) and "cast" in ops(brought)
    expect_same_meaning(graph, brought, 0.0)


def test_scatter_of_a_value() -> None:
    b = Builder()
    index = b.op("mod", b.x("i", "T", 1, 4, dtype=DType.I32), 3)
    graph = b.made(b.op("scatter", b.x("x", "T", 3, 4), index, b.x("y", "T", 1, 4), dim=1))
    expect_same_meaning(graph, bring_last(graph), 0.0)


def test_booleans_are_counted_as_integers() -> None:
    b = Builder()
    graph = b.made(b.op("cumsum", b.x("x", "T", 4, dtype=DType.BOOL), dim=1))
    brought = bring_last(graph)
    assert ops(brought) == ["cast", "cumsum"]
    expect_same_meaning(graph, brought, 0.0)
