# mypy: allow-untyped-defs, allow-incomplete-defs
"""Products of two activations, the leading dimensions broadcast."""
import triton
import triton.language as tl

from ..gpu.math import dot, narrow


@triton.jit
def extent(sizes, FACTOR: tl.constexpr, SYMBOL: tl.constexpr):
    """FACTOR times a count of this step; SYMBOL -1: FACTOR alone."""
    if SYMBOL < 0:
        return FACTOR
    else:
        return tl.load(sizes + SYMBOL) * FACTOR


@triton.jit
def matmul(a, b, y, sizes, M: tl.constexpr, M_OF: tl.constexpr, N: tl.constexpr, N_OF: tl.constexpr, K: tl.constexpr,
           K_OF: tl.constexpr, RANK: tl.constexpr, D0: tl.constexpr, D0_OF: tl.constexpr, D1: tl.constexpr,
           D1_OF: tl.constexpr, D2: tl.constexpr, D2_OF: tl.constexpr, A_VARIES: tl.constexpr, B_VARIES: tl.constexpr,
           BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """y [D0, D1, D2, M, N] = a [.., M, K] @ b [.., K, N], accumulated in float32; nothing has gaps.

    Each extent is a factor and where its symbol stands in `sizes`, -1: nowhere. RANK of the leading dimensions count.
    A_VARIES, B_VARIES: bit i says that the operand has dimension i; else it is one there, and broadcast.
    """
    m, n, k = extent(sizes, M, M_OF), extent(sizes, N, N_OF), extent(sizes, K, K_OF)
    matrix = tl.program_id(0)
    ms = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    ns = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    rest = matrix
    a_matrix, b_matrix = rest * 0, rest * 0
    a_step, b_step, whole = rest * 0 + 1, rest * 0 + 1, rest * 0 + 1
    if RANK > 2:
        a_matrix, b_matrix, a_step, b_step, rest, whole = digit(
            a_matrix, b_matrix, a_step, b_step, rest, whole, extent(sizes, D2, D2_OF), A_VARIES & 4, B_VARIES & 4)
    if RANK > 1:
        a_matrix, b_matrix, a_step, b_step, rest, whole = digit(
            a_matrix, b_matrix, a_step, b_step, rest, whole, extent(sizes, D1, D1_OF), A_VARIES & 2, B_VARIES & 2)
    if RANK > 0:
        a_matrix, b_matrix, a_step, b_step, rest, whole = digit(
            a_matrix, b_matrix, a_step, b_step, rest, whole, extent(sizes, D0, D0_OF), A_VARIES & 1, B_VARIES & 1)
    if matrix >= whole:
        return
    a_base = a + a_matrix.to(tl.int64) * m * k
    b_base = b + b_matrix.to(tl.int64) * k * n
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, k, BLOCK_K):
        ks = begin + tl.arange(0, BLOCK_K)
        left = tl.load(a_base + ms[:, None] * k + ks[None, :], mask=(ms < m)[:, None] & (ks < k)[None, :], other=0.0)
        right = tl.load(b_base + ks[:, None] * n + ns[None, :], mask=(ks < k)[:, None] & (ns < n)[None, :], other=0.0)
        acc = dot(left, right.to(left.dtype), acc)
    place = y + matrix.to(tl.int64) * m * n + ms[:, None] * n + ns[None, :]
    tl.store(place, narrow(acc, y.dtype.element_ty), mask=(ms < m)[:, None] & (ns < n)[None, :])


@triton.jit
def digit(a_matrix, b_matrix, a_step, b_step, rest, whole, size, A_HAS: tl.constexpr, B_HAS: tl.constexpr):
    """One leading dimension, from the last on: which matrix of each operand it is, and the steps of the next one."""
    at = rest % size
    if A_HAS != 0:
        a_matrix += at * a_step
        a_step *= size
    if B_HAS != 0:
        b_matrix += at * b_step
        b_step *= size
    return a_matrix, b_matrix, a_step, b_step, rest // size, whole * size
