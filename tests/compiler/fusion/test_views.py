from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.compiler.fusion.expr import ZERO, Expr, UnknownExtent, add, const, index, times
from ingot.compiler.fusion.views import (
    broadcast_index,
    permuted_index,
    reshaped_index,
    sliced_index,
)
from ingot.compiler.ir.types import Dim
from tests.compiler.fusion.test_expr import value

I0, I1, I2 = index(0), index(1), index(2)


def reshaped(old: tuple[Dim, ...], new: tuple[Dim, ...]) -> tuple[Expr, ...]:
    at = tuple(ZERO if dim == 1 else index(axis) for axis, dim in enumerate(new))
    return reshaped_index(at, new, old, dict(enumerate(new)))


def test_broadcast_reads_extents_of_one_at_zero() -> None:
    assert broadcast_index((I0, I1, I2), (6, 1)) == (I1, ZERO)
    assert broadcast_index((I0, I1), ()) == ()


def test_permute_and_slice() -> None:
    assert permuted_index((I0, I1, I2), (2, 0, 1)) == (I1, I2, I0)
    assert sliced_index((I0, I1), 1, 3, 2) == (I0, add(times(I1, 2), const(3)))


@pytest.mark.parametrize(("old", "new", "expected"), [
    (("T", 64), ("T", 64), (I0, I1)),
    ((1, "T", 64), ("T", 1, 64), (ZERO, I0, I2)),
    (("T", 2, 4), ("T", 8), (I0, Expr("floor_div", (I1, const(4)), None, I1.dtype), Expr("mod", (I1, const(4)), None,
                                                                                     I1.dtype))),
    (("T", 8), ("T", 2, 4), (I0, add(times(I1, 4), I2))),
    (("T", 3, 5), ("3*T", 5), (Expr("floor_div", (I0, const(3)), None, I0.dtype), Expr("mod", (I0, const(3)), None,
                                                                                     I0.dtype), I1)),
    (("3*T", 5), ("T", 3, 5), (add(times(I0, 3), I1), I2)),
    (("8*T", 5), ("4*T", 2, 5), (add(times(I0, 2), I1), I2))])
def test_reshapes(old: tuple[Dim, ...], new: tuple[Dim, ...], expected: tuple[Expr, ...]) -> None:
    assert reshaped(old, new) == expected


def test_tokens_inside_of_a_merged_dimension() -> None:
    tokens = Expr("extent", (), ("T", 0, 4), I0.dtype)
    assert [str(e) for e in reshaped((4, "T"), ("4*T",))] == ["floor_div(i0, T)", "mod(i0, T)"]
    assert reshaped((4, "T"), ("4*T",))[0] == Expr("floor_div", (I0, tokens), None, I0.dtype)
    flat, = reshaped(("4*T",), (4, "T"))
    assert str(flat) == "((i0 * T) + i1)"
    extents: dict[int, Dim] = {0: 4, 1: "T"}
    assert reshaped_index((flat,), ("4*T",), (4, "T"), extents) == (I0, I1)
    assert [str(e) for e in reshaped_index((flat,), ("4*T",), (2, "2*T"), extents)] == [
        "floor_div(((i0 * T) + i1), (T * 2))", "mod(((i0 * T) + i1), (T * 2))"]


def test_tokens_with_channels_inside_of_a_merged_dimension() -> None:
    extents: dict[int, Dim] = {0: 3, 1: "T", 2: 8}
    flat, = reshaped_index((I0, I1, I2), (3, "T", 8), ("24*T",), extents)
    assert reshaped_index((flat,), ("24*T",), (3, "T", 8), extents) == (I0, I1, I2)
    assert reshaped_index((flat,), ("24*T",), (3, "8*T"), extents) == (I0, add(times(I1, 8), I2))


def test_a_loop_without_an_axis_of_tokens_cannot_divide_by_them() -> None:
    with pytest.raises(UnknownExtent):
        reshaped_index((const(5),), ("4*T",), (4, "T"), {})


@st.composite
def two_shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two factorisations of one number."""
    primes = draw(st.lists(st.sampled_from([2, 2, 3, 5]), max_size=6))

    def grouped() -> tuple[int, ...]:
        shape = [1] * draw(st.integers(1, 4))
        for prime in draw(st.permutations(primes)):
            shape[draw(st.integers(0, len(shape) - 1))] *= prime
        return tuple(shape)
    return grouped(), grouped()


@settings(max_examples=200, deadline=None)
@given(two_shapes())
def test_any_reshape_is_numpys(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    old, new = shapes
    source = np.arange(np.prod(old)).reshape(old)
    inner = reshaped(old, new)
    for at in np.ndindex(new):
        place = tuple(value(e, dict(enumerate(at))) for e in inner)
        assert source[place] == source.reshape(new)[at]
