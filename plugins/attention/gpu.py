# mypy: allow-untyped-defs, allow-incomplete-defs
"""Attention over the paged cache, for generation and context chunks in one launch.

A block takes QB tokens of one sequence with all query heads of one key/value head, as rows of one tile, and one part of
the context (Flash-Decoding, Dao et al. 2023). Softmax is computed on the way (Milakov and Gimelshein 2018); the last
part to finish combines them all.
"""
import triton
import triton.language as tl

from ..gpu.math import dot, group_of, narrow, tanh
from ..quantize.gpu import store_columns
from ..rope.gpu import turned, write_rows

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _kv_tile(part, table, n, inside, kv_head, D: tl.constexpr, DP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
             BLOCK_BYTES: tl.constexpr):
    """Keys or values [BN, DP] of positions n; zero where not inside. Blocks that no position inside needs are not
    touched: their numbers may mean anything."""
    ELEMENT: tl.constexpr = part.dtype.element_ty.primitive_bitwidth // 8
    block = tl.load(table + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    row = part + block * (BLOCK_BYTES // ELEMENT) + (kv_head * BLOCK_SIZE + n % BLOCK_SIZE) * D
    d = tl.arange(0, DP)
    return tl.load(row[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _scales_of(scales, table, n, inside, kv_head, BLOCK_SIZE: tl.constexpr, BLOCK_BYTES: tl.constexpr):
    block = tl.load(table + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    at = block * (BLOCK_BYTES // 4) + kv_head * BLOCK_SIZE + n % BLOCK_SIZE
    return tl.load(scales + at, mask=inside, other=0.0)


@triton.jit
def paged_attention(q, k, v, cos, sin, q_norm, k_norm, k_part, v_part, k_scales, v_scales, k_static, v_static, sinks,
                    out, y, y_scale, y_factor, y_sum, query_start, context_len, block_table, sizes, partial, arrived,
                    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
                    DP: tl.constexpr, DVP: tl.constexpr,
                    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, ROTARY: tl.constexpr,
                    BEGIN: tl.constexpr, INTERLEAVED: tl.constexpr, EPS: tl.constexpr, KV: tl.constexpr,
                    SCALE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr,
                    BLOCK_SIZE: tl.constexpr, BLOCK_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr, QB: tl.constexpr,
                    QP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, STEPS: tl.constexpr,
                    TO: tl.constexpr, SUMS: tl.constexpr):
    """out [T, Hq, DV] = softmax(SCALE q K^T) V for each token over the positions of its sequence that it sees.

    q               [T, Hq, D], tokens Q_STRIDE elements apart
    k, v, cos, sin, q_norm, k_norm  None, or as rope_kv_write takes them: this kernel does its work too. That needs all
                    of a sequence's tokens in one tile: QB tokens or fewer in a step. QP: power of two that holds QB
    k_part, v_part, k_scales, v_scales, k_static, v_static, block_table: as rope_kv_write leaves them
    sinks           f32 [Hq]: one more logit a head in the denominator
    y, y_scale, y_factor, y_sum  None, or the result once more, as the next matrix takes it (TO, SUMS, quantize/gpu.py):
                    the last block of a tile of tokens to finish quantizes its rows
    query_start i32 [B + 1], context_len i32 [B]: the tokens of the step are part of the context
    WINDOW, CHUNK, SOFTCAP: 0 for none. DP, DVP: powers of two that hold D and DV. STEPS: of the search
    partial f32: where the SPLITS of the context meet; arrived i32, zero before and after: with y one for each tile,
    then for each of their parts that split
    """
    num_seqs = tl.load(sizes + 1)
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if num_seqs == 0:
        return
    seq = group_of(tile, query_start, num_seqs, QB, STEPS)
    start = tl.load(query_start + seq)
    length = tl.load(query_start + seq + 1) - start
    q0 = (tile - (start // QB + seq)) * QB
    if q0 >= length:
        return
    context = tl.load(context_len + seq)
    table = block_table + seq.to(tl.int64) * MAX_BLOCKS
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    r = tl.arange(0, BM)
    token = q0 + r // GROUP
    head = kv_head * GROUP + r % GROUP
    valid = (r < QB * GROUP) & (token < length)
    position = context - length + token
    first = context - length + q0
    # What the tile's tokens see lies in [low, high).
    high = tl.minimum(first + QB, context)
    low = first * 0
    if WINDOW > 0:
        low = tl.maximum(first - WINDOW + 1, 0)
    if CHUNK > 0:
        low = first // CHUNK * CHUNK
    origin = low // BLOCK_SIZE * BLOCK_SIZE
    part = tl.cdiv(tl.cdiv(high - origin, BN), SPLITS) * BN
    active = tl.cdiv(high - origin, part)
    if split >= active:
        return
    begin = origin + split * part
    end = tl.minimum(begin + part, high)

    d = tl.arange(0, DP)
    rows = (start + token).to(tl.int64) * Q_HEADS + head
    kind: tl.constexpr = q.dtype.element_ty
    q_rows = (start + token).to(tl.int64) * Q_STRIDE + head * D
    if k is not None:
        queries = narrow(turned(q, q_rows, start + token, valid, cos, sin, q_norm, D, ROTARY, BEGIN, INTERLEAVED, EPS,
                                DP), kind)
        # The new tokens of this part of the context go to the cache, and come back from there.
        new = tl.arange(0, QP)
        place = context - length + new
        mine = (new < length) & (place >= begin) & (place < end)
        blocks = tl.load(table + place // BLOCK_SIZE, mask=mine, other=0).to(tl.int64)
        slots = (kv_head * BLOCK_SIZE + place % BLOCK_SIZE).to(tl.int64)
        at = (start + new).to(tl.int64)
        keys = turned(k, at * K_STRIDE + kv_head * D, start + new, mine, cos, sin, k_norm, D, ROTARY, BEGIN,
                      INTERLEAVED, EPS, DP)
        write_rows(keys, k_part, k_scales, k_static, blocks, slots, mine, D, BLOCK_BYTES, KV, DP)
        values = turned(v, at * V_STRIDE + kv_head * DV, start + new, mine, cos, sin, None, DV, 0, 0, False, EPS, DVP)
        write_rows(values, v_part, v_scales, v_static, blocks, slots, mine, DV, BLOCK_BYTES, KV, DVP)
        tl.debug_barrier()
    else:
        queries = tl.load(q + q_rows[:, None] + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
    k_factor = SCALE
    v_factor = 1.0
    if k_static is not None:
        k_factor = k_factor * tl.load(k_static)
        v_factor = tl.load(v_static)
    peak = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, DVP), tl.float32)
    for n0 in range(begin, end, BN):
        n = n0 + tl.arange(0, BN)
        inside = (n >= low) & (n < end)
        key_tile = _kv_tile(k_part, table, n, inside, kv_head, D, DP, BLOCK_SIZE, BLOCK_BYTES)
        if key_tile.dtype != kind:
            key_tile = key_tile.to(tl.float32).to(kind)  # exact: eight bits fit
        scores = dot(queries, key_tile.T, tl.zeros((BM, BN), tl.float32)) * k_factor
        if k_scales is not None:
            scores = scores * _scales_of(k_scales, table, n, inside, kv_head, BLOCK_SIZE, BLOCK_BYTES)[None, :]
        if SOFTCAP > 0:
            scores = SOFTCAP * tanh(scores / SOFTCAP)
        seen = inside[None, :] & (n[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (n[None, :] > position[:, None] - WINDOW)
        if CHUNK > 0:
            seen = seen & (n[None, :] >= (position // CHUNK * CHUNK)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2((scores - base[:, None]) * _LOG2E)
        decay = tl.exp2((peak - base) * _LOG2E)
        total = total * decay + tl.sum(weights, 1)
        value_tile = _kv_tile(v_part, table, n, inside, kv_head, DV, DVP, BLOCK_SIZE, BLOCK_BYTES)
        if value_tile.dtype != kind:
            value_tile = value_tile.to(tl.float32).to(kind)
        if v_scales is not None:
            weights = weights * _scales_of(v_scales, table, n, inside, kv_head, BLOCK_SIZE, BLOCK_BYTES)[None, :]
        acc = dot(narrow(weights, kind), value_tile, acc * decay[:, None])
        peak = new_peak

    if SPLITS > 1:
        dv = tl.arange(0, DVP)
        group = tile * KV_HEADS + kv_head
        SLOT: tl.constexpr = BM * (DVP + 2)
        slots = partial + group.to(tl.int64) * (SPLITS * SLOT)
        element = r[:, None] * DVP + dv[None, :]
        mine = slots + split * SLOT
        tl.store(mine + element, acc)
        tl.store(mine + BM * DVP + r, peak)
        tl.store(mine + BM * (DVP + 1) + r, total)
        tl.debug_barrier()
        if y is not None:
            group = group + tl.num_programs(0)
        if tl.atomic_add(arrived + group, 1, sem="acq_rel") != active - 1:
            return
        peak_all = tl.full((BM,), float("-inf"), tl.float32)
        total_all = tl.zeros((BM,), tl.float32)
        acc_all = tl.zeros((BM, DVP), tl.float32)
        for other in range(active):
            its = slots + other * SLOT
            its_peak = tl.load(its + BM * DVP + r, cache_modifier=".cg")
            new_peak = tl.maximum(peak_all, its_peak)
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            decay, gain = tl.exp2((peak_all - base) * _LOG2E), tl.exp2((its_peak - base) * _LOG2E)
            total_all = total_all * decay + gain * tl.load(its + BM * (DVP + 1) + r, cache_modifier=".cg")
            acc_all = acc_all * decay[:, None] + gain[:, None] * tl.load(its + element, cache_modifier=".cg")
            peak_all = new_peak
        tl.store(arrived + group, 0)
        _store(acc_all, peak_all, total_all, v_factor, sinks, out, rows, head, valid, DV, DVP)
    else:
        _store(acc, peak, total, v_factor, sinks, out, rows, head, valid, DV, DVP)
    if y is not None:
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == KV_HEADS - 1:
            tl.store(arrived + tile, 0)
            _quantize(out, y, y_scale, y_factor, y_sum, start + q0, tl.minimum(length - q0, QB), Q_HEADS * DV, QP, TO,
                      SUMS)


@triton.jit
def _quantize(out, y, y_scale, y_factor, y_sum, first, count, D: tl.constexpr, ROWS: tl.constexpr, TO: tl.constexpr,
              SUMS: tl.constexpr):
    """Rows first .. first + count of out [T, D], which other blocks have written too, quantized by token as store_row
    does it. count: from 1 to ROWS."""
    CHUNK: tl.constexpr = 4096 // ROWS if ROWS < 32 else 128
    r = tl.arange(0, ROWS)
    inside = r < count
    rows = (first + tl.minimum(r, count - 1)).to(tl.int64)
    at = tl.arange(0, CHUNK)
    peak = tl.zeros((ROWS,), tl.float32)
    if TO != "fp8_block":
        for c in range(0, D, CHUNK):
            v = tl.load(out + rows[:, None] * D + (c + at)[None, :], mask=(c + at < D)[None, :], other=0.0,
                        cache_modifier=".cg")
            peak = tl.maximum(peak, tl.max(tl.abs(v.to(tl.float32)), 1))
    for c in range(0, D, CHUNK):
        there = inside[:, None] & (c + at < D)[None, :]
        v = tl.load(out + rows[:, None] * D + (c + at)[None, :], mask=there, other=0.0, cache_modifier=".cg")
        store_columns(v.to(tl.float32), peak, y, y_scale, y_factor, y_sum, rows, inside, c, D, ROWS, CHUNK, TO, SUMS)


@triton.jit
def _store(acc, peak, total, v_factor, sinks, out, rows, head, valid, DV: tl.constexpr, DVP: tl.constexpr):
    if sinks is not None:
        sink = tl.load(sinks + head, mask=valid, other=0.0)
        base = tl.maximum(peak, sink)
        decay = tl.exp2((peak - base) * _LOG2E)
        total = total * decay + tl.exp2((sink - base) * _LOG2E)
        acc = acc * decay[:, None]
    acc = acc * (v_factor / tl.where(total > 0, total, 1.0))[:, None]
    dv = tl.arange(0, DVP)
    tl.store(out + rows[:, None] * DV + dv[None, :], narrow(acc, out.dtype.element_ty),
             mask=valid[:, None] & (dv < DV)[None, :])
