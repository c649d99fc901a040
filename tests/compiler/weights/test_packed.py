from __future__ import annotations

import numpy as np
import pytest

from ingot.compiler.weights.expr import concat, literal, permute, tensor
from ingot.compiler.weights.packed import RAW, ROWS_AT_A_TIME, PackedWeight, Packing, WeightTable
from ingot.plugins.linear.pack import pack
from ingot.plugins.scheme import SCHEMES


class Source:
    """Counts the rows that are read at a time."""

    def __init__(self, **arrays: np.ndarray) -> None:
        self.arrays = arrays
        self.most = 0

    def shape(self, name: str) -> tuple[int, ...]:
        return self.arrays[name].shape

    def get(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        part = self.arrays[name][begin:end]
        self.most = max(self.most, len(part))
        return part


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_matrix_is_packed_a_piece_at_a_time(scheme: str) -> None:
    a, b = random(ROWS_AT_A_TIME + 48, 40), random(70, 40)
    source = Source(a=a, b=b)
    expr = concat([tensor("a", a.shape), tensor("b", b.shape)], 0)
    weight = PackedWeight("w0", expr, Packing(scheme), "")
    blob = weight.make(source)
    assert source.most <= ROWS_AT_A_TIME and blob.size == weight.size_bytes
    assert np.array_equal(blob, pack(np.concatenate([a, b]), SCHEMES[scheme]))


def test_experts_are_packed_one_by_one() -> None:
    w = random(5, 24, 40)
    source = Source(w=w)
    weight = PackedWeight("w0", tensor("w", w.shape), Packing("w4a8"), "")
    assert np.array_equal(weight.make(source), np.concatenate([pack(expert, SCHEMES["w4a8"]) for expert in w]))
    assert source.most == 1 and weight.size_bytes == weight.make(source).size


def test_other_constants_are_their_elements() -> None:
    w = random(3, 4)
    weight = PackedWeight("w0", permute(tensor("w", (3, 4)), (1, 0)), RAW, "")
    assert np.array_equal(weight.make(Source(w=w)).view(np.float32), w.T.reshape(-1)) and weight.size_bytes == 48


def test_what_is_equal_in_recipe_and_packing_is_one_blob() -> None:
    table, expr = WeightTable(), tensor("w", (32, 32))
    first = table.name(expr, Packing("int8"), "head")
    assert table.name(tensor("w", (32, 32)), Packing("int8"), "embedding") == first
    others = {table.name(expr, RAW, "w"), table.name(expr, Packing("w4a8"), "w"),
              table.name(literal(np.zeros(3, np.int32)), RAW, "ids")}
    assert first not in others and len(others) == 3 == len(table.entries) - 1
    assert [weight.label for weight in table.entries.values()] == [
        "head int8 [32, 32]", "w f32 [32, 32]", "w w4a8 [32, 32]", "ids i32 [3]"]
