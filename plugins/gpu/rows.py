# mypy: allow-untyped-defs, allow-incomplete-defs
"""What kernels that work on rows share: how many rows this step has, and an order of numbers."""
import triton
import triton.language as tl


@triton.jit
def row_count(sizes, ROWS: tl.constexpr, FACTOR: tl.constexpr):
    """FACTOR times a count of this step; FACTOR alone where there is no array of counts."""
    if sizes is None:
        return FACTOR
    else:
        return tl.load(sizes + ROWS) * FACTOR


@triton.jit
def order_key(x):
    """int32 that compares as x: integers as they are; floats by their bits, 0 and -0 equal, NaN above infinity."""
    if x.dtype.is_floating():
        v = x.to(tl.float32) + 0.0
        bits = v.to(tl.int32, bitcast=True)
        key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        return tl.where(v != v, 0x7FFFFFFF, key)
    else:
        return x.to(tl.int32)
