"""Weight expressions: shapes, text, JSON, normal forms."""
from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from ingot.compiler.ir.types import DType, TensorType
from ingot.compiler.weights.expr import (
    WeightExpr,
    apply,
    cast,
    concat,
    literal,
    literal_value,
    permute,
    reshape,
    slice_,
    stack,
    tensor,
    transpose,
)


def f32(values: list[Any]) -> np.ndarray:
    return np.array(values, np.float32)



def test_shapes_and_names() -> None:
    qkv = concat([tensor("q", (6, 4)), tensor("k", (2, 4)), tensor("q", (6, 4))], 0)
    assert qkv.shape == (14, 4) and qkv.size_bytes == 14 * 4 * 4
    assert qkv.tensor_names() == ("q", "k")
    assert stack([tensor("a", (3, 4)), tensor("b", (3, 4))], 1).shape == (3, 2, 4)
    assert transpose(tensor("e", (5, 3, 4))).shape == (5, 4, 3)
    assert slice_(tensor("a", (3, 4)), 1, 1, 3).shape == (3, 2)


def test_identities_and_chains_are_one_operator() -> None:
    x = tensor("x", (2, 3, 4))
    assert concat([x], 0) is x and reshape(x, (2, 3, 4)) is x and slice_(x, 0, 0, 2) is x
    assert permute(x, (0, 1, 2)) is x and cast(x, DType.F32) is x
    assert permute(permute(x, (2, 0, 1)), (1, 2, 0)) is x
    assert str(reshape(reshape(x, (6, 4)), (24,))) == "reshape(x; shape=(24,))"


def test_text_says_what_happens() -> None:
    expr = cast(concat([tensor("q", (6, 4)), tensor("k", (2, 4))], 0), DType.BF16)
    assert str(expr) == "cast(cat(q, k; dim=0); dtype=bf16)"
    assert str(literal(np.array([1, 0.5, 0.25, 0.125], np.float32))) == "literal(f32[4]: 1, 0.5, 0.25, …)"
    assert str(apply("topk", [tensor("x", (9,))], TensorType((2,), DType.I32), 1, k=2)).endswith("[1]")


def test_json_round_trip_and_hash() -> None:
    whole = concat([tensor("a", (2, 3)), literal(np.ones((1, 3), np.float32))], 0)
    expr = cast(apply("mul", (whole, 0.5), whole.type), DType.BF16)
    again = WeightExpr.from_json(json.loads(json.dumps(expr.to_json())))
    assert again == expr and hash(again) == hash(expr)
    assert again != cast(apply("mul", (whole, 0.25), whole.type), DType.BF16)


@pytest.mark.parametrize("value", [np.arange(6, dtype=np.int32).reshape(2, 3), np.array(True), f32([[0.1]])])
def test_literals_keep_values_and_types(value: np.ndarray) -> None:
    kept = literal_value(literal(value))
    assert kept.dtype == value.dtype and kept.shape == value.shape and (kept == value).all()


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(AssertionError, match="along axis 0"):
        concat([tensor("a", (2, 3)), tensor("b", (2, 4))], 0)
    with pytest.raises(AssertionError, match="reshape"):
        reshape(tensor("a", (2, 3)), (7,))
