# mypy: allow-untyped-defs, allow-incomplete-defs
"""Products of a step's channels where weights have their scales, and minimums, by groups of channels: what is scaled
before the matrix instruction, by it, or behind it. gpu.py walks through the steps."""
import triton
import triton.language as tl

from ..gpu.math import INTERPRETED, dot, dot_nvfp4, narrow
from .gpu_widening import ABOVE, TO_E4M3, TO_FLOAT32, TO_INT8

_TO_E4M3: tl.constexpr = tl.constexpr(TO_E4M3)
_TO_INT8: tl.constexpr = tl.constexpr(TO_INT8)
_TO_FLOAT32: tl.constexpr = tl.constexpr(TO_FLOAT32)
_ABOVE: tl.constexpr = tl.constexpr(ABOVE)


@triton.jit
def tile_rows(base, n, N, BN: tl.constexpr, BOTH: tl.constexpr):
    """Rows of w from row n on of the N that begin at row base: [BN]. BOTH: and as many of the N below, [2 * BN]."""
    # Rows beyond N repeat the last one: no mask, and their results are not stored.
    if BOTH:
        row = tl.arange(0, 2 * BN)
        return base + row // BN * N + tl.minimum(n + row % BN, N - 1)
    else:
        return base + tl.minimum(n + tl.arange(0, BN), N - 1)


@triton.jit
def weight_tile(w, base, n, k, N, W_ROW: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr, BN: tl.constexpr,
                TMA: tl.constexpr, BOTH: tl.constexpr = False):
    """The tile [BN, WIDTH] of stored weights in tile_rows, at element k of rows of W_ROW."""
    if TMA:
        return w.load([base + n, k])
    else:
        rows = tile_rows(base, n, N, BN, BOTH).to(tl.int64)
        columns = k + tl.arange(0, WIDTH)
        if EVEN:
            return tl.load(w + rows[:, None] * W_ROW + columns[None, :])
        else:
            return tl.load(w + rows[:, None] * W_ROW + columns[None, :], mask=columns[None, :] < W_ROW, other=0.0)


