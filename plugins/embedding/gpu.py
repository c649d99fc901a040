# mypy: allow-untyped-defs, allow-incomplete-defs
"""Rows of a table by their numbers."""
import triton
import triton.language as tl

from ..gpu.math import narrow


@triton.jit
def embedding(ids, w, w_scale, y, sizes, ROWS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
              FACTOR: tl.constexpr):
    """y [T, D] = FACTOR * w[ids]. ids i32 [T]; w [V, D], floating, or e4m3 or i8 with w_scale f32 [V]."""
    token = tl.program_id(0).to(tl.int64)
    if token >= tl.load(sizes + ROWS):
        return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token).to(tl.int64)
    v = tl.load(w + row * D + at, mask=at < D, other=0.0).to(tl.float32)
    if w_scale is not None:
        v = v * tl.load(w_scale + row)
    tl.store(y + token * D + at, narrow(v * FACTOR, y.dtype.element_ty), mask=at < D)
