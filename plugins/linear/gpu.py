# mypy: allow-untyped-defs, allow-incomplete-defs
"""y = act(x) W^T on Tensor Cores, W in any of the formats of gpu_formats.py.

One orientation serves all: the weights are operand A of the matrix instruction (rows are output features), the tokens
its columns. So 4-bit weights are widened in registers, where operand A may lie on every architecture, and a few tokens
fill the narrow side of the instruction (8 columns) instead of a tile of 64 rows.
"""
import triton
import triton.language as tl

from ..gpu.math import dot, gate, group_of, group_with, limit, narrow, quantize, to_nvfp4
from .gpu_groups import four_bits, minimums, scaled_blocks, scaled_groups, weight_tile


@triton.jit
def _tokens(x, xs, m, k, X_ROW: tl.constexpr, X_STRIDE: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
            TMA: tl.constexpr):
    """The tile [BM, WIDTH] of activations in rows xs i64 [BM] (with descriptors: from row m on), at element k."""
    if TMA:
        return x.load([m, k])
    else:
        columns = k + tl.arange(0, WIDTH)
        if EVEN:
            return tl.load(x + xs[:, None] * X_STRIDE + columns[None, :])
        else:
            return tl.load(x + xs[:, None] * X_STRIDE + columns[None, :], mask=columns[None, :] < X_ROW, other=0.0)


