# mypy: allow-untyped-defs, allow-incomplete-defs
"""Normalisation of rows, with the residual sum before it and the quantization after it."""
import triton
import triton.language as tl

from ..gpu.math import narrow
from ..quantize.gpu import store_row


@triton.jit
def _normalised(v, weight, bias, at, D: tl.constexpr, KIND: tl.constexpr, EPS: tl.constexpr):
    """v float32 [BLOCK], zero beyond D. KIND "rms_norm" or "layer_norm"; weight and bias f32 [D] or None."""
    inside = at < D
    if KIND == "layer_norm":
        v = tl.where(inside, v - tl.sum(v, 0) / D, 0.0)
    v = v * tl.rsqrt(tl.sum(v * v, 0) / D + EPS)
    if weight is not None:
        v = v * tl.load(weight + at, mask=inside, other=0.0)
    if bias is not None:
        v = v + tl.load(bias + at, mask=inside, other=0.0)
    return v


@triton.jit
def store_normalised(v, weight, normed, q, q_scale, q_factor, q_sum, row, D: tl.constexpr, BLOCK: tl.constexpr,
                     EPS: tl.constexpr, TO: tl.constexpr, SUMS: tl.constexpr):
    """What rms_norm makes of v float32 [BLOCK], zero beyond D: to the row of normed as it is, and of q quantized
    (store_row). Either may be None."""
    at = tl.arange(0, BLOCK)
    v = _normalised(v, weight, None, at, D, "rms_norm", EPS)
    if normed is not None:
        tl.store(normed + row * D + at, narrow(v, normed.dtype.element_ty), mask=at < D)
    if q is not None:
        store_row(v, q, q_scale, q_factor, q_sum, None, row, D, BLOCK, TO, SUMS)


@triton.jit
def norm(x, residual, total, weight, bias, x_weight, y, y_scale, y_factor, y_sum, static_scale, sizes,
         ROWS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, X_STRIDE: tl.constexpr, BLOCK: tl.constexpr,
         KIND: tl.constexpr, EPS: tl.constexpr, TO: tl.constexpr, SUMS: tl.constexpr):
    """y = norm(s), s = x + residual, or norm(x) by x_weight + residual (a norm after the block as well).

    x [T, GROUP, D], tokens X_STRIDE elements apart; residual and total [T, GROUP, D] in x's type: s goes to total,
    which may be residual itself. Without residual s is x, and total is not written. y, y_scale, y_factor, y_sum,
    static_scale: store_row; without y the sum is all that is wanted.
    """
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(sizes + ROWS) * GROUP:
        return
    at = tl.arange(0, BLOCK)
    inside = at < D
    v = tl.load(x + row // GROUP * X_STRIDE + row % GROUP * D + at, mask=inside, other=0.0).to(tl.float32)
    if x_weight is not None:
        v = _normalised(v, x_weight, None, at, D, KIND, EPS)
    if residual is not None:
        v += tl.load(residual + row * D + at, mask=inside, other=0.0).to(tl.float32)
        rounded = narrow(v, total.dtype.element_ty)
        tl.store(total + row * D + at, rounded, mask=inside)
        v = rounded.to(tl.float32)
    if y is not None:
        v = _normalised(v, weight, bias, at, D, KIND, EPS)
        store_row(v, y, y_scale, y_factor, y_sum, static_scale, row, D, BLOCK, TO, SUMS)
