"""Instructions of lanes against numbers known from elsewhere: Python's integers, math, ml_dtypes, or worked by hand."""
from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from tests.tools.ptx.programs import lanes

RNG = np.random.default_rng(3)
A, B, C = (RNG.integers(0, 1 << 32, 32, np.uint32) for _ in range(3))
A[:6], B[:6] = (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 5), (3, 0xFFFFFFFF, 1, 0xFFFFFFFF, 0x80000000, 0xFFFFFFFD)
AMOUNTS = np.arange(0, 64, 2, dtype=np.uint32)
X, Y, Z = ((RNG.standard_normal(32) * 10.0 ** RNG.integers(-3, 4, 32)).astype(np.float32) for _ in range(3))


def signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def permuted(a: int, b: int, selector: int) -> int:
    both, found = (b << 32 | a).to_bytes(8, "little"), []
    for i in range(4):
        digit = selector >> 4 * i & 15
        byte = both[digit & 7]
        found.append((255 if byte & 128 else 0) if digit & 8 else byte)
    return int.from_bytes(bytes(found), "little")


def field(value: int, position: int, length: int) -> int:
    return value >> position & ((1 << length) - 1)


@pytest.mark.parametrize("text, expected", [
    ("add.s32 %d, %a, %b;", lambda a, b: a + b),
    ("sub.s32 %d, %a, %b;", lambda a, b: a - b),
    ("mul.lo.s32 %d, %a, %b;", lambda a, b: a * b),
    ("mul.hi.u32 %d, %a, %b;", lambda a, b: a * b >> 32),
    ("mul.hi.s32 %d, %a, %b;", lambda a, b: signed(a) * signed(b) >> 32),
    ("div.s32 %d, %a, %b;", lambda a, b: math.trunc(signed(a) / signed(b))),
    ("rem.s32 %d, %a, %b;", lambda a, b: int(math.fmod(signed(a), signed(b)))),
    ("div.u32 %d, %a, %b;", lambda a, b: a // b),
    ("min.s32 %d, %a, %b;", lambda a, b: min(signed(a), signed(b))),
    ("max.u32 %d, %a, %b;", max),
    ("add.u16x2 %d, %a, %b;", lambda a, b: (a + b & 0xFFFF) | ((a >> 16) + (b >> 16) & 0xFFFF) << 16),
    ("max.s16x2 %d, %a, %b;",
     lambda a, b: max(signed(a, 16), signed(b, 16)) & 0xFFFF | max(signed(a >> 16, 16), signed(b >> 16, 16)) << 16),
    ("and.b32 %d, %a, %b;", lambda a, b: a & b),
    ("neg.s32 %d, %a;", lambda a, b: -a),
    ("not.b32 %d, %a;", lambda a, b: ~a),
    ("mad.lo.s32 %d, %a, %b, 7;", lambda a, b: a * b + 7),
    ("prmt.b32 %d, %a, %b, 0x7240;", lambda a, b: permuted(a, b, 0x7240)),
    ("prmt.b32 %d, %a, %b, 0x9FB3;", lambda a, b: permuted(a, b, 0x9FB3)),
    ("prmt.b32 %d, %a, 67, %b;", lambda a, b: permuted(a, 67, b)),
    ("lop3.b32 %d, %a, %b, 0x0F0F0F0F, 0xEA;", lambda a, b: (a & b) | 0x0F0F0F0F),
    ("bfe.u32 %d, %a, 4, 15;", lambda a, b: field(a, 4, 15)),
    ("bfe.s32 %d, %a, 5, 1;", lambda a, b: signed(field(a, 5, 1), 1)),
    ("bfe.s32 %d, %a, 24, 16;", lambda a, b: signed(a >> 24, 8)),
    ("bfi.b32 %d, %a, %b, 8, 4;", lambda a, b: (b & ~0xF00) | (a & 15) << 8),
    ("popc.b32 %d, %a;", lambda a, b: a.bit_count()),
    ("clz.b32 %d, %a;", lambda a, b: 32 - a.bit_length()),
    ("brev.b32 %d, %a;", lambda a, b: int(f"{a:032b}"[::-1], 2)),
    ("shf.l.wrap.b32 %d, %a, %b, 9;", lambda a, b: (b << 32 | a) << 9 >> 32),
    ("shf.r.clamp.b32 %d, %a, %b, 40;", lambda a, b: b),
    ("setp.lt.s32 %p0, %a, %b; selp.b32 %d, 1, 2, %p0;", lambda a, b: 1 if signed(a) < signed(b) else 2),
    ("setp.hi.u32 %p0, %a, %b; selp.b32 %d, 1, 2, %p0;", lambda a, b: 1 if a > b else 2),
    ("setp.eq.and.b32 %p0|%p1, %a, 5, 1; selp.b32 %d, 1, 2, %p1;", lambda a, b: 1 if a != 5 else 2),
    ("{ .reg .b16 low, high; mov.b32 {low, high}, %a; mov.b32 %d, {high, low}; }", lambda a, b: a >> 16 | a << 16),
    ("{ .reg .b16 %s; cvt.u16.u32 %s, %a; cvt.u32.u16 %d, %s; }", lambda a, b: a & 0xFFFF),
    ("{ .reg .b16 %s; cvt.u16.u32 %s, %a; cvt.s32.s8 %d, %s; }", lambda a, b: signed(a, 8)),
    ("dp4a.u32.u32 %d, %a, %b, 3;",
     lambda a, b: 3 + sum((a >> i & 255) * (b >> i & 255) for i in (0, 8, 16, 24)))])
def test_integers(text: str, expected: Callable[[int, int], int]) -> None:
    wanted = [expected(int(a), int(b)) & 0xFFFFFFFF for a, b in zip(A, B, strict=True)]
    assert lanes(text, A, B).tolist() == wanted


def test_words_of_longer_integers() -> None:
    """A product of 64 bits, and a difference, from halves; the upper word is the result."""
    product = lanes("""mul.lo.u32 %r10, %a, %b; mad.lo.cc.u32 %r11, %a, %b, %r10; madc.hi.u32 %d, %a, %b, 7;""", A, B)
    difference = lanes("sub.cc.u32 %r10, %a, %b; subc.u32 %d, 5, 3;", A, B)
    for a, b, upper, less in zip(A.tolist(), B.tolist(), product.tolist(), difference.tolist(), strict=True):
        assert upper == (a * b + (a * b & 0xFFFFFFFF) + (7 << 32)) >> 32 & 0xFFFFFFFF
        assert less == 5 - 3 - (a < b)
    total = lanes("add.cc.u32 %r10, %a, %b; addc.cc.u32 %r11, %a, 0xFFFFFFFF; addc.u32 %d, 0, 0;", A, B)
    assert total.tolist() == [((a << 32) + a + b + (0xFFFFFFFF << 32)) >> 64 for a, b in zip(A.tolist(), B.tolist(),
                                                                                           strict=True)]


@pytest.mark.parametrize("text, expected", [
    ("mul.wide.s32 %d, %a, %b;", lambda a, b: signed(a) * signed(b)),
    ("mul.wide.u32 %d, %a, %b;", lambda a, b: a * b),
    ("mad.wide.s32 %d, %a, 12288, 5;", lambda a, b: signed(a) * 12288 + 5),
    ("cvt.s64.s32 %d, %a;", lambda a, b: signed(a)),
    ("cvt.u64.u32 %d, %a;", lambda a, b: a),
    ("mov.b64 %d, {%a, %b};", lambda a, b: b << 32 | a)])
def test_wide_integers(text: str, expected: Callable[[int, int], int]) -> None:
    wanted = [expected(int(a), int(b)) & (1 << 64) - 1 for a, b in zip(A, B, strict=True)]
    assert lanes(text, A, B, result=np.uint64).tolist() == wanted


@pytest.mark.parametrize("text, expected", [
    ("shl.b32 %d, %a, %b;", lambda a, by: a << by if by < 32 else 0),
    ("shr.u32 %d, %a, %b;", lambda a, by: a >> by),
    ("shr.s32 %d, %a, %b;", lambda a, by: signed(a) >> by),
    ("shr.s32 %d, %a, 3;", lambda a, by: signed(a) >> 3)])
def test_shifts_beyond_the_width(text: str, expected: Callable[[int, int], int]) -> None:
    wanted = [expected(int(a), int(by)) & 0xFFFFFFFF for a, by in zip(A, AMOUNTS, strict=True)]
    assert lanes(text, A, AMOUNTS).tolist() == wanted


def test_arithmetic_of_floats() -> None:
    def got(text: str) -> np.ndarray:
        return lanes(text, X, Y, Z, result=np.float32)
    assert (got("add.f32 %d, %a, %b;") == X + Y).all() and (got("mul.rn.f32 %d, %a, %b;") == X * Y).all()
    exact = (X.astype(np.longdouble) * Y + Z).astype(np.float32)
    assert (got("fma.rn.f32 %d, %a, %b, %c;") == exact).all(), "rounded once"
    assert (got("fma.rn.f32 %d, %a, %b, %c;") != X * Y + Z).any(), "and not twice"
    assert (got("copysign.f32 %d, %a, %b;") == np.copysign(Y, X)).all()
    assert (got("neg.f32 %d, %a;") == -X).all() and (got("abs.f32 %d, %a;") == abs(X)).all()
    assert (got("add.rn.f32x2 %rd10, %rd11, %rd12; mov.b64 %rd11, {%a, %b}; mov.b64 %rd12, {%c, %a};"
                "add.rn.f32x2 %rd10, %rd11, %rd12; mov.b64 {_, %d}, %rd10;") == Y + X).all()


def test_sums_of_two_types() -> None:
    small = Y.astype(ml_dtypes.bfloat16)
    bits, wide = small.view(np.uint16).astype(np.uint32), small.astype(np.float32)
    halves = "{ .reg .b16 s; cvt.u16.u32 s, %a; "
    assert (lanes(halves + "add.rn.f32.bf16 %d, s, %b; }", bits, X, result=np.float32) == wide + X).all()
    assert (lanes(halves + "sub.f32.bf16 %d, s, %b; }", bits, X, result=np.float32) == wide - X).all()
    fused = (wide.astype(np.float64) ** 2 + X).astype(np.float32)
    assert (lanes(halves + "fma.rn.f32.bf16 %d, s, s, %b; }", bits, X, result=np.float32) == fused).all()


def test_numbers_that_are_none() -> None:
    x = np.array([np.nan, 1, np.nan, -0.0] * 8, np.float32)
    y = np.array([2, np.nan, np.nan, 0.0] * 8, np.float32)
    assert lanes("max.f32 %d, %a, %b;", x, y, result=np.float32)[:2].tolist() == [2, 1]
    assert np.isnan(lanes("max.NaN.f32 %d, %a, %b;", x, y, result=np.float32)[:3]).all()
    for test, wanted in {"lt": [0, 0, 0, 0], "ltu": [1, 1, 1, 0], "eq": [0, 0, 0, 1], "ne": [0, 0, 0, 0],
                         "neu": [1, 1, 1, 0], "nan": [1, 1, 1, 0], "num": [0, 0, 0, 1]}.items():
        found = lanes(f"setp.{test}.f32 %p0, %a, %b; selp.b32 %d, 1, 0, %p0;", x, y)
        assert found[:4].tolist() == wanted, test


def test_comparisons_of_halves() -> None:
    halves = np.array([[1, 2], [np.nan, 1], [3, np.nan], [-0.0, 0]] * 8, np.float16)
    other = np.array([[2, 1], [1, 1], [3, 3], [0, 0]] * 8, np.float16)
    a, b = (np.ascontiguousarray(x).view(np.uint32)[:, 0] for x in (halves, other))
    for test, wanted in {"lt": [1, 0, 0, 0], "nan": [0, 1, 2, 0], "eq": [0, 2, 1, 3], "geu": [2, 3, 3, 3]}.items():
        found = lanes(f"setp.{test}.f16x2 %p0|%p1, %a, %b; selp.b32 %d, 1, 0, %p0; @%p1 add.s32 %d, %d, 2;", a, b)
        assert found[:4].tolist() == wanted, test


@pytest.mark.parametrize("text, exact, bound", [
    ("ex2.approx.f32 %d, %a;", np.exp2, 2.0**-22.5), ("rsqrt.approx.f32 %d, %b;", lambda x: 1 / np.sqrt(x), 2.0**-22.9),
    ("div.full.f32 %d, 0f40400000, %b;", lambda x: 3 / x, 2.0**-22), ("sqrt.approx.f32 %d, %b;", np.sqrt, 2.0**-23)])
def test_approximations_are_off_but_not_by_more_than_told(text: str, exact: Callable[..., np.ndarray],
                                                         bound: float) -> None:
    small, positive = np.clip(X, -20, 20), np.abs(Y) + np.float32(0.01)
    given = small if "%a" in text else positive
    true = exact(given.astype(np.float64))
    error = np.abs(lanes(text, small, positive, result=np.float32) / true - 1)
    assert error.max() < bound and error.max() > 0.1 * bound
    assert lanes("ex2.approx.f32 %d, %a;", np.zeros(32, np.float32), result=np.float32)[0] == 1


def test_subnormals_are_flushed_where_asked() -> None:
    tiny = np.full(32, 1e-39, np.float32)
    assert (lanes("mul.f32 %d, %a, 0f3F800000;", tiny, result=np.float32) == tiny).all()
    assert (lanes("mul.ftz.f32 %d, %a, 0f3F800000;", tiny, result=np.float32) == 0).all()


SPECIAL = np.array([
    0, -0.0, 1, -1, 448, 460, 1e6, -1e6, np.inf, np.nan, 2**-9, 2**-10, 3 * 2**-10, 0.0156, 1.0625, 1.1875,
    5.1, 6, 0.25, 0.75, 1.75, 2.5, 3.5, -5, 240, 65504, 1e-8, 0.3, -0.3, 17, 33, 65], np.float32)


def test_conversions_of_sixteen_bits() -> None:
    x = np.where(np.isnan(SPECIAL), 3, SPECIAL).astype(np.float32)
    for kind, numpy_type in (("bf16", ml_dtypes.bfloat16), ("f16", np.float16)):
        both = lanes(f"cvt.rn.{kind}x2.f32 %d, %a, %b;", x, Y)
        with np.errstate(over="ignore"):
            assert ((both >> 16).astype(np.uint16) == x.astype(numpy_type).view(np.uint16)).all(), "the first is above"
            assert ((both & 0xFFFF).astype(np.uint16) == Y.astype(numpy_type).view(np.uint16)).all()
        back = lanes(f"{{ .reg .b16 low, high; mov.b32 {{low, high}}, %a; cvt.f32.{kind} %d, low; }}", both,
                     result=np.float32)
        assert (back == Y.astype(numpy_type).astype(np.float32)).all()


def test_conversions_of_eight_and_four_bits() -> None:
    reverse = SPECIAL[::-1].copy()
    for kind, numpy_type, largest in (("e4m3", ml_dtypes.float8_e4m3fn, 448), ("e5m2", ml_dtypes.float8_e5m2, 57344)):
        text = f"{{ .reg .b16 s; cvt.rn.satfinite.{kind}x2.f32 s, %a, %b; cvt.u32.u16 %d, s; }}"
        with np.errstate(invalid="ignore", over="ignore"):
            above, below = (np.where(np.isnan(v), 0x7F, np.clip(v, -largest, largest).astype(numpy_type).view(np.uint8))
                            for v in (SPECIAL, reverse))
        packed = lanes(text, SPECIAL, reverse)
        assert (packed == above.astype(np.uint32) << 8 | below).all()
        halves = lanes(f"{{ .reg .b16 s; cvt.u16.u32 s, %a; cvt.rn.f16x2.{kind}x2 %d, s; }}", packed).view(np.float16)
        with np.errstate(invalid="ignore"):
            wanted = np.stack([below, above], 1).astype(np.uint8).view(numpy_type).astype(np.float16)
        assert np.array_equal(halves.reshape(-1, 2), wanted, equal_nan=True)
    given = np.resize(SPECIAL[16:24], 32)
    four = lanes("{ .reg .b8 s; cvt.rn.satfinite.e2m1x2.f32 s, %a, 0f40400000; cvt.u32.u8 %d, s; }", given)
    assert [(int(code) >> 4, int(code) & 15) for code in four[:8]] == [
        (7, 5), (7, 5), (0, 5), (2, 5), (4, 5), (4, 5), (6, 5), (14, 5)], "ties go to the even code"


def test_floats_and_integers() -> None:
    x = np.array([2.5, -2.5, 3.5, 1e10, -1e10, np.nan, 300.7, -0.4] * 4, np.float32)
    assert lanes("cvt.rni.s32.f32 %d, %a;", x, result=np.int32)[:8].tolist() == [
        2, -2, 4, 2**31 - 1, -(2**31), 0, 301, 0]
    assert lanes("{ .reg .b16 s; cvt.rzi.s16.f32 s, %a; cvt.s32.s16 %d, s; }", x, result=np.int32)[:8].tolist() == [
        2, -2, 3, 32767, -32768, 0, 300, 0]
    assert lanes("cvt.rzi.u32.f32 %d, %a;", x)[:5].tolist() == [2, 0, 3, 2**32 - 1, 0]
    assert (lanes("cvt.rn.f32.s32 %d, %a;", A, result=np.float32) == A.view(np.int32).astype(np.float32)).all()
    assert (lanes("{ .reg .b16 s; cvt.u16.u32 s, %a; cvt.rn.f32.s8 %d, s; }", A, result=np.float32)
            == A.astype(np.uint8).view(np.int8).astype(np.float32)).all()
