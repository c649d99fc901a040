from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.compiler.fusion.expr import (
    ZERO,
    Expr,
    add,
    bounds,
    const,
    floor_div,
    from_terms,
    index,
    load,
    mod,
    terms,
    times,
)
from ingot.compiler.ir.types import Dim, DType

I0, I1, I2 = index(0), index(1), index(2)
EXTENTS: dict[int, Dim] = {0: "T", 1: 6, 2: 4}
LOADED = load(0, (I0,), DType.I32)


def value(e: Expr, at: dict[int, int]) -> int:
    if e.op == "const":
        return int(e.value)
    if e.op == "index":
        return at[e.value]
    a, b = (value(arg, at) for arg in e.args)
    return {"add": a + b, "sub": a - b, "mul": a * b, "floor_div": a // max(b, 1), "mod": a % max(b, 1)}[e.op]


def points() -> list[dict[int, int]]:
    return [dict(enumerate(at)) for at in itertools.product(range(5), range(6), range(4))]


def test_sums_have_one_normal_form() -> None:
    assert add(times(I0, 3), add(I1, times(I0, 2))) == add(I1, times(I0, 5))
    assert add(add(I0, const(4)), times(add(I0, const(2)), -2)) == times(I0, -1)
    assert add(times(I0, 2), times(I0, -2)) == ZERO
    assert terms(add(times(add(I1, const(1)), 4), I2)) == ({I1: 4, I2: 1}, 4)
    assert from_terms({}, 0) == ZERO


def test_what_stands_in_text() -> None:
    assert str(add(times(I0, 64), add(I1, const(-8)))) == "(((i0 * 64) + i1) + -8)"
    assert str(load(1, (I0, ZERO), DType.F32)) == "in1[i0, 0]"
    assert str(Expr("gelu", (load(0, (I0,), DType.F32),), "tanh")) == "gelu(in0[i0]; tanh)"
    assert str(Expr("cast", (I0,), DType.F32)) == "cast(i0; f32)"


@pytest.mark.parametrize(("e", "expected"), [
    (const(7), (7, 7)), (I0, (0, None)), (I1, (0, 5)), (add(times(I1, 4), I2), (0, 23)), (add(I1, const(-3)), (-3, 2)),
    (times(I1, -2), (-10, 0)), (times(I0, -1), (None, 0)), (LOADED, (None, None)), (add(LOADED, I1), (None, None)),
    (Expr("floor_div", (add(times(I1, 4), I2), const(5)), None, DType.I32), (0, 4)),
    (Expr("mod", (I0, const(5)), None, DType.I32), (0, 4)),
    (Expr("mod", (LOADED, LOADED), None, DType.I32), (None, None)),
    (Expr("floor_div", (I1, LOADED), None, DType.I32), (None, None))])
def test_bounds(e: Expr, expected: tuple[int | None, int | None]) -> None:
    assert bounds(e, EXTENTS) == expected


def test_a_merged_index_comes_apart_again() -> None:
    flat = add(times(add(times(I0, 6), I1), 4), I2)
    assert mod(flat, 4, EXTENTS) == I2
    assert floor_div(flat, 4, EXTENTS) == add(times(I0, 6), I1)
    assert mod(floor_div(flat, 4, EXTENTS), 6, EXTENTS) == I1
    assert floor_div(flat, 24, EXTENTS) == I0


def test_halves_of_a_merged_index() -> None:
    """[6, 4] as [3, 8]: without a division of the inner index."""
    flat = add(times(I1, 4), I2)
    assert mod(flat, 8, EXTENTS) == add(times(Expr("mod", (I1, const(2)), None, DType.I32), 4), I2)
    assert floor_div(flat, 8, EXTENTS) == Expr("floor_div", (I1, const(2)), None, DType.I32)


def test_quotients_of_quotients() -> None:
    assert floor_div(floor_div(I0, 3, EXTENTS), 5, EXTENTS) == floor_div(I0, 15, EXTENTS)


def test_an_index_after_the_start_of_a_part() -> None:
    """Of the second part of a concatenation: i1 - 8 with i1 >= 8."""
    flat = add(times(add(I1, const(-8)), 4), I2)
    assert floor_div(flat, 4, EXTENTS) == add(I1, const(-8))
    assert mod(flat, 4, EXTENTS) == I2


def test_a_loaded_number_may_be_divided_by_another() -> None:
    quotient = Expr("floor_div", (LOADED, load(1, (I0,), DType.I32)), None, DType.I32)
    assert mod(quotient, 3, EXTENTS) == Expr("mod", (quotient, const(3)), None, DType.I32)
    assert floor_div(quotient, 3, EXTENTS) == Expr("floor_div", (quotient, const(3)), None, DType.I32)


EXPRESSIONS = st.recursive(
    st.sampled_from([I0, I1, I2]) | st.integers(-9, 9).map(const),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: add(*pair)),
        st.tuples(inner, st.integers(-6, 6)).map(lambda pair: times(*pair)),
        st.tuples(inner, st.integers(1, 12)).map(lambda pair: floor_div(*pair, EXTENTS)),
        st.tuples(inner, st.integers(1, 12)).map(lambda pair: mod(*pair, EXTENTS))), max_leaves=8)


@settings(max_examples=300, deadline=None)
@given(EXPRESSIONS, st.integers(1, 24))
def test_simplified_is_unsimplified(e: Expr, divisor: int) -> None:
    low, high = bounds(e, EXTENTS)
    quotient, rest = floor_div(e, divisor, EXTENTS), mod(e, divisor, EXTENTS)
    for at in points():
        number = value(e, at)
        assert low is None or low <= number
        assert high is None or number <= high
        assert value(quotient, at) == number // divisor
        assert value(rest, at) == number % divisor
        assert value(from_terms(*terms(e)), at) == number
