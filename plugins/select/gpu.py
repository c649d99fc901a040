# mypy: allow-untyped-defs, allow-incomplete-defs
"""Along the last dimension: softmax, running sums, the largest, the best in order, scattering. Rows lie without gaps.

Of equals the lower index comes first; NaN counts as larger than infinity.
"""
import triton
import triton.language as tl

from ..gpu.math import narrow
from ..gpu.rows import order_key, row_count


@triton.jit
def softmax(x, y, sizes, ROWS: tl.constexpr, FACTOR: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
            BLOCK: tl.constexpr):
    """x [rows, N] -> y; y may be x. R rows a block, BLOCK of their elements at a time."""
    row = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    inside = row < row_count(sizes, ROWS, FACTOR)
    first = row.to(tl.int64) * N
    at = tl.arange(0, BLOCK)[None, :]
    if N <= BLOCK:
        v = tl.load(x + first + at, mask=inside & (at < N), other=float("-inf")).to(tl.float32)
        e = tl.exp(v - tl.max(v, 1)[:, None])
        e = tl.where(at < N, e, 0.0)
        tl.store(y + first + at, narrow(e / tl.sum(e, 1)[:, None], y.dtype.element_ty), mask=inside & (at < N))
    else:
        peak = tl.full((R, BLOCK), float("-inf"), tl.float32)
        for begin in range(0, N, BLOCK):
            v = tl.load(x + first + begin + at, mask=inside & (begin + at < N), other=float("-inf")).to(tl.float32)
            peak = tl.maximum(peak, v)
        most = tl.max(peak, 1)[:, None]
        total = tl.zeros((R, BLOCK), tl.float32)
        for begin in range(0, N, BLOCK):
            v = tl.load(x + first + begin + at, mask=inside & (begin + at < N), other=0.0).to(tl.float32)
            total += tl.where(begin + at < N, tl.exp(v - most), 0.0)
        whole = tl.sum(total, 1)[:, None]
        for begin in range(0, N, BLOCK):
            there = inside & (begin + at < N)
            v = tl.load(x + first + begin + at, mask=there, other=0.0).to(tl.float32)
            tl.store(y + first + begin + at, narrow(tl.exp(v - most) / whole, y.dtype.element_ty), mask=there)


@triton.jit
def cumsum(x, y, sizes, ROWS: tl.constexpr, FACTOR: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
           BLOCK: tl.constexpr):
    """x [rows, N] -> y, the sums so far, in float32 or int32; y may be x."""
    row = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    inside = row < row_count(sizes, ROWS, FACTOR)
    first = row.to(tl.int64) * N
    at = tl.arange(0, BLOCK)[None, :]
    before = tl.zeros((R, 1), tl.float32 if x.dtype.element_ty.is_floating() else tl.int32)
    for begin in range(0, N, BLOCK):
        there = inside & (begin + at < N)
        v = tl.load(x + first + begin + at, mask=there, other=0).to(before.dtype)
        sums = before + tl.cumsum(v, 1)
        if before.dtype == tl.float32:
            tl.store(y + first + begin + at, narrow(sums, y.dtype.element_ty), mask=there)
        else:
            tl.store(y + first + begin + at, sums, mask=there)
        before += tl.sum(v, 1)[:, None]


@triton.jit
def argmax(x, y, sizes, ROWS: tl.constexpr, FACTOR: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
           BLOCK: tl.constexpr):
    """x [rows, N] -> y i32 [rows]: the first of the largest."""
    row = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    inside = row < row_count(sizes, ROWS, FACTOR)
    first = row.to(tl.int64) * N
    at = tl.arange(0, BLOCK)[None, :]
    best = tl.full((R, BLOCK), -2147483648, tl.int32)
    place = tl.zeros((R, BLOCK), tl.int32) + at
    for begin in range(0, N, BLOCK):
        there = inside & (begin + at < N)
        key = tl.where(there, order_key(tl.load(x + first + begin + at, mask=there, other=0)), -2147483648)
        better = key > best
        place = tl.where(better, begin + at, place)
        best = tl.where(better, key, best)
    most = tl.max(best, 1)[:, None]
    found = tl.min(tl.where(best == most, place, 2147483647), 1)[:, None]
    tl.store(y + row, found, mask=inside)


@triton.jit
def topk(x, values, indices, sizes, ROWS: tl.constexpr, FACTOR: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
         LARGEST: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, OTHERS: tl.constexpr):
    """x [rows, N] -> values [rows, K], indices i32 [rows, K], the best first.

    Each element counts the others that are better: that is its place. BLOCK elements of R rows a block, against OTHERS
    at a time.
    """
    row = tl.program_id(0) * R + tl.arange(0, R)[:, None, None]
    inside = row < row_count(sizes, ROWS, FACTOR)
    first = row.to(tl.int64) * N
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :, None]
    mine = inside & (at < N)
    v = tl.load(x + first + at, mask=mine, other=0)
    key = order_key(v)
    place = tl.zeros((R, BLOCK), tl.int32)
    for begin in range(0, N, OTHERS):
        other = begin + tl.arange(0, OTHERS)[None, None, :]
        theirs = order_key(tl.load(x + first + other, mask=inside & (other < N), other=0))
        better = theirs > key if LARGEST else theirs < key
        better = (other < N) & (better | ((theirs == key) & (other < at)))
        place += tl.sum(better.to(tl.int32), 2)
    place = place[:, :, None]
    kept = mine & (place < K)
    out = row.to(tl.int64) * K + place
    tl.store(values + out, v, mask=kept)
    tl.store(indices + out, at + tl.zeros((R, BLOCK, 1), tl.int32), mask=kept)


@triton.jit
def scatter(x, index, source, y, sizes, ROWS: tl.constexpr, FACTOR: tl.constexpr, N: tl.constexpr, COUNT: tl.constexpr,
            SOURCE_N: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, OTHERS: tl.constexpr):
    """y [rows, N] = x with y[r, index[r, i]] = source[r, i] for i < COUNT; of several writes to one place the last.

    index i32 [rows, COUNT], source [rows, SOURCE_N]; SOURCE_N 0: one element. y must not be x.
    """
    row = tl.program_id(0) * R + tl.arange(0, R)[:, None, None]
    inside = row < row_count(sizes, ROWS, FACTOR)
    wide = row.to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :, None]
    mine = inside & (at < N)
    writer = tl.full((R, BLOCK), -1, tl.int32)
    for begin in range(0, COUNT, OTHERS):
        number = begin + tl.arange(0, OTHERS)[None, None, :]
        target = tl.load(index + wide * COUNT + number, mask=inside & (number < COUNT), other=-1)
        writer = tl.maximum(writer, tl.max(tl.where(target == at, number, -1), 2))
    writer = writer[:, :, None]
    written = mine & (writer >= 0)
    old = tl.load(x + wide * N + at, mask=mine, other=0)
    if SOURCE_N == 0:
        new = tl.load(source + writer * 0, mask=written, other=0)
    else:
        new = tl.load(source + wide * SOURCE_N + writer, mask=written, other=0)
    tl.store(y + wide * N + at, tl.where(writer >= 0, new, old), mask=mine)
