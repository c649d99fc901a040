# mypy: allow-untyped-defs, allow-incomplete-defs
"""What a mixture of experts needs beside its matrices: the choice of experts, the rows of each, and the sum."""
import triton
import triton.language as tl

from ..gpu.math import dot, narrow
from ..gpu.rows import order_key
from ..norm.gpu import store_normalised
from ..quantize.gpu import store_columns

_GONE: tl.constexpr = tl.constexpr(-2147483648)
"""Below the order_key of every number."""


@triton.jit
def _best(key, number):
    """[R]: the number of the largest of each tile [R, G, S] and, of equals, the smallest."""
    most = tl.max(tl.max(key, 2), 1)
    return tl.min(tl.min(tl.where(key == most[:, None, None], number, 1 << 30), 2), 1)


@triton.jit
def _scan(x, norm_weight, xs, K: tl.constexpr, EPS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """Of rows xs: 1 / sqrt(mean(x^2) + EPS), and the largest magnitude of x * norm_weight. float32 [BM] twice."""
    squares = tl.zeros((BM,), tl.float32)
    largest = tl.zeros((BM,), tl.float32)
    for k in range(0, K, BK):
        at = k + tl.arange(0, BK)
        v = tl.load(x + xs[:, None] * K + at[None, :], mask=(at < K)[None, :], other=0.0).to(tl.float32)
        squares += tl.sum(v * v, 1)
        v = v * tl.load(norm_weight + at, mask=at < K, other=0.0)[None, :]
        largest = tl.maximum(largest, tl.max(tl.abs(v), 1))
    return tl.rsqrt(squares / K + EPS), largest


@triton.jit
def _logits(x, norm_weight, w, y, q, q_scale, q_factor, q_sum, first, count, part, split,
            E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
            SPLITS: tl.constexpr, TO: tl.constexpr, SUMS: tl.constexpr, GATE: tl.constexpr):
    """A K-range of the logits of BM tokens to rows of `part`, EP + 16 floats each, so that they are read by vectors:
    behind the logits the sum of squares of x, where the norm waits for it, and with GATE the product with row E of w,
    which would else widen the tile to the next power of two. What others read of the norm goes to y and q."""
    ms = first + tl.arange(0, BM)
    inside = ms < count
    xs = tl.minimum(ms, count - 1).to(tl.int64)
    expert = tl.arange(0, EP)
    rows = tl.minimum(expert, E - 1).to(tl.int64)
    acc = tl.zeros((EP, BM), tl.float32)
    squares = tl.zeros((BM,), tl.float32)
    gates = tl.zeros((BM,), tl.float32)
    WRITES: tl.constexpr = y is not None or q is not None
    if WRITES:
        inverse, largest = _scan(x, norm_weight, xs, K, EPS, BM, BK)
        largest = largest * inverse
    STEPS: tl.constexpr = (K + BK * SPLITS - 1) // (BK * SPLITS)
    EVEN: tl.constexpr = K % (BK * SPLITS) == 0
    for step in range(0, STEPS):
        k = (split * STEPS + step) * BK
        at = k + tl.arange(0, BK)
        if EVEN:
            b = tl.load(x + xs[:, None] * K + at[None, :])
            a = tl.load(w + rows[:, None] * K + at[None, :])
        else:
            b = tl.load(x + xs[:, None] * K + at[None, :], mask=(at < K)[None, :], other=0.0)
            a = tl.load(w + rows[:, None] * K + at[None, :], mask=(at < K)[None, :], other=0.0)
        if norm_weight is not None:
            v = b.to(tl.float32)
            if WRITES:
                v = v * inverse[:, None]
            else:
                squares += tl.sum(v * v, 1)
            v = v * tl.load(norm_weight + at, mask=at < K, other=0.0)[None, :]
            b = narrow(v, b.dtype)
            if y is not None:
                tl.store(y + xs[:, None] * K + at[None, :], b, mask=inside[:, None] & (at < K)[None, :])
            if q is not None:
                store_columns(v, largest, q, q_scale, q_factor, q_sum, xs, inside, k, K, BM, BK, TO, SUMS)
        acc = dot(a, b.T, acc)
        if GATE:
            gate = tl.load(w + E * K + at, mask=at < K, other=0.0).to(tl.float32)
            gates += tl.sum(b.to(tl.float32) * gate[None, :], 1)
    row = part + tl.arange(0, BM) * (EP + 16)
    tl.store(row[None, :] + expert[:, None], acc, mask=(expert < E)[:, None])
    tl.store(row + EP, squares)
    if GATE:
        tl.store(row + EP + 1, gates)


@triton.jit
def _choose(x, share, bias, ids, weights, order, counters, token, count, CHOICES: tl.constexpr, CP: tl.constexpr,
            SCORES: tl.constexpr, NORMALISE: tl.constexpr, EPS: tl.constexpr, FACTOR: tl.constexpr,
            SIZE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, GROUP_BEST: tl.constexpr, G: tl.constexpr,
            S: tl.constexpr, R: tl.constexpr, SHARED: tl.constexpr):
    """The choices of R tokens by their logits x [R, G, S], -inf where there is no expert; behind them the SHARED
    experts, of weight share [R]."""
    group, at = tl.arange(0, G)[None, :, None], tl.arange(0, S)[None, None, :]
    number = group * SIZE + at
    there = (group < GROUPS) & (at < SIZE)
    if SCORES == "sigmoid":
        scores = tl.where(there, 1.0 / (1.0 + tl.exp(-x)), 0.0)
    else:
        scores = tl.exp(x - tl.max(tl.max(x, 2), 1)[:, None, None])
        if SCORES == "softmax":
            scores = scores / tl.sum(tl.sum(scores, 2), 1)[:, None, None]
    key = x
    if bias is not None:
        key = scores + tl.load(bias + number, mask=there, other=0.0)
    elif GROUPS > 1:
        key = scores
    if GROUPS > 1:
        key = tl.where(there, key, float("-inf"))
        total = tl.zeros((R, G), tl.float32)
        rest = key
        for _ in tl.static_range(GROUP_BEST):
            most = tl.max(rest, 2)
            total += most
            place = tl.min(tl.where(rest == most[:, :, None], at, 1 << 30), 2)
            rest = tl.where(at == place[:, :, None], float("-inf"), rest)
        groups = tl.arange(0, G)[None, :]
        ranked = tl.where(groups < GROUPS, order_key(total), _GONE)
        kept = tl.zeros((R, G), tl.int32)
        for _ in tl.static_range(KEPT):
            most = tl.max(ranked, 1)[:, None]
            taken = tl.min(tl.where(ranked == most, groups, 1 << 30), 1)[:, None]
            kept = tl.where(groups == taken, 1, kept)
            ranked = tl.where(groups == taken, _GONE, ranked)
        key = tl.where(kept[:, :, None] > 0, key, float("-inf"))
    # As integers: what was chosen is below everything, NaN above, so that no expert is chosen twice.
    rest = tl.where(there, order_key(key), _GONE)
    column = tl.arange(0, CP)[None, :]
    chosen = tl.zeros((R, CP), tl.int32)
    weight = tl.zeros((R, CP), tl.float32)
    for j in tl.range(CHOICES, num_stages=1):
        best = _best(rest, number)
        is_best = number == best[:, None, None]
        its = tl.sum(tl.sum(tl.where(is_best & there, scores, 0.0), 2), 1)
        chosen = tl.where(column == j, best[:, None], chosen)
        weight = tl.where(column == j, its[:, None], weight)
        rest = tl.where(is_best, _GONE, rest)
    if NORMALISE or SCORES == "softmax_of_chosen":
        weight = weight / (tl.sum(weight, 1)[:, None] + EPS)
    weight = weight * FACTOR
    counted = (token < count)[:, None] & (column < CHOICES)
    if SHARED > 0:  # all tokens go there: each has a place of its own
        place = tl.atomic_add(counters + chosen, 1, mask=counted, sem="relaxed")
        place = tl.where(column < CHOICES, place, token[:, None])
        chosen = tl.where(column < CHOICES, chosen, GROUPS * SIZE + column - CHOICES)
        weight = tl.where(column < CHOICES, weight, share[:, None])
    wanted = (token < count)[:, None] & (column < CHOICES + SHARED)
    row = token[:, None] * (CHOICES + SHARED) + column
    tl.store(ids + row, chosen, mask=wanted)
    tl.store(weights + row, weight, mask=wanted)
    if SHARED == 0:
        place = tl.atomic_add(counters + chosen, 1, mask=counted, sem="relaxed")
    tl.store(order + chosen.to(tl.int64) * count + place, row, mask=wanted)


@triton.jit
def route(x, norm_weight, w, w_bias, bias, ids, weights, order, starts, y, q, q_scale, q_factor, q_sum, sizes, partial,
          arrived, ROWS: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, NORM_EPS: tl.constexpr,
          CHOICES: tl.constexpr, CP: tl.constexpr, SCORES: tl.constexpr, NORMALISE: tl.constexpr, EPS: tl.constexpr,
          FACTOR: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, GROUP_BEST: tl.constexpr, G: tl.constexpr,
          S: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr, TO: tl.constexpr,
          SUMS: tl.constexpr, SHARED: tl.constexpr, GATE: tl.constexpr, AP: tl.constexpr):
    """From tokens to their experts: norm, router, the CHOICES best of E for each token (of equals the smaller number),
    and the rows (token, choice) of each expert.

    x           [T, K], normalised first by norm_weight f32 [K]; without w: the logits f32 [T, E], with GATE [T, E + 1]
    w           the router [E, K] in the type of x, with GATE [E + 1, K]; w_bias f32 [E] is added to its result
    ids, weights  i32 and f32 [T, CHOICES + SHARED], best first
    SHARED      experts, from E on, that every token has behind its choices. Their weight is one; with GATE the sigmoid
                of what the last row of w gives
    SCORES      "softmax" over all experts, "sigmoid", or "softmax_of_chosen"; bias f32 [E] counts for the choice alone
    GROUPS      > 1: only experts of KEPT groups can be chosen, of those whose GROUP_BEST best have the largest sum
    NORMALISE   the weights of a token are divided by their sum + EPS; FACTOR multiplies them
    order, starts  i32: expert e has starts[e + 1] - starts[e] rows, listed from order[e * T] on, each the row of
                [T, CHOICES + SHARED]. In which order they are listed is left to chance: what becomes of a row does not
                depend on it. AP: the power of two that holds E + SHARED
    y, q, q_scale, q_factor, q_sum  the norm for others: [T, K] in the type of x, and quantized (store_columns)
    partial     f32: logits; arrived i32, zero before and after: blocks that are done, rows of each expert, and for
                each tile of BM tokens how many of the SPLITS of K are done. The last split of a tile chooses, the last
                tile counts. R tokens are chosen for at a time, in a tile with a row [S] for each of G groups
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    count = tl.load(sizes + ROWS)
    first = tile * BM
    if first >= count:
        return
    SIZE: tl.constexpr = E // GROUPS
    counters = arrived + 1
    group, at = tl.arange(0, G)[None, :, None], tl.arange(0, S)[None, None, :]
    number = group * SIZE + at
    there = (group < GROUPS) & (at < SIZE)
    if w is not None:
        part = partial + (tile * SPLITS + split).to(tl.int64) * (BM * (EP + 16))
        _logits(x, norm_weight, w, y, q, q_scale, q_factor, q_sum, first, count, part, split, E, EP, K, NORM_EPS, BM,
                BK, SPLITS, TO, SUMS, GATE)
        tl.debug_barrier()
        if SPLITS > 1:
            if tl.atomic_add(counters + E + tile, 1, sem="acq_rel") != SPLITS - 1:
                return
            tl.store(counters + E + tile, 0)
    for begin in tl.range(0, tl.minimum(BM, count - first), R, num_stages=1):
        token = first + begin + tl.arange(0, R)
        share = tl.zeros((R,), tl.float32)
        if w is None:
            rows = tl.minimum(token, count - 1).to(tl.int64) * (E + 1 if GATE else E)
            logits = tl.load(x + rows[:, None, None] + number, mask=there, other=0.0)
            if GATE:
                share = tl.load(x + rows + E)
        else:
            logits = tl.zeros((R, G, S), tl.float32)
            squares = tl.zeros((R,), tl.float32)
            for other in tl.range(SPLITS, num_stages=1):
                row = partial + (tile * SPLITS + other).to(tl.int64) * (BM * (EP + 16))
                row += (begin + tl.arange(0, R)) * (EP + 16)
                logits += tl.load(row[:, None, None] + number, mask=there, other=0.0, cache_modifier=".cg")
                squares += tl.load(row + EP, cache_modifier=".cg")
                if GATE:
                    share += tl.load(row + EP + 1, cache_modifier=".cg")
            if norm_weight is not None and y is None and q is None:
                inverse = tl.rsqrt(squares / K + NORM_EPS)
                logits = logits * inverse[:, None, None]
                share = share * inverse
            if w_bias is not None:
                logits += tl.load(w_bias + number, mask=there, other=0.0)
        logits = tl.where(there, logits, float("-inf"))
        share = 1.0 / (1.0 + tl.exp(-share)) if GATE else tl.full((R,), 1.0, tl.float32)
        _choose(logits, share, bias, ids, weights, order, counters, token, count, CHOICES, CP, SCORES, NORMALISE, EPS,
                FACTOR, SIZE, GROUPS, KEPT, GROUP_BEST, G, S, R, SHARED)
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") != (count + BM - 1) // BM - 1:
        return
    expert = tl.arange(0, AP)
    its = tl.load(counters + expert, mask=expert < E, other=0, cache_modifier=".cg")
    if SHARED > 0:
        its = tl.where((expert >= E) & (expert < E + SHARED), count, its)
    tl.store(starts + expert, tl.cumsum(its, 0) - its, mask=expert < E + SHARED)
    tl.store(starts + E + SHARED, count * (CHOICES + SHARED))
    tl.debug_barrier()
    tl.store(counters + expert, expert * 0, mask=expert < E)
    tl.store(arrived, 0)


@triton.jit
def sort_by_expert(ids, order, starts, sizes, ROWS: tl.constexpr, E: tl.constexpr, CHOICES: tl.constexpr,
                   BLOCK: tl.constexpr):
    """order and starts as `route` gives them, for ids i32 [T, CHOICES] from elsewhere: one block an expert. A token
    has no expert twice."""
    expert = tl.program_id(0)
    tokens = tl.load(sizes + ROWS)
    count = tokens * CHOICES
    at = tl.arange(0, BLOCK)
    before, found = expert * 0, expert * 0
    for first in range(0, count, BLOCK):
        row = first + at
        its = tl.load(ids + row, mask=row < count, other=E)
        before += tl.sum((its < expert).to(tl.int32), 0)
        mine = (its == expert).to(tl.int32)
        tl.store(order + expert.to(tl.int64) * tokens + found + tl.cumsum(mine, 0) - 1, row, mask=mine > 0)
        found += tl.sum(mine, 0)
    tl.store(starts + expert, before)
    if expert == E - 1:
        tl.store(starts + E, count)


@triton.jit
def combine(x, weights, residual, y, norm_weight, normed, q, q_scale, q_factor, q_sum, sizes, ROWS: tl.constexpr,
            D: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr, TO: tl.constexpr,
            SUMS: tl.constexpr):
    """y [T, D] = residual + sum over the choices of weights [T, CHOICES] * x [T, CHOICES, D].

    norm_weight f32 [D]: what rms_norm makes of the result goes to normed [T, D] in the type of y, and quantized to q
    (store_row); then a block has a whole row.
    """
    token = tl.program_id(0).to(tl.int64)
    if token >= tl.load(sizes + ROWS):
        return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for j in range(CHOICES):
        v = tl.load(x + (token * CHOICES + j) * D + at, mask=at < D, other=0.0).to(tl.float32)
        acc += v * tl.load(weights + token * CHOICES + j)
    if residual is not None:
        acc += tl.load(residual + token * D + at, mask=at < D, other=0.0).to(tl.float32)
    rounded = narrow(acc, y.dtype.element_ty)
    tl.store(y + token * D + at, rounded, mask=at < D)
    if norm_weight is not None:
        store_normalised(rounded.to(tl.float32), norm_weight, normed, q, q_scale, q_factor, q_sum, token, D, BLOCK,
                         EPS, TO, SUMS)
