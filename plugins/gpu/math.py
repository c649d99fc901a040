# mypy: allow-untyped-defs, allow-incomplete-defs
"""Arithmetic that kernels share. The same functions run compiled and in Triton's interpreter."""
import triton
import triton.language as tl

INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""The interpreter multiplies bf16 tiles wrongly: there they are widened first, which loses nothing."""

_ROUND: tl.constexpr = tl.constexpr(12582912.0)
"""1.5 * 2^23: what is added to it loses its fraction."""


@triton.jit
def dot(a, b, acc):
    """acc + a @ b, accumulated in 32 bits. a [M, K], b [K, N] of one type."""
    if a.dtype == tl.float32:
        return tl.dot(a, b, acc, input_precision="ieee")
    elif INTERPRETED and a.dtype == tl.bfloat16:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, out_dtype=acc.dtype)


@triton.jit
def rint(v):
    """The nearest integer of float32 v, ties to even; |v| < 2^22."""
    return (v + _ROUND) - _ROUND


@triton.jit
def quantize(v, TO: tl.constexpr):
    """float32 v, |v| at most the type's largest value, rounded to nearest: TO "fp8" (e4m3), "int8", "bf16", "fp16"."""
    if TO == "fp8":
        return v.to(tl.float8e4nv)
    elif TO == "int8":
        return rint(v).to(tl.int8)
    elif TO == "bf16":
        return v.to(tl.bfloat16)
    elif TO == "fp16":
        return v.to(tl.float16)
    else:
        return v


@triton.jit
def limit(TO: tl.constexpr):
    """The largest value of a quantized type."""
    return 448.0 if TO == "fp8" else 127.0


@triton.jit
def tanh(v):
    """Through exp of a number that is not positive: no overflow."""
    e = tl.exp(-2.0 * tl.abs(v))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(v < 0, -t, t)


@triton.jit
def activation(v, KIND: tl.constexpr):
    """KIND "silu", "gelu" (erf), "gelu_tanh", "relu", or "" for none. float32."""
    if KIND == "silu":
        return v / (1.0 + tl.exp(-v))
    elif KIND == "gelu":
        return 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        return 0.5 * v * (1.0 + tanh(0.7978845608028654 * (v + 0.044715 * v * v * v)))
    elif KIND == "relu":
        return tl.maximum(v, 0.0)
    else:
        return v
