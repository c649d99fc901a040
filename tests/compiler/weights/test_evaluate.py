"""Evaluation: the whole, a range of rows, and how little of the checkpoint a range reads."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.compiler.ir.types import DType, TensorType
from ingot.compiler.weights import evaluate as evaluation
from ingot.compiler.weights.bf16 import bf16_to_f32, f32_to_bf16
from ingot.compiler.weights.evaluate import WeightShapeError, evaluate, row_slice
from ingot.compiler.weights.expr import WeightExpr, apply, cast, concat, literal, permute, reshape, slice_, tensor


def f32(values: list[Any]) -> np.ndarray:
    return np.array(values, np.float32)


def u32(values: list[Any]) -> np.ndarray:
    return np.array(values, np.uint32)



class Source:
    """Tensors in memory; counts the elements that are read."""

    def __init__(self, **tensors: np.ndarray) -> None:
        self.tensors, self.read = tensors, 0

    def get(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        rows = self.tensors[name][begin:end]
        self.read += rows.size
        return rows

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape


def source() -> Source:
    random = np.random.default_rng(0)
    return Source(a=random.standard_normal((6, 4), np.float32), b=random.standard_normal((3, 4), np.float32),
                  e=random.standard_normal((2, 3, 4), np.float32))


def expressions() -> dict[str, WeightExpr]:
    a, b, e = tensor("a", (6, 4)), tensor("b", (3, 4)), tensor("e", (2, 3, 4))
    rows = concat([a, b], 0)
    return {
        "rows": rows,
        "columns": concat([rows, rows], 1),
        "scaled": apply("mul", (rows, literal(np.arange(4, dtype=np.float32))), rows.type),
        "per row": apply("mul", (rows, literal(np.arange(9, dtype=np.float32)[:, None])), rows.type),
        "permuted": permute(e, (1, 0, 2)),
        "heads": reshape(permute(reshape(a, (3, 2, 4)), (0, 1, 2)), (6, 4)),
        "halves": reshape(a, (12, 2)),
        "pairs": reshape(a, (3, 8)),
        "part": slice_(slice_(rows, 0, 2, 8), 1, 1, 3),
        "small": cast(rows, DType.BF16),
        "negative exponential": apply("neg", (apply("exp", (a,), a.type),), a.type),
    }


@pytest.mark.parametrize("name", list(expressions()))
def test_any_range_of_rows_is_that_part_of_the_whole(name: str) -> None:
    expr, tensors = expressions()[name], source()
    whole = evaluate(expr, tensors)
    assert whole.shape == expr.shape
    for begin in range(expr.shape[0]):
        for end in range(begin, expr.shape[0] + 1):
            assert (evaluate(expr, tensors, (begin, end)) == whole[begin:end]).all(), (begin, end)


def test_a_range_reads_only_its_rows() -> None:
    tensors = source()
    expr = cast(concat([tensor("a", (6, 4)), tensor("b", (3, 4))], 0), DType.BF16)
    evaluate(expr, tensors, (5, 7))
    assert tensors.read == 2 * 4
    assert str(row_slice(expr, 5, 7)) == ("cast(cat(slice(a; dim=0, start=5, step=1, stop=6), "
                                          "slice(b; dim=0, start=0, step=1, stop=1); dim=0); dtype=bf16)")


def test_a_tensor_of_another_shape_names_both() -> None:
    with pytest.raises(WeightShapeError, match=r"tensor a: the model expects \[4, 6\], the checkpoint has \[6, 4\]"):
        evaluate(tensor("a", (4, 6)), source())


def test_operators_with_several_results(monkeypatch: pytest.MonkeyPatch) -> None:
    def split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        calls.append(x.shape)
        return np.floor(x), x - np.floor(x)

    monkeypatch.setattr(evaluation, "UNPACK_OPS", {"split": split})
    monkeypatch.setattr(evaluation, "ROW_WISE_UNPACK_OPS", {"split"})
    calls: list[tuple[int, ...]] = []
    a = tensor("a", (6, 4))
    whole, rest = (apply("split", (a,), TensorType((6, 4)), i) for i in (0, 1))
    total = apply("add", (whole, rest), a.type)
    assert np.allclose(evaluate(total, source()), source().tensors["a"]) and calls == [(6, 4)]
    assert np.allclose(evaluate(total, source(), (1, 3)), source().tensors["a"][1:3]) and calls[1:] == [(2, 4)]


@given(st.floats(width=32))
def test_bf16_rounds_to_the_nearest_even(value: float) -> None:
    x = f32([value])
    rounded = bf16_to_f32(f32_to_bf16(x))
    if np.isnan(x[0]):
        assert np.isnan(rounded[0])
        return
    bits = int(x.view(np.uint32)[0])
    below = u32([bits & 0xFFFF0000]).view(np.float32)[0]
    above = u32([(bits & 0xFFFF0000) + 0x10000]).view(np.float32)[0]
    half = 0x8000
    low = bits & 0xFFFF
    expected = below if low < half or (low == half and not (bits >> 16) & 1) else above
    assert rounded[0] == expected
    assert bf16_to_f32(f32_to_bf16(rounded))[0] == rounded[0]
