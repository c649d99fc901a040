# mypy: allow-untyped-defs, allow-incomplete-defs
"""What stands between the q/k/v projection and attention: norm per head, rotary embedding, write to the paged cache."""
import triton
import triton.language as tl

from ..gpu.math import limit, narrow, quantize


@triton.jit
def _head(x, at, norm_weight, D: tl.constexpr, EPS: tl.constexpr):
    """The elements `at` of the head at x, normalised over its D elements. float32."""
    v = tl.load(x + at, mask=at < D, other=0.0).to(tl.float32)
    if norm_weight is not None:
        v = v * tl.rsqrt(tl.sum(v * v, 0) / D + EPS) * tl.load(norm_weight + at, mask=at < D, other=0.0)
    return v


@triton.jit
def _turned(x, at, cos, sin, norm_weight, token, D: tl.constexpr, R: tl.constexpr, BEGIN: tl.constexpr,
            INTERLEAVED: tl.constexpr, EPS: tl.constexpr):
    """The head at x, normalised and turned: elements BEGIN .. BEGIN + R by the factors cos, sin f32 [T, R]."""
    v = _head(x, at, norm_weight, D, EPS)
    if R == 0:
        return v
    else:
        place = at - BEGIN
        turns = (place >= 0) & (place < R)
        if INTERLEAVED:
            partner = at + 1 - 2 * (place & 1)
            sign = tl.where(place & 1 == 1, 1.0, -1.0)
        else:
            partner = tl.where(place < R // 2, at + R // 2, at - R // 2)
            sign = tl.where(place < R // 2, -1.0, 1.0)
        partner = tl.where(turns, partner, at)
        other = tl.load(x + partner, mask=at < D, other=0.0).to(tl.float32)
        if norm_weight is not None:
            squares = tl.load(x + at, mask=at < D, other=0.0).to(tl.float32)
            other = other * tl.rsqrt(tl.sum(squares * squares, 0) / D + EPS)
            other = other * tl.load(norm_weight + partner, mask=at < D, other=0.0)
        c = tl.load(cos + token * R + place, mask=turns, other=1.0)
        s = tl.load(sin + token * R + place, mask=turns, other=0.0)
        return v * c + sign * other * s


@triton.jit
def _cache(v, at, part, scales, static_scale, slot, D: tl.constexpr, TO: tl.constexpr):
    """One head of one token to its place: row `slot` of part [.., D]; int8: its scale to scales [..]."""
    if TO == "int8":
        largest = tl.max(tl.abs(v), 0)
        v = v * tl.where(largest > 0, 127.0 / largest, 0.0)
        tl.store(scales + slot, largest / 127.0)
    elif TO == "fp8":
        if static_scale is not None:
            v = v / tl.load(static_scale)
        v = tl.minimum(tl.maximum(v, -limit(TO)), limit(TO))
    tl.store(part + slot * D + at, quantize(v, TO), mask=at < D)


@triton.jit
def rope_kv_write(q, k, v, cos, sin, q_norm, k_norm, q_out, k_part, v_part, k_scales, v_scales, k_static, v_static,
                  positions, token_seq, block_table, sizes, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
                  D: tl.constexpr, DV: tl.constexpr, Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr,
                  V_STRIDE: tl.constexpr, R: tl.constexpr, BEGIN: tl.constexpr, INTERLEAVED: tl.constexpr,
                  EPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr,
                  TO: tl.constexpr, BLOCK: tl.constexpr):
    """One head of one token a block: heads 0 .. Q_HEADS of q, then KV_HEADS of k, then KV_HEADS of v.

    q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, DV]: tokens Q_STRIDE, K_STRIDE, V_STRIDE elements apart
    cos, sin      f32 [T, R], a factor an element; R 0: nothing turns
    q_out         [T, Hq, D] in q's type, may be q where it is dense
    k_part, v_part  in the cache's type: where the layer's K and V begin in block 0; [Hkv, BLOCK_SIZE, D] in each block,
                  BLOCK_BYTES apart
    k_scales, v_scales  f32, likewise [Hkv, BLOCK_SIZE] (int8); k_static, v_static f32 [1] (fp8)
    positions, token_seq i32 [T]; block_table i32 [B, MAX_BLOCKS] of the layer's table
    """
    token = tl.program_id(0).to(tl.int64)
    if token >= tl.load(sizes):
        return
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    if head < Q_HEADS:
        x = q + token * Q_STRIDE + head * D
        out = _turned(x, at, cos, sin, q_norm, token, D, R, BEGIN, INTERLEAVED, EPS)
        tl.debug_barrier()  # q_out may be q: a row is read whole before it is written
        tl.store(q_out + (token * Q_HEADS + head) * D + at, narrow(out, q_out.dtype.element_ty), mask=at < D)
    else:
        position = tl.load(positions + token)
        seq = tl.load(token_seq + token).to(tl.int64)
        block = tl.load(block_table + seq * MAX_BLOCKS + position // BLOCK_SIZE).to(tl.int64)
        if head < Q_HEADS + KV_HEADS:
            kv_head = head - Q_HEADS
            slot = (kv_head * BLOCK_SIZE + position % BLOCK_SIZE).to(tl.int64)
            turned = _turned(k + token * K_STRIDE + kv_head * D, at, cos, sin, k_norm, token, D, R, BEGIN, INTERLEAVED,
                             EPS)
            _to_block(turned, at, k_part, k_scales, k_static, block, slot, D, BLOCK_BYTES, TO)
        else:
            kv_head = head - Q_HEADS - KV_HEADS
            slot = (kv_head * BLOCK_SIZE + position % BLOCK_SIZE).to(tl.int64)
            value = _head(v + token * V_STRIDE + kv_head * DV, at, None, DV, EPS)
            _to_block(value, at, v_part, v_scales, v_static, block, slot, DV, BLOCK_BYTES, TO)


@triton.jit
def _to_block(v, at, part, scales, static_scale, block, slot, D: tl.constexpr, BLOCK_BYTES: tl.constexpr,
              TO: tl.constexpr):
    ELEMENT: tl.constexpr = part.dtype.element_ty.primitive_bitwidth // 8
    mine = part + block * (BLOCK_BYTES // ELEMENT)
    if TO == "int8":
        _cache(v, at, mine, scales + block * (BLOCK_BYTES // 4), None, slot, D, TO)
    else:
        _cache(v, at, mine, None, static_scale, slot, D, TO)
