from __future__ import annotations

import numpy as np

from ingot.compiler.ir.types import DType
from ingot.compiler.passes.fold_constants import MAX_GROWTH, fold_constants
from ingot.compiler.weights.expr import literal
from tests.compiler.graphs import Builder, expect_same_meaning, ops


def test_arithmetic_on_constants_leaves_the_step() -> None:
    b = Builder()
    weight = b.op("add", b.op("mul", b.weight("w", 8), 0.5), 1.0)
    graph = b.made(b.op("mul", b.x("x", "T", 8), weight))
    folded = fold_constants(graph)
    assert ops(folded) == ["mul"]
    assert [str(expr) for expr in folded.constants.values()] == ["add(mul(w, 0.5), 1.0)"]
    expect_same_meaning(graph, folded, 0.0)


def test_what_depends_on_tokens_stays() -> None:
    b = Builder()
    graph = b.made(b.op("mul", b.op("full", shape=("T", 1), value=2.0, dtype=DType.F32), b.weight("w", 1, 4)),
                   b.op("neg", b.x("x", "T")))
    assert ops(fold_constants(graph)) == ["full", "mul", "neg"]


def test_every_output_of_an_operator_is_folded() -> None:
    b = Builder()
    values, indices = b.add("topk", [b.weight("w", 6)], k=2, dim=0, largest=True)
    graph = b.made(b.op("add", b.x("x", "T", 2), values), b.op("add", b.x("i", "T", 2, dtype=DType.I32), indices))
    folded = fold_constants(graph)
    assert ops(folded) == ["add", "add"]
    expect_same_meaning(graph, folded, 0.0)


def test_numbers_alone_become_a_constant() -> None:
    b = Builder()
    counted = b.op("arange", start=0, step=1, length=4, dtype=DType.F32)
    graph = b.made(b.op("mul", b.x("x", "T", 4), b.op("exp", counted)))
    folded = fold_constants(graph)
    assert ops(folded) == ["mul"]
    expect_same_meaning(graph, folded, 0.0)


def test_large_copies_stay_in_the_step() -> None:
    b = Builder()
    big, small = b.weight("w", 1 << 16, 1), b.constant(literal(np.array(3, np.float32)), "small")
    copies = 2 * MAX_GROWTH
    graph = b.made(b.op("add", b.op("expand", big, shape=(1 << 16, copies)), b.op("reshape", b.x("x", "T", 1),
                                                                                  shape=("T", 1, 1))),
                   b.op("mul", b.x("y", "T"), b.op("neg", small)))
    assert ops(fold_constants(graph)) == ["expand", "reshape", "add", "mul"]
