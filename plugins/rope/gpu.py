# mypy: allow-untyped-defs, allow-incomplete-defs
"""What stands between the q/k/v projection and attention: norm per head, rotary embedding, write to the paged cache.

Functions work on tiles of heads, [R, BLOCK] with BLOCK elements for the D of a head; attention uses them too.
"""
import triton
import triton.language as tl

from ..gpu.math import limit, narrow, quantize


@triton.jit
def turned(x, rows, tokens, inside, cos, sin, norm_weight, D: tl.constexpr, ROTARY: tl.constexpr, BEGIN: tl.constexpr,
           INTERLEAVED: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr):
    """float32 [R, BLOCK]: the heads that begin at elements `rows` i64 [R] of x, normalised over their D elements where
    there is a norm_weight f32 [D]; elements BEGIN .. BEGIN + ROTARY are turned by rows `tokens` of cos and sin, f32
    [T, ROTARY]. Zero where not inside [R], and beyond D."""
    at = tl.arange(0, BLOCK)
    mask = inside[:, None] & (at < D)[None, :]
    v = tl.load(x + rows[:, None] + at[None, :], mask=mask, other=0.0).to(tl.float32)
    factor = tl.full(rows.shape, 1.0, tl.float32)
    if norm_weight is not None:
        factor = tl.rsqrt(tl.sum(v * v, 1) / D + EPS)
        v = v * factor[:, None] * tl.load(norm_weight + at, mask=at < D, other=0.0)[None, :]
    if ROTARY == 0:
        return v
    else:
        place = at - BEGIN
        turns = (place >= 0) & (place < ROTARY)
        if INTERLEAVED:
            partner = at + 1 - 2 * (place & 1)
            sign = tl.where(place & 1 == 1, 1.0, -1.0)
        else:
            partner = tl.where(place < ROTARY // 2, at + ROTARY // 2, at - ROTARY // 2)
            sign = tl.where(place < ROTARY // 2, -1.0, 1.0)
        partner = tl.where(turns, partner, at)
        other = tl.load(x + rows[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
        if norm_weight is not None:
            weight = tl.load(norm_weight + partner, mask=at < D, other=0.0)
            other = other * factor[:, None] * weight[None, :]
        angle = tokens[:, None] * ROTARY + place[None, :]
        there = inside[:, None] & turns[None, :]
        c = tl.load(cos + angle, mask=there, other=1.0)
        s = tl.load(sin + angle, mask=there, other=0.0)
        return v * c + sign[None, :] * other * s


@triton.jit
def write_rows(v, part, scales, static_scale, blocks, slots, inside, D: tl.constexpr, BLOCK_BYTES: tl.constexpr,
               TO: tl.constexpr, BLOCK: tl.constexpr):
    """Heads v float32 [R, BLOCK] to row `slots` of the part of block `blocks`, both i64 [R], where inside.

    part in the cache's type: where the layer's part begins in block 0. TO int8: a scale a row to scales f32, which
    lie in the block likewise; fp8: divided by static_scale f32 [1], if there is one.
    """
    at = tl.arange(0, BLOCK)
    if TO == "int8":
        largest = tl.max(tl.abs(v), 1)
        v = v * tl.where(largest > 0, 127.0 / largest, 0.0)[:, None]
        tl.store(scales + blocks * (BLOCK_BYTES // 4) + slots, largest / 127.0, mask=inside)
    elif TO == "fp8":
        if static_scale is not None:
            v = v / tl.load(static_scale)
        v = tl.minimum(tl.maximum(v, -limit(TO)), limit(TO))
    ELEMENT: tl.constexpr = part.dtype.element_ty.primitive_bitwidth // 8
    row = part + blocks * (BLOCK_BYTES // ELEMENT) + slots * D
    tl.store(row[:, None] + at[None, :], quantize(v, TO), mask=inside[:, None] & (at < D)[None, :])


@triton.jit
def _query(q, cos, sin, q_norm, q_out, tokens, inside, head, HEADS: tl.constexpr, D: tl.constexpr,
           STRIDE: tl.constexpr, ROTARY: tl.constexpr, BEGIN: tl.constexpr, INTERLEAVED: tl.constexpr,
           EPS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    out = turned(q, tokens * STRIDE + head * D, tokens, inside, cos, sin, q_norm, D, ROTARY, BEGIN, INTERLEAVED, EPS,
                 BLOCK)
    tl.debug_barrier()  # q_out may be q: a row is read whole before it is written
    row = q_out + (tokens * HEADS + head) * D
    tl.store(row[:, None] + at[None, :], narrow(out, q_out.dtype.element_ty), mask=(at < D)[None, :])


@triton.jit
def _key_or_value(k, v, cos, sin, k_norm, k_part, v_part, k_scales, v_scales, k_static, v_static, positions, token_seq,
                  block_table, tokens, inside, head, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
                  K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, ROTARY: tl.constexpr, BEGIN: tl.constexpr,
                  INTERLEAVED: tl.constexpr, EPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_BYTES: tl.constexpr,
                  MAX_BLOCKS: tl.constexpr, TO: tl.constexpr, BLOCK: tl.constexpr):
    position = tl.load(positions + tokens)
    seq = tl.load(token_seq + tokens).to(tl.int64)
    blocks = tl.load(block_table + seq * MAX_BLOCKS + position // BLOCK_SIZE).to(tl.int64)
    if head < HEADS:
        slots = (head * BLOCK_SIZE + position % BLOCK_SIZE).to(tl.int64)
        key = turned(k, tokens * K_STRIDE + head * D, tokens, inside, cos, sin, k_norm, D, ROTARY, BEGIN, INTERLEAVED,
                     EPS, BLOCK)
        write_rows(key, k_part, k_scales, k_static, blocks, slots, inside, D, BLOCK_BYTES, TO, BLOCK)
    else:
        kv_head = head - HEADS
        slots = (kv_head * BLOCK_SIZE + position % BLOCK_SIZE).to(tl.int64)
        value = turned(v, tokens * V_STRIDE + kv_head * DV, tokens, inside, cos, sin, None, DV, 0, 0, False, EPS, BLOCK)
        write_rows(value, v_part, v_scales, v_static, blocks, slots, inside, DV, BLOCK_BYTES, TO, BLOCK)


@triton.jit
def rope_kv_write(q, k, v, cos, sin, q_norm, k_norm, q_out, k_part, v_part, k_scales, v_scales, k_static, v_static,
                  positions, token_seq, block_table, sizes, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
                  D: tl.constexpr, DV: tl.constexpr, Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr,
                  V_STRIDE: tl.constexpr, ROTARY: tl.constexpr, BEGIN: tl.constexpr, INTERLEAVED: tl.constexpr,
                  EPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr,
                  TO: tl.constexpr, BLOCK: tl.constexpr):
    """One head of one token a block: heads 0 .. Q_HEADS of q, then KV_HEADS of k, then KV_HEADS of v. Q_HEADS 0: only
    the cache is written; KV_HEADS 0: it is not.

    q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, DV]: tokens Q_STRIDE, K_STRIDE, V_STRIDE elements apart
    cos, sin      f32 [T, ROTARY], a factor an element; ROTARY 0: nothing turns
    q_out         [T, Hq, D] in q's type, may be q where it is dense
    k_part, v_part  [Hkv, BLOCK_SIZE, D] in each block, BLOCK_BYTES apart; k_scales, v_scales f32 [Hkv, BLOCK_SIZE]
                  (int8); k_static, v_static f32 [1] (fp8)
    positions, token_seq i32 [T]; block_table i32 [B, MAX_BLOCKS] of the layer's table
    """
    token = tl.program_id(0).to(tl.int64)
    if token >= tl.load(sizes):
        return
    head = tl.program_id(1)
    one = tl.arange(0, 1)
    inside = one == 0
    tokens = one + token
    if KV_HEADS == 0:
        _query(q, cos, sin, q_norm, q_out, tokens, inside, head, Q_HEADS, D, Q_STRIDE, ROTARY, BEGIN, INTERLEAVED, EPS,
               BLOCK)
    elif Q_HEADS == 0:
        _key_or_value(k, v, cos, sin, k_norm, k_part, v_part, k_scales, v_scales, k_static, v_static, positions,
                      token_seq, block_table, tokens, inside, head, KV_HEADS, D, DV, K_STRIDE, V_STRIDE, ROTARY, BEGIN,
                      INTERLEAVED, EPS, BLOCK_SIZE, BLOCK_BYTES, MAX_BLOCKS, TO, BLOCK)
    else:
        if head < Q_HEADS:
            _query(q, cos, sin, q_norm, q_out, tokens, inside, head, Q_HEADS, D, Q_STRIDE, ROTARY, BEGIN, INTERLEAVED,
                   EPS, BLOCK)
        else:
            _key_or_value(k, v, cos, sin, k_norm, k_part, v_part, k_scales, v_scales, k_static, v_static, positions,
                          token_seq, block_table, tokens, inside, head - Q_HEADS, KV_HEADS, D, DV, K_STRIDE, V_STRIDE,
                          ROTARY, BEGIN, INTERLEAVED, EPS, BLOCK_SIZE, BLOCK_BYTES, MAX_BLOCKS, TO, BLOCK)
