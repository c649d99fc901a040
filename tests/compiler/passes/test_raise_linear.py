from __future__ import annotations

import pytest

from ingot.compiler.passes.fold_constants import fold_constants
from ingot.compiler.passes.raise_linear import raise_linear
from tests.compiler.graphs import Builder, expect_same_meaning, expect_structure, ops


def test_product_with_a_constant_matrix() -> None:
    b = Builder()
    graph = b.made(b.op("matmul", b.x("x", "T", 6), b.weight("w", 6, 4)))
    raised = raise_linear(graph)
    expected = Builder()
    transposed = expected.op("permute", expected.weight("w", 6, 4), dims=(1, 0))
    expect_structure(raised, expected.made(expected.op("linear", expected.x("x", "T", 6), transposed)))
    expect_same_meaning(graph, raised)


def test_product_of_activations_stays() -> None:
    b = Builder()
    graph = b.made(b.op("matmul", b.x("x", "T", 2, 6), b.x("y", "T", 6, 2)))
    assert raise_linear(graph) == graph


@pytest.mark.parametrize("shape", [(4,), (1, 4), (1, 1, 4)])
@pytest.mark.parametrize("first", [True, False])
def test_bias(shape: tuple[int, ...], first: bool) -> None:
    b = Builder()
    y, bias = b.op("linear", b.x("x", 1, "T", 6), b.weight("w", 4, 6)), b.weight("bias", *shape)
    graph = b.made(b.op("add", bias, y) if first else b.op("add", y, bias))
    raised = fold_constants(raise_linear(graph))
    assert ops(raised) == ["linear"] and len(raised.nodes[0].inputs) == 3
    expect_same_meaning(graph, raised)


def test_no_bias_where_the_product_is_read_elsewhere() -> None:
    b = Builder()
    y = b.op("linear", b.x("x", "T", 6), b.weight("w", 4, 6))
    graph = b.made(b.op("add", y, b.weight("bias", 4)), b.op("neg", y))
    assert raise_linear(graph) == graph


@pytest.mark.parametrize("bias", ["activation", "one number", "per token"])
def test_what_is_no_bias(bias: str) -> None:
    b = Builder()
    y = b.op("linear", b.x("x", "T", 6), b.weight("w", 4, 6))
    other = {"activation": lambda: b.x("y", 4), "one number": lambda: b.weight("c", 1),
             "per token": lambda: b.x("z", "T", 1)}[bias]()
    graph = b.made(b.op("add", y, other))
    assert raise_linear(graph) == graph


def test_one_bias_is_enough() -> None:
    b = Builder()
    y = b.op("linear", b.x("x", "T", 6), b.weight("w", 4, 6), b.weight("c", 4))
    graph = b.made(b.op("add", y, b.weight("d", 4)))
    assert raise_linear(graph) == graph
