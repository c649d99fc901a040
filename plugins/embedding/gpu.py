# mypy: allow-untyped-defs, allow-incomplete-defs
"""Rows of a table by their numbers, and the norm behind them."""
import triton
import triton.language as tl

from ..gpu.math import narrow
from ..norm.gpu import store_normalised


@triton.jit
def embedding(ids, w, w_scale, y, norm_weight, normed, q, q_scale, q_factor, q_sum, sizes, ROWS: tl.constexpr,
              D: tl.constexpr, BLOCK: tl.constexpr, FACTOR: tl.constexpr, EPS: tl.constexpr, TO: tl.constexpr,
              SUMS: tl.constexpr):
    """y [T, D] = FACTOR * w[ids]. ids i32 [T]; w [V, D], floating, or e4m3 or i8 with w_scale f32 [V].

    norm_weight f32 [D]: what rms_norm makes of y goes to normed [T, D] in the type of y, and quantized to q
    (store_row); then a block has a whole row.
    """
    token = tl.program_id(0).to(tl.int64)
    if token >= tl.load(sizes + ROWS):
        return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token).to(tl.int64)
    v = tl.load(w + row * D + at, mask=at < D, other=0.0).to(tl.float32)
    if w_scale is not None:
        v = v * tl.load(w_scale + row)
    rounded = narrow(v * FACTOR, y.dtype.element_ty)
    tl.store(y + token * D + at, rounded, mask=at < D)
    if norm_weight is not None:
        store_normalised(rounded.to(tl.float32), norm_weight, normed, q, q_scale, q_factor, q_sum, token, D, BLOCK,
                         EPS, TO, SUMS)
