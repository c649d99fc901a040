from __future__ import annotations

import pytest

from ingot.compiler.passes.fuse_residual import fuse_residual
from tests.compiler.graphs import Builder, expect_same_meaning, ops


def product(b: Builder, x: str, name: str, *bias: str) -> str:
    return b.op("linear", x, b.weight(name, 4, 4), *bias, scheme="bf16")


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_sum_becomes_part_of_the_matrix(swapped: bool, bias: bool) -> None:
    b = Builder()
    x = b.x("x", 1, "T", 4)
    y = product(b, x, "w", *([b.weight("b", 4)] if bias else []))
    graph = b.made(b.op("add", *((y, x) if swapped else (x, y))))
    fused = fuse_residual(graph)
    assert ops(fused) == ["linear"]
    expect_same_meaning(graph, fused)


def test_of_two_products_the_later_one_adds_the_other() -> None:
    b = Builder()
    x = b.x("x", "T", 4)
    graph = b.made(b.op("add", product(b, x, "v"), product(b, x, "w")))
    fused = fuse_residual(graph)
    assert ops(fused) == ["linear", "linear"] and "residual" not in fused.nodes[0].attrs
    expect_same_meaning(graph, fused)


def test_a_chain_of_sums() -> None:
    """Attention and MLP side by side: both are added to the same residual."""
    b = Builder()
    x = b.x("x", "T", 4)
    graph = b.made(b.op("add", b.op("add", x, product(b, x, "v")), product(b, x, "w")))
    fused = fuse_residual(graph)
    assert ops(fused) == ["linear", "linear"] and all(node.attrs["residual"] for node in fused.nodes)
    expect_same_meaning(graph, fused)


def test_what_others_read_or_broadcasts_stays() -> None:
    b = Builder()
    y = product(b, b.x("x", "T", 4), "w")
    z = product(b, b.x("z", 1, "T", 4), "v")
    graph = b.made(b.op("add", y, b.x("r", "T", 4)), b.op("neg", y), b.op("add", z, b.x("row", 4)),
                   b.op("add", product(b, "x", "u"), 1.0))
    assert fuse_residual(graph) == graph


def test_a_product_added_to_itself_stays() -> None:
    b = Builder()
    y = product(b, b.x("x", "T", 4), "w")
    graph = b.made(b.op("add", y, y))
    assert fuse_residual(graph) == graph
