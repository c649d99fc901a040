from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ingot.compiler.passes.fold_constants import fold_constants
from ingot.compiler.passes.raise_norms import raise_norms
from ingot.compiler.weights.expr import literal
from tests.compiler.graphs import Builder, expect_same_meaning, expect_structure, ops

EPS = 1e-5


def mean_square(b: Builder, x: str, square: str = "pow") -> str:
    squared = b.op("pow", x, 2) if square == "pow" else b.op("mul", x, x)
    return b.op("add", b.op("reduce_mean", squared, dims=(len(b.types[x].shape) - 1,), keepdim=True), EPS)


SPELLINGS: dict[str, Callable[[Builder, str], str]] = {
    "x * rsqrt": lambda b, x: b.op("mul", x, b.op("rsqrt", mean_square(b, x))),
    "rsqrt * x": lambda b, x: b.op("mul", b.op("rsqrt", mean_square(b, x, "mul")), x),
    "x / sqrt": lambda b, x: b.op("div", x, b.op("sqrt", mean_square(b, x))),
    "x * (1 / sqrt)": lambda b, x: b.op("mul", x, b.op("reciprocal", b.op("sqrt", mean_square(b, x)))),
    "x * 1 / sqrt": lambda b, x: b.op("mul", x, b.op("div", 1.0, b.op("sqrt", mean_square(b, x)))),
    "x * v ** -0.5": lambda b, x: b.op("mul", x, b.op("pow", mean_square(b, x), -0.5)),
    "eps + v": lambda b, x: b.op("mul", x, b.op("rsqrt", b.op("add", EPS, b.op(
        "reduce_mean", b.op("pow", x, 2.0), dims=(1,), keepdim=True)))),
    "eps as a tensor": lambda b, x: b.op("mul", x, b.op("rsqrt", b.op("add", b.op(
        "reduce_mean", b.op("pow", x, 2.0), dims=(1,), keepdim=True), b.constant(
            literal(np.array([EPS], np.float32)), "eps")))),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_rms_norm(spelling: str) -> None:
    b = Builder()
    graph = b.made(SPELLINGS[spelling](b, b.x("x", "T", 16)))
    raised = raise_norms(graph)
    assert ops(raised) == ["rms_norm"]
    assert raised.nodes[0].attrs["eps"] == pytest.approx(EPS)
    expect_same_meaning(graph, raised)


def test_weight_is_absorbed() -> None:
    b = Builder()
    y = SPELLINGS["x * rsqrt"](b, b.x("x", "T", 16))
    graph = b.made(b.op("mul", b.weight("w", 16), y))
    raised = raise_norms(graph)
    expected = Builder()
    expect_structure(raised, expected.made(expected.op("rms_norm", expected.x("x", "T", 16), expected.weight("w", 16),
                                                       eps=EPS)))
    expect_same_meaning(graph, raised)


def test_weight_with_leading_ones_of_a_norm_of_heads() -> None:
    b = Builder()
    y = SPELLINGS["x * rsqrt"](b, b.x("x", "T", 16))
    heads = b.op("reshape", b.x("h", 1, "T", 64), shape=(1, "T", 4, 16))
    normed = b.op("mul", heads, b.op("rsqrt", mean_square(b, heads)))
    graph = b.made(y, b.op("mul", normed, b.op("add", b.weight("w", 1, 1, 1, 16), 1.0)))
    raised = fold_constants(raise_norms(fold_constants(graph)))
    assert ops(raised) == ["rms_norm", "reshape", "rms_norm"] and len(raised.nodes[2].inputs) == 2
    expect_same_meaning(graph, raised)


def test_a_weight_for_each_head_stays_outside() -> None:
    b = Builder()
    x = b.x("x", "T", 4, 16)
    graph = b.made(b.op("mul", b.op("mul", x, b.op("rsqrt", mean_square(b, x))), b.weight("w", 4, 16)))
    raised = raise_norms(graph)
    assert ops(raised) == ["rms_norm", "mul"]
    expect_same_meaning(graph, raised)


@pytest.mark.parametrize("parts", ["plain", "weight", "weight and bias"])
def test_layer_norm(parts: str) -> None:
    b = Builder()
    x = b.x("x", "T", 16)
    centered = b.op("sub", x, b.op("reduce_mean", x, dims=(1,), keepdim=True))
    y = b.op("div", centered, b.op("sqrt", mean_square(b, centered)))
    if parts != "plain":
        y = b.op("mul", y, b.weight("w", 16))
    if parts == "weight and bias":
        y = b.op("add", y, b.weight("bias", 16))
    graph = b.made(y)
    raised = raise_norms(graph)
    assert ops(raised) == ["layer_norm"] and len(raised.nodes[0].inputs) == 1 + parts.count("weight") + parts.count(
        "bias")
    expect_same_meaning(graph, raised, 2e-6)


def test_weights_stay_outside_of_a_norm_that_is_read_elsewhere() -> None:
    b = Builder()
    y = SPELLINGS["x * rsqrt"](b, b.x("x", "T", 16))
    graph = b.made(b.op("mul", y, b.weight("v", 16)), b.op("mul", y, b.weight("w", 16)))
    raised = raise_norms(graph)
    assert ops(raised) == ["rms_norm", "mul", "mul"]
    expect_same_meaning(graph, raised)


@pytest.mark.parametrize("case", ["over another dimension", "of another value", "without eps"])
def test_what_is_no_norm(case: str) -> None:
    b = Builder()
    x, other = b.x("x", "T", 4, 16), b.x("y", "T", 4, 16)
    source = other if case == "of another value" else x
    dims = (1,) if case == "over another dimension" else (2,)
    root = b.op("reduce_mean", b.op("pow", source, 2), dims=dims, keepdim=True)
    if case != "without eps":
        root = b.op("add", root, EPS)
    graph = b.made(b.op("mul", x, b.op("rsqrt", root)))
    assert raise_norms(graph) == graph
