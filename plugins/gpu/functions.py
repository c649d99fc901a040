# mypy: allow-untyped-defs, allow-incomplete-defs
"""Elementwise functions that generated kernels call: float32 and int32, as the IR's operators are in numpy."""
import triton
import triton.language as tl

from .math import rint


@triton.jit
def maximum(a, b):
    """NaN if either is."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def minimum(a, b):
    return tl.where((a < b) | (a != a), a, b)


@triton.jit
def sign(x):
    return tl.where(x > 0, 1, tl.where(x < 0, -1, x))


@triton.jit
def round_even(x):
    """To the nearest integer, ties to even."""
    return tl.where(tl.abs(x) < 4194304.0, rint(x), x)


@triton.jit
def trunc(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_tanh(x):
    """x (1 + tanh(u)) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def expm1(x):
    """By its series where exp(x) - 1 would lose digits."""
    series = x * (1.0 + x * (0.5 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x * (1 / 5040)))))))
    return tl.where(tl.abs(x) < 0.5, series, tl.exp(x) - 1.0)


@triton.jit
def tanh(x):
    """Through exp of a number that is not positive: no overflow."""
    t = expm1(-2.0 * tl.abs(x))
    t = -t / (t + 2.0)
    return tl.where(x < 0, -t, t)


@triton.jit
def log1p(x):
    """2 artanh(x / (2 + x)) by its series where log(1 + x) would lose digits."""
    s = x / (2.0 + x)
    t = s * s
    series = 2.0 * s * (1.0 + t * (1 / 3 + t * (1 / 5 + t * (1 / 7 + t * (1 / 9 + t * (1 / 11 + t * (1 / 13)))))))
    return tl.where(tl.abs(x) < 0.5, series, tl.log(1.0 + x))


@triton.jit
def softplus(x):
    return tl.where(x > 0, x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@triton.jit
def mod(a, b):
    """The remainder with the sign of the divisor."""
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def floor_div(a, b):
    quotient = (a - mod(a, b)) / b  # an integer, but for rounding
    whole = tl.floor(quotient)
    whole = tl.where(quotient - whole > 0.5, whole + 1.0, whole)
    return tl.where(b == 0, a / b, whole)


@triton.jit
def mod_int(a, b):
    """With the sign of the divisor; zero for a divisor of zero."""
    divisor = tl.where(b == 0, b + 1, b)
    rest = a % divisor
    return tl.where((rest != 0) & ((rest < 0) != (divisor < 0)), rest + divisor, rest)


@triton.jit
def floor_div_int(a, b):
    """Towards minus infinity; zero for a divisor of zero."""
    divisor = tl.where(b == 0, b + 1, b)
    quotient = a // divisor
    below = (quotient * divisor != a) & ((a < 0) != (divisor < 0))
    return tl.where(b == 0, a * 0, tl.where(below, quotient - 1, quotient))


@triton.jit
def power(a, b):
    """In float64: exponents multiply what a logarithm in float32 has lost."""
    wide = tl.exp2(b.to(tl.float64) * tl.log2(tl.abs(a).to(tl.float64))).to(tl.float32)
    whole = tl.floor(b) == b
    odd = whole & (tl.floor(b * 0.5) * 2.0 != b)
    result = tl.where(a < 0, tl.where(odd, -wide, tl.where(whole, wide, float("nan"))), wide)
    return tl.where(b == 0, 1.0, result)


@triton.jit
def power_int(a, b):
    """For exponents b >= 0. Wraps around."""
    result = a * 0 + b * 0 + 1
    factor = a + b * 0
    for bit in range(31):
        result = tl.where((b >> bit) & 1 == 1, result * factor, result)
        factor = factor * factor
    return result