@triton.jit
def scaled_groups(w, w_scale, b, b_scale, acc, base, n, k, N, W_ROW: tl.constexpr, GROUP: tl.constexpr,
                  BN: tl.constexpr, TMA: tl.constexpr):
    """acc + the weights of one group of channels times activations b [BM, GROUP], e4m3, with a scale for a block of
    GROUP rows of w and for each token: b_scale f32 [BM]."""
    part = dot(weight_tile(w, base, n, k, N, W_ROW, GROUP, True, BN, TMA), b.T, tl.zeros(acc.shape, tl.float32))
    rows = tile_rows(base, n, N, BN, False)
    s = tl.load(w_scale + rows // GROUP * (W_ROW // GROUP) + k // GROUP)
    return acc + part * s[:, None] * b_scale[None, :]


@triton.jit
def _widened(q, TO: tl.constexpr):
    """Four-bit integers 0..15 less 8, exactly, in type TO. q u8 [BN, BK/2]."""
    values = q.to(tl.int8) - 8
    if TO == tl.float8e4nv:  # noqa: SIM300
        return values.to(tl.float16).to(TO)
    else:
        return values.to(TO)


@triton.jit
def _halves(packed, TO: tl.constexpr):
    """Low and high nibbles of u8 [BN, HALF], less 8, exactly, in type TO (e4m3, int8)."""
    if INTERPRETED:
        return _widened(packed & 15, TO), _widened(packed >> 4, TO)
    else:
        low, high = tl.inline_asm_elementwise(_TO_E4M3 if TO.is_fp8() else _TO_INT8, "=r,=r,r", [packed],
                                              dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4)
        return low.to(TO, bitcast=True), high.to(TO, bitcast=True)


@triton.jit
def _dequantized(packed, s_low, s_high, m_low, m_high, TO: tl.constexpr):
    """The weights that low and high nibbles of u8 [BN, HALF] stand for, rounded to type TO. Scales s_low, s_high and
    minimums m_low, m_high f32 [BN]; without minimums the grid is symmetric about 8."""
    if m_low is None:
        m_low, m_high = -8.0 * s_low, -8.0 * s_high
    if INTERPRETED:
        low, high = (packed & 15).to(tl.float32), (packed >> 4).to(tl.float32)
    else:
        low, high = tl.inline_asm_elementwise(_TO_FLOAT32, "=f,=f,=f,=f,=f,=f,=f,=f,r", [packed],
                                              dtype=(tl.float32, tl.float32), is_pure=True, pack=4)
        # Scales and minimums have 11 bits: these differences are exact, but for minimums far below a scale.
        m_low, m_high = m_low - _ABOVE * s_low, m_high - _ABOVE * s_high
    return narrow(low * s_low[:, None] + m_low[:, None], TO), narrow(high * s_high[:, None] + m_high[:, None], TO)


@triton.jit
def _middle(s, m):
    """What is in the middle of a group's grid, 8 steps from its minimum."""
    return m.to(tl.float32) + 8.0 * s.to(tl.float32)


@triton.jit
def four_bits(w, scale, minimum, b_low, b_high, sums_low, sums_high, acc, matrix, base, n, k, N, W_ROW: tl.constexpr,
              HEIGHT: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr,
              DEFER: tl.constexpr, ADD_SUMS: tl.constexpr, BOTH: tl.constexpr):
    """acc + the weights of a step, 2 * HALF channels, times activations b_low and b_high [BM, HALF].

    A byte holds channel j of the step below and j + HALF above, so both halves are dense tiles, each of one group.
    DEFER: integers are multiplied, and the sum is scaled; else the weights are scaled and rounded to the activations'
    type, as a dequantized checkpoint has them. ADD_SUMS, with DEFER: the middle of a grid is multiplied with the sums
    f32 [BM] of the activations. matrix: row of w at which the matrix of HEIGHT rows begins; scale and minimum
    [K / GROUP, HEIGHT] of each matrix."""
    packed = weight_tile(w, base, n, k // 2, N, W_ROW, HALF, True, BN, TMA, BOTH)
    rows = tile_rows(base - matrix, n, N, BN, BOTH)
    at = matrix * (2 * W_ROW // GROUP) + k // GROUP * HEIGHT + rows
    SHARED: tl.constexpr = GROUP == 2 * HALF
    s_low = tl.load(scale + at).to(tl.float32)
    s_high = s_low if SHARED else tl.load(scale + at + HEIGHT).to(tl.float32)
    m_low, m_high = None, None
    if minimum is not None and (ADD_SUMS or not DEFER):
        m_low = tl.load(minimum + at).to(tl.float32)
        m_high = m_low if SHARED else tl.load(minimum + at + HEIGHT).to(tl.float32)
    kind: tl.constexpr = b_low.dtype
    if DEFER:
        low, high = _halves(packed, kind)
        part = tl.zeros(acc.shape, tl.int32 if kind == tl.int8 else tl.float32)
        part = dot(low, b_low.T, part)
        if SHARED:
            part = dot(high, b_high.T, part)
            acc += part.to(tl.float32) * s_low[:, None]
            if ADD_SUMS:
                acc += _middle(s_low, m_low)[:, None] * (sums_low + sums_high)[None, :]
        else:
            acc += part.to(tl.float32) * s_low[:, None]
            part = tl.zeros(acc.shape, tl.int32 if kind == tl.int8 else tl.float32)
            part = dot(high, b_high.T, part)
            acc += part.to(tl.float32) * s_high[:, None]
            if ADD_SUMS:
                acc += _middle(s_low, m_low)[:, None] * sums_low[None, :]
                acc += _middle(s_high, m_high)[:, None] * sums_high[None, :]
        return acc
    else:
        low, high = _dequantized(packed, s_low, s_high, m_low, m_high, kind)
        return dot(high, b_high.T, dot(low, b_low.T, acc))


@triton.jit
def minimums(x_sum, scale, minimum, acc, xs, matrix, base, n, first, N, W_ROW: tl.constexpr, HEIGHT: tl.constexpr,
             K: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr, BN: tl.constexpr):
    """acc + the middle of each group's grid times the sums of its activations, for COUNT groups from the first on.

    By matrix instructions of 16 bits, since these are numbers of their own: beside the products of eight bits they are
    few, one for GROUP of those. x_sum f16 [M, ceil(K / GROUP)]."""
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    STEP: tl.constexpr = 32 if COUNT > 16 else 16
    rows = tile_rows(base - matrix, n, N, BN, False)
    for begin in tl.range(0, COUNT, STEP, num_stages=1):
        group = first + begin + tl.arange(0, STEP)
        inside = (begin + tl.arange(0, STEP) < COUNT) & (group < GROUPS)
        at = matrix * (2 * W_ROW // GROUP) + group[None, :] * HEIGHT + rows[:, None]
        s = tl.load(scale + at, mask=inside[None, :], other=0.0)
        m = tl.load(minimum + at, mask=inside[None, :], other=0.0)
        sums = tl.load(x_sum + xs[:, None] * GROUPS + group[None, :], mask=inside[None, :], other=0.0)
        acc = dot(_middle(s, m).to(tl.float16), sums.T, acc)
    return acc


@triton.jit
def scaled_blocks(w, w_scale, b, b_scale, acc, base, n, k, N, K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
                  TMA: tl.constexpr, BOTH: tl.constexpr):
    """acc + e2m1 weights times e2m1 activations, each with an e4m3 scale for 16 channels. b [BM, BK/2] packed,
    b_scale [BM, BK/16]."""
    a = weight_tile(w, base, n, k // 2, N, K // 2, BK // 2, K % BK == 0, BN, TMA, BOTH)
    rows = tile_rows(base, n, N, BN, BOTH).to(tl.int64)
    blocks = k // 16 + tl.arange(0, BK // 16)
    a_scale = tl.load(w_scale + rows[:, None] * (K // 16) + blocks[None, :], mask=blocks[None, :] < K // 16, other=0.0)
    return dot_nvfp4(a, a_scale, b, b_scale, acc)