@triton.jit
def _behind(x, xs, K: tl.constexpr, X_STRIDE: tl.constexpr, EPS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """1 / sqrt(mean(x^2) + EPS) of each row: float32 [BM]."""
    squares = tl.zeros((BM,), tl.float32)
    for k in range(0, K, BK):
        v = _tokens(x, xs, 0, k, K, X_STRIDE, BK, K % BK == 0, False).to(tl.float32)
        squares += tl.sum(v * v, 1)
    return tl.rsqrt(squares / K + EPS)


@triton.jit
def _floats(x, added, added_weight, factor, xs, m, k, K: tl.constexpr, X_STRIDE: tl.constexpr, BK: tl.constexpr,
            EVEN: tl.constexpr, TMA: tl.constexpr):
    """The tile [BM, BK] of activations, where there is a norm behind the last block after it and the residual sum."""
    if added is None:
        return _tokens(x, xs, m, k, K, X_STRIDE, BK, EVEN, TMA)
    else:
        v = _tokens(x, xs, m, k, K, X_STRIDE, BK, EVEN, False).to(tl.float32)
        weight = tl.load(added_weight + k + tl.arange(0, BK), mask=k + tl.arange(0, BK) < K, other=0.0)
        residual = _tokens(added, xs, m, k, K, K, BK, EVEN, False).to(tl.float32)
        return narrow(v * factor[:, None] * weight[None, :] + residual, x.dtype.element_ty)


@triton.jit
def _store_total(total, v, xs, inside, writes, k, K: tl.constexpr, BK: tl.constexpr):
    """The tile of _floats to rows xs where inside [BM], by the block that `writes`."""
    if writes:
        columns = k + tl.arange(0, BK)
        tl.store(total + xs[:, None] * K + columns[None, :], v, mask=inside[:, None] & (columns < K)[None, :])


@triton.jit
def _scan(x, added, added_weight, factor, norm_weight, xs, K: tl.constexpr, X_STRIDE: tl.constexpr, BM: tl.constexpr,
          BK: tl.constexpr):
    """Largest magnitude of x (times the norm's weight) and sum of squares of x, for each row: float32 [BM] twice."""
    largest = tl.zeros((BM,), tl.float32)
    squares = tl.zeros((BM,), tl.float32)
    for k in range(0, K, BK):
        v = _floats(x, added, added_weight, factor, xs, 0, k, K, X_STRIDE, BK, K % BK == 0, False).to(tl.float32)
        squares += tl.sum(v * v, 1)
        if norm_weight is not None:
            v = v * tl.load(norm_weight + k + tl.arange(0, BK), mask=k + tl.arange(0, BK) < K, other=0.0)[None, :]
        largest = tl.maximum(largest, tl.max(tl.abs(v), 1))
    return largest, squares


@triton.jit
def _prepared(b, norm_weight, inverse, k, K: tl.constexpr, BK: tl.constexpr, QUANTIZE: tl.constexpr):
    """Activations as the matrix instruction takes them: times the norm's weight, quantized. b [BM, BK]."""
    if norm_weight is None and QUANTIZE == "":
        return b
    else:
        v = b.to(tl.float32)
        if norm_weight is not None:
            v = v * tl.load(norm_weight + k + tl.arange(0, BK), mask=k + tl.arange(0, BK) < K, other=0.0)[None, :]
        if QUANTIZE == "":
            return narrow(v, b.dtype)
        else:
            return quantize(v * inverse[:, None], QUANTIZE)


@triton.jit
def linear(x, w, y, sizes, order, starts, weights, x_scale, x_factor, x_sum, w_scale, w_minimum, scale, bias, residual,
           norm_weight, added, added_weight, total, y_scale, partial, arrived, ROWS: tl.constexpr, N: tl.constexpr,
           K: tl.constexpr, X_STRIDE: tl.constexpr, WEIGHTS: tl.constexpr, W_ROW: tl.constexpr, GROUP: tl.constexpr,
           QUANTIZE: tl.constexpr, DEFER: tl.constexpr, GATED: tl.constexpr, EPS: tl.constexpr, TO: tl.constexpr,
           BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, X_TMA: tl.constexpr,
           W_TMA: tl.constexpr, EXPERTS: tl.constexpr, EP: tl.constexpr, SHARE: tl.constexpr, CHOICES: tl.constexpr,
           STEPS: tl.constexpr, BY_ROW: tl.constexpr, SUM_ROWS: tl.constexpr, SPECIALIZE: tl.constexpr,
           ONE_PRODUCT: tl.constexpr):
    """One tile [BN features, BM tokens] of y, or of one K-range of it. tactics.py says what may be None.
    SPECIALIZE: some warps only copy, others only multiply. ONE_PRODUCT: both factors of a gate are one operand of
    2 * BN rows.

    x           [M, K] in the activation type, rows X_STRIDE elements apart; nvfp4: u8 [M, K/2]
    w           as gpu_formats.py packs it; GATED: the gate's N rows, then those of the other factor
    y           [M, N]
    sizes       i32: sizes[ROWS] is M
    order, starts  with EXPERTS matrices one below the other in w: expert e has starts[e + 1] - starts[e] rows of y,
                listed from order[e * M] on; row r is made of row r // SHARE of x. STEPS: of the search for e.
                BY_ROW: there is a block for each row, fewer than for each expert; those that are no first rows of a
                tile have nothing to do
    weights     f32 [M, CHOICES]: y [M, N] is the weighted sum over the CHOICES rows of a token, plus residual. All
                blocks of a range of features leave their rows in partial, and the last to come adds them up, choice
                after choice. SUM_ROWS: at least the most tokens; EP: the power of two that holds EXPERTS
    x_scale     f32 [M]; fp8_block: f32 [M, K/128]; nvfp4: e4m3 [M, K/16] and x_factor f32 [M]. w_scale, w_minimum: by
                format, GROUP channels of int4 share one
    x_sum       f16 [M, ceil(K / GROUP)]: sums of quantized x, where groups have minimums
    scale       f32 [1]: one more factor; one for each of the EXPERTS
    bias        f32, an element for each row of w; residual [M, N] in the type of y; norm_weight f32 [K]
    added, added_weight, total  with norm_weight, the norm behind the block before and its residual: what is normalised
                is rms_norm(x, added_weight f32 [K]) + added [M, K], and it goes to total [M, K]; all in the type of x
    y_scale     f32 [1]: results are divided by it and stored as TO
    partial     f32, arrived i32 (zero before and after): where the SPLITS of K meet; the last to come adds them up in
                their order
    """
    tiles_n: tl.constexpr = (N + BN - 1) // BN
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = (tile % tiles_n) * BN
    HEIGHT: tl.constexpr = N if GATED == "" else 2 * N
    if EXPERTS > 0:
        if BY_ROW:
            m = tile // tiles_n
            expert = group_with(m, starts, EXPERTS, STEPS)
            first = tl.load(starts + expert)
            if (m - first) % BM != 0:
                return
        else:
            expert = group_of(tile // tiles_n, starts, EXPERTS, BM, STEPS)
            first = tl.load(starts + expert)
            m = first + (tile // tiles_n - (first // BM + expert)) * BM
        end = tl.load(starts + expert + 1)
        base = expert * HEIGHT
        if scale is not None:
            scale += expert
    else:
        end = tl.load(sizes + ROWS)
        m = (tile // tiles_n) * BM
        base = 0
    if m >= end:
        return
    # Rows beyond the last repeat it: no mask, and their results are not stored.
    ms = m + tl.arange(0, BM)
    inside = ms < end
    ys = tl.minimum(ms, end - 1).to(tl.int64)
    xs = ys
    if EXPERTS > 0:
        # The list of an expert begins at its number times the tokens of the step.
        tokens = tl.load(sizes + ROWS)
        ys = tl.load(order + expert.to(tl.int64) * tokens + ys - first).to(tl.int64)
        xs = ys // SHARE
    FOUR_BITS: tl.constexpr = WEIGHTS == "int4"
    WHOLE_INTEGERS: tl.constexpr = WEIGHTS == "int8"
    acc = tl.zeros((2 * BN if ONE_PRODUCT else BN, BM), tl.int32 if WHOLE_INTEGERS else tl.float32)
    acc2 = tl.zeros((BN, BM), tl.int32 if WHOLE_INTEGERS else tl.float32)
    squares = tl.zeros((BM,), tl.float32)
    inverse = tl.zeros((BM,), tl.float32)
    token_scale = tl.full((BM,), 1.0, tl.float32)
    BLOCKS: tl.constexpr = WEIGHTS == "fp8_block"
    behind = squares
    if added is not None:
        behind = _behind(x, xs, K, X_STRIDE, EPS, BM, BK)
    writes_total = tile % tiles_n == 0
    if QUANTIZE != "" and not BLOCKS:
        largest, squares = _scan(x, added, added_weight, behind, norm_weight, xs, K, X_STRIDE, BM, BK)
        token_scale = largest / limit(QUANTIZE)
        inverse = tl.where(largest > 0, limit(QUANTIZE) / largest, 0.0)
    elif x_factor is not None:
        token_scale = tl.load(x_factor + xs)
    elif x_scale is not None and WEIGHTS != "nvfp4" and not BLOCKS:
        token_scale = tl.load(x_scale + xs)

    NUM_STEPS: tl.constexpr = (K + BK * SPLITS - 1) // (BK * SPLITS)
    EVEN: tl.constexpr = K % (BK * SPLITS) == 0
    SECOND_PRODUCT: tl.constexpr = GATED != "" and not ONE_PRODUCT
    begin = split * (NUM_STEPS * BK)
    for step in tl.range(0, NUM_STEPS, warp_specialize=SPECIALIZE):
        k = begin + step * BK
        if WEIGHTS == "nvfp4":
            if QUANTIZE != "":
                b = _floats(x, added, added_weight, behind, xs, m, k, K, X_STRIDE, BK, EVEN, False)
                if total is not None:
                    _store_total(total, b, xs, inside, writes_total, k, K, BK)
                wide = b.to(tl.float32)
                if norm_weight is not None:
                    inside_k = k + tl.arange(0, BK) < K
                    wide = wide * tl.load(norm_weight + k + tl.arange(0, BK), mask=inside_k, other=0.0)[None, :]
                b, b_scale = to_nvfp4(wide * inverse[:, None], BM, BK)
            else:
                b = _tokens(x, xs, m, k // 2, K // 2, X_STRIDE, BK // 2, EVEN, X_TMA)
                blocks = k // 16 + tl.arange(0, BK // 16)
                b_scale = tl.load(x_scale + xs[:, None] * (K // 16) + blocks[None, :], mask=blocks[None, :] < K // 16,
                                  other=0.0)
            acc = scaled_blocks(w, w_scale, b, b_scale, acc, base, n, k, N, K, BK, BN, W_TMA,
                                ONE_PRODUCT)
            if SECOND_PRODUCT:
                acc2 = scaled_blocks(w, w_scale, b, b_scale, acc2, base + N, n, k, N, K, BK, BN, W_TMA, False)
        elif BLOCKS:
            b = _floats(x, added, added_weight, behind, xs, m, k, K, X_STRIDE, BK, True, X_TMA)
            if total is not None:
                _store_total(total, b, xs, inside, writes_total, k, K, BK)
            if QUANTIZE != "":
                wide = b.to(tl.float32)
                if norm_weight is not None:
                    squares += tl.sum(wide * wide, 1)
                    wide = wide * tl.load(norm_weight + k + tl.arange(0, BK))[None, :]
                largest = tl.max(tl.abs(wide), 1)
                b_scale = largest / limit(QUANTIZE)
                b = quantize(wide * tl.where(largest > 0, limit(QUANTIZE) / largest, 0.0)[:, None], QUANTIZE)
            else:
                b_scale = tl.load(x_scale + xs * (K // BK) + k // BK)
            acc = scaled_groups(w, w_scale, b, b_scale, acc, base, n, k, N, W_ROW, BK, BN, W_TMA)
            if SECOND_PRODUCT:
                acc2 = scaled_groups(w, w_scale, b, b_scale, acc2, base + N, n, k, N, W_ROW, BK, BN, W_TMA)
        elif FOUR_BITS:
            HALF: tl.constexpr = BK // 2
            low = _floats(x, added, added_weight, behind, xs, m, k, K, X_STRIDE, HALF, EVEN, X_TMA)
            high = _floats(x, added, added_weight, behind, xs, m, k + HALF, K, X_STRIDE, HALF, EVEN, X_TMA)
            if total is not None:
                _store_total(total, low, xs, inside, writes_total, k, K, HALF)
                _store_total(total, high, xs, inside, writes_total, k + HALF, K, HALF)
            if norm_weight is not None and QUANTIZE == "":
                squares += tl.sum(low.to(tl.float32) * low.to(tl.float32), 1)
                squares += tl.sum(high.to(tl.float32) * high.to(tl.float32), 1)
            low = _prepared(low, norm_weight, inverse, k, K, HALF, QUANTIZE)
            high = _prepared(high, norm_weight, inverse, k + HALF, K, HALF, QUANTIZE)
            sums_low, sums_high = None, None
            ADD_SUMS: tl.constexpr = DEFER and w_minimum is not None and x_sum is None
            if ADD_SUMS:
                sums_low, sums_high = tl.sum(low.to(tl.float32), 1), tl.sum(high.to(tl.float32), 1)
            acc = four_bits(w, w_scale, w_minimum, low, high, sums_low, sums_high, acc, base, base, n, k, N, W_ROW,
                            HEIGHT, HALF, GROUP, BN, W_TMA, DEFER, ADD_SUMS, ONE_PRODUCT)
            if SECOND_PRODUCT:
                acc2 = four_bits(w, w_scale, w_minimum, low, high, sums_low, sums_high, acc2, base, base + N, n, k, N,
                                 W_ROW, HEIGHT, HALF, GROUP, BN, W_TMA, DEFER, ADD_SUMS, False)
        else:
            b = _floats(x, added, added_weight, behind, xs, m, k, K, X_STRIDE, BK, EVEN, X_TMA)
            if total is not None:
                _store_total(total, b, xs, inside, writes_total, k, K, BK)
            if norm_weight is not None and QUANTIZE == "":
                squares += tl.sum(b.to(tl.float32) * b.to(tl.float32), 1)
            b = _prepared(b, norm_weight, inverse, k, K, BK, QUANTIZE)
            acc = dot(weight_tile(w, base, n, k, N, W_ROW, BK, EVEN, BN, W_TMA, ONE_PRODUCT), b.T, acc)
            if SECOND_PRODUCT:
                acc2 = dot(weight_tile(w, base + N, n, k, N, W_ROW, BK, EVEN, BN, W_TMA), b.T, acc2)

    if ONE_PRODUCT:
        acc, acc2 = tl.split(acc.reshape(2, BN, BM).permute(1, 2, 0))
    if x_sum is not None:
        COUNT: tl.constexpr = NUM_STEPS * BK // GROUP
        acc = minimums(x_sum, w_scale, w_minimum, acc, xs, base, base, n, split * COUNT, N, W_ROW, HEIGHT, K, GROUP,
                       COUNT, BN)
        if GATED != "":
            acc2 = minimums(x_sum, w_scale, w_minimum, acc2, xs, base, base + N, n, split * COUNT, N, W_ROW, HEIGHT, K,
                            GROUP, COUNT, BN)

    if weights is not None:
        v = _scaled(acc.to(tl.float32), token_scale, w_scale, scale, base, n, N, WEIGHTS, BN).T
        ns = n + tl.arange(0, BN)
        if bias is not None:
            v += tl.where(split == 0, tl.load(bias + base + ns, mask=ns < N, other=0.0), 0.0)[None, :]
        row = partial + (ys * SPLITS + split)[:, None] * N
        tl.store(row + ns[None, :], v, mask=inside[:, None] & (ns < N)[None, :])
        tl.debug_barrier()
        group = tl.arange(0, EP)
        its = tl.load(starts + group + 1, mask=group < EXPERTS, other=0) - \
            tl.load(starts + group, mask=group < EXPERTS, other=0)
        parts = SPLITS * tl.sum((its + BM - 1) // BM, 0)
        if tl.atomic_add(arrived + tile % tiles_n, 1, sem="acq_rel") != parts - 1:
            return
        tl.store(arrived + tile % tiles_n, 0)
        _sum_choices(partial, weights, residual, y, n, tokens, N, CHOICES, SPLITS, SUM_ROWS, TO, BN)
    elif SPLITS > 1:
        ACCUMULATORS: tl.constexpr = 1 if GATED == "" else 2
        SLOT: tl.constexpr = (ACCUMULATORS * BN + 1) * BM
        at = partial + tile.to(tl.int64) * (SPLITS * SLOT)
        element = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        mine = at + split * SLOT
        tl.store(mine + element, acc.to(tl.float32))
        if GATED != "":
            tl.store(mine + BN * BM + element, acc2.to(tl.float32))
        tl.store(mine + ACCUMULATORS * BN * BM + tl.arange(0, BM), squares)
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") != SPLITS - 1:
            return
        acc_all = tl.zeros((BN, BM), tl.float32)
        acc2_all = tl.zeros((BN, BM), tl.float32)
        squares_all = tl.zeros((BM,), tl.float32)
        for other in range(SPLITS):
            its = at + other * SLOT
            acc_all += tl.load(its + element, cache_modifier=".cg")
            if GATED != "":
                acc2_all += tl.load(its + BN * BM + element, cache_modifier=".cg")
            squares_all += tl.load(its + ACCUMULATORS * BN * BM + tl.arange(0, BM), cache_modifier=".cg")
        tl.store(arrived + tile, 0)
        if QUANTIZE != "" and not BLOCKS:
            squares_all = squares  # every split has seen the whole row
        _finish(acc_all, acc2_all, squares_all, token_scale, y, w_scale, scale, bias, residual, norm_weight, y_scale,
                base, n, ys, inside, N, K, WEIGHTS, GATED, EPS, TO, BN)
    else:
        _finish(acc.to(tl.float32), acc2.to(tl.float32), squares, token_scale, y, w_scale, scale, bias, residual,
                norm_weight, y_scale, base, n, ys, inside, N, K, WEIGHTS, GATED, EPS, TO, BN)


@triton.jit
def _scaled(acc, token_scale, w_scale, scale, base, n, N: tl.constexpr, WEIGHTS: tl.constexpr, BN: tl.constexpr):
    """The tile [BN, BM], or a part of its sum, times the scales of tokens, features and the matrix."""
    acc = acc * token_scale[None, :]
    if scale is not None:
        acc *= tl.load(scale)
    if WEIGHTS == "fp8" or WEIGHTS == "int8":
        ns = n + tl.arange(0, BN)
        acc *= tl.load(w_scale + base + ns, mask=ns < N, other=0.0)[:, None]
    return acc


@triton.jit
def _sum_choices(partial, weights, residual, y, n, tokens, N: tl.constexpr, CHOICES: tl.constexpr,
                 SPLITS: tl.constexpr, SUM_ROWS: tl.constexpr, TO: tl.constexpr, BN: tl.constexpr):
    """y [tokens, N] from feature n on: of partial f32 [tokens, CHOICES, SPLITS, N] the weighted sum, and residual."""
    ns = n + tl.arange(0, BN)
    token = tl.arange(0, SUM_ROWS)
    there = (token < tokens)[:, None] & (ns < N)[None, :]
    total = tl.zeros((SUM_ROWS, BN), tl.float32)
    for j in range(CHOICES):
        row = token.to(tl.int64) * CHOICES + j
        one = tl.zeros((SUM_ROWS, BN), tl.float32)
        for split in range(SPLITS):
            at = (row * SPLITS + split)[:, None] * N + ns[None, :]
            one += tl.load(partial + at, mask=there, other=0.0, cache_modifier=".cg")
        total += one * tl.load(weights + row, mask=token < tokens, other=0.0)[:, None]
    at = token.to(tl.int64)[:, None] * N + ns[None, :]
    if residual is not None:
        total += tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
    tl.store(y + at, quantize(total, TO), mask=there)


@triton.jit
def _finish(acc, acc2, squares, token_scale, y, w_scale, scale, bias, residual, norm_weight, y_scale, base, n, ys,
            inside, N: tl.constexpr, K: tl.constexpr, WEIGHTS: tl.constexpr, GATED: tl.constexpr, EPS: tl.constexpr,
            TO: tl.constexpr, BN: tl.constexpr):
    """Scales, bias, gate, residual; then the tile goes to rows ys of y where inside."""
    ns = n + tl.arange(0, BN)
    inside_n = ns < N
    if norm_weight is not None:
        token_scale = token_scale * tl.rsqrt(squares / K + EPS)
    acc = _scaled(acc, token_scale, w_scale, scale, base, n, N, WEIGHTS, BN)
    if GATED != "":
        acc2 = _scaled(acc2, token_scale, w_scale, scale, base + N, n, N, WEIGHTS, BN)
    if bias is not None:
        acc += tl.load(bias + base + ns, mask=inside_n, other=0.0)[:, None]
        if GATED != "":
            acc2 += tl.load(bias + base + N + ns, mask=inside_n, other=0.0)[:, None]
    if GATED != "":
        acc = gate(acc, acc2, GATED)
    out = acc.T
    at = ys[:, None] * N + ns[None, :]
    stored = inside[:, None] & inside_n[None, :]
    if residual is not None:
        out += tl.load(residual + at, mask=stored, other=0.0).to(tl.float32)
    if y_scale is not None:
        out = out / tl.load(y_scale)
        out = tl.minimum(tl.maximum(out, -limit(TO)), limit(TO))
    tl.store(y + at, quantize(out, TO), mask=stored)
