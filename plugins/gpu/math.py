# mypy: allow-untyped-defs, allow-incomplete-defs
"""Arithmetic that kernels share. The same functions run compiled and in Triton's interpreter."""
import triton
import triton.language as tl

INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""The interpreter multiplies bf16 tiles wrongly: there they are widened first, which loses nothing."""

_ROUND: tl.constexpr = tl.constexpr(12582912.0)
"""1.5 * 2^23: what is added to it loses its fraction."""

_SUBNORMAL_E4M3: tl.constexpr = tl.constexpr(24576.0)
"""1.5 * 2^14: what is added to it is rounded to multiples of 2^-9, the smallest e4m3."""


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
def dot_nvfp4(a, a_scale, b, b_scale, acc):
    """acc + a @ b^T, e2m1 with an e4m3 scale for 16 channels. a [N, K/2], b [M, K/2] u8, low nibble the even channel;
    a_scale [N, K/16], b_scale [M, K/16]. The interpreter knows no e4m3 scales: there the product is written out."""
    if INTERPRETED:
        return tl.dot(_wide_nvfp4(a, a_scale), _wide_nvfp4(b, b_scale).T, acc, input_precision="ieee")
    else:
        return tl.dot_scaled(a, a_scale, "e2m1", b.T, b_scale, "e2m1", acc)


@triton.jit
def _wide_nvfp4(packed, scale):
    """float32 [R, K] of packed u8 [R, K/2] and scale e4m3 [R, K/16]."""
    ROWS: tl.constexpr = packed.shape[0]
    K: tl.constexpr = 2 * packed.shape[1]
    code = tl.join(packed & 15, packed >> 4).reshape(ROWS, K).to(tl.int32)
    magnitude = code & 7
    fraction = 1.0 + 0.5 * (magnitude & 1).to(tl.float32)
    value = tl.where(magnitude < 2, 0.5 * magnitude.to(tl.float32),
                     fraction * tl.exp2(((magnitude >> 1) - 1).to(tl.float32)))
    value = tl.where(code > 7, -value, value).reshape(ROWS, K // 16, 16)
    return (value * scale.to(tl.float32)[:, :, None]).reshape(ROWS, K)


@triton.jit
def e2m1(v):
    """The code 0..15 of the nearest e2m1, ties to the even code. v float32."""
    a = tl.abs(v)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5) + (a >= 3.5) + (a > 5.0)
    return tl.where(v < 0, code | 8, code)


@triton.jit
def to_nvfp4(v, ROWS: tl.constexpr, K: tl.constexpr):
    """float32 v [ROWS, K], |v| at most 6 * 448 -> packed u8 [ROWS, K/2], scale e4m3 [ROWS, K/16]."""
    blocks = v.reshape(ROWS, K // 16, 16)
    scale = narrow(tl.minimum(tl.max(tl.abs(blocks), 2) / 6.0, 448.0), tl.float8e4nv)
    wide = scale.to(tl.float32)
    code = e2m1(blocks / tl.where(wide > 0, wide, 1.0)[:, :, None])
    low, high = tl.split(code.reshape(ROWS, K // 2, 2))
    return (low | (high << 4)).to(tl.uint8), scale


@triton.jit
def rint(v):
    """The nearest integer of float32 v, ties to even; |v| < 2^22."""
    return (v + _ROUND) - _ROUND


@triton.jit
def narrow(v, TO: tl.constexpr):
    """float32 v rounded to nearest, ties to even, in floating-point type TO (bf16, fp16, e4m3, float32).

    The interpreter's own casts cut bf16 off and lose carries of e4m3. There v is first rounded in float32 to a value
    that the type holds, so that the cast has nothing left to round.
    """
    if INTERPRETED and TO == tl.bfloat16:  # noqa: SIM300
        bits = v.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        return bits.to(tl.float32, bitcast=True).to(TO)
    elif INTERPRETED and TO == tl.float8e4nv:  # noqa: SIM300
        bits = v.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        below = (v + _SUBNORMAL_E4M3) - _SUBNORMAL_E4M3
        return tl.where(tl.abs(v) < 0.015625, below, normal).to(TO)
    else:
        return v.to(TO)


@triton.jit
def quantize(v, TO: tl.constexpr):
    """float32 v, |v| at most the type's largest value, rounded to nearest: TO "fp8" (e4m3), "int8", "bf16", "fp16"."""
    if TO == "fp8":
        return narrow(v, tl.float8e4nv)
    elif TO == "int8":
        return rint(v).to(tl.int8)
    elif TO == "bf16":
        return narrow(v, tl.bfloat16)
    elif TO == "fp16":
        return v.to(tl.float16)
    else:
        return v


@triton.jit
def group_sums(q, GROUP: tl.constexpr):
    """The sums of each GROUP of quantized q [ROWS, K], float16 [ROWS, K / GROUP]: at most 128 * 448."""
    return tl.sum(q.to(tl.float32).reshape(q.shape[0], q.shape[1] // GROUP, GROUP), 2).to(tl.float16)


@triton.jit
def limit(TO: tl.constexpr):
    """The largest value of a quantized type; of nvfp4 the largest scale times the largest element."""
    return 448.0 if TO == "fp8" else 127.0 if TO == "int8" else 2688.0


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


@triton.jit
def gate(v, other, KIND: tl.constexpr):
    """activation(v) * other, or KIND "clamped_swiglu": v at most 7, other between -7 and 7, and
    v * sigmoid(1.702 v) * (other + 1). float32."""
    if KIND == "clamped_swiglu":
        v = tl.minimum(v, 7.0)
        other = tl.minimum(tl.maximum(other, -7.0), 7.0)
        return v / (1.0 + tl.exp(-1.702 * v)) * (other + 1.0)
    else:
        return activation(v, KIND) * other


@triton.jit
def group_of(tile, starts, num_groups, SIZE: tl.constexpr, STEPS: tl.constexpr):
    """The group g that a tile of SIZE items belongs to: the last one with starts[g] // SIZE + g <= tile.

    starts i32 [num_groups + 1], ascending from 0. With tiles numbered so, every group has tiles enough for its items
    however they fall, and tiles beyond a group's last item find nothing to do: no list of tiles is needed.
    STEPS: at least the binary digits of num_groups, plus one.
    """
    low, high = tile * 0, tile * 0 + num_groups
    for _ in range(STEPS):
        middle = (low + high) // 2
        first = tl.load(starts + middle) // SIZE + middle
        right = (first <= tile) & (low < high)
        low = tl.where(right, middle + 1, low)
        high = tl.where(right, high, middle)
    return low - 1


@triton.jit
def group_with(item, starts, num_groups, STEPS: tl.constexpr):
    """The last group g with starts[g] <= item: the one that holds the item, if any does. starts and STEPS as above."""
    low, high = item * 0, item * 0 + num_groups
    for _ in range(STEPS):
        middle = (low + high) // 2
        right = (low < high) & (tl.load(starts + middle) <= item)
        low = tl.where(right, middle + 1, low)
        high = tl.where(right, high, middle)
    return low - 1
