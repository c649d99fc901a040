# mypy: allow-untyped-defs, allow-incomplete-defs
"""Row kernels: one block a token, the whole row in registers. What stands between two linear layers in one launch:
the gate, or the residual sum and the norm, and the quantization of what the next layer reads."""
import triton
import triton.language as tl

from ..gpu.math import gate, group_sums, limit, quantize, to_nvfp4


@triton.jit
def store_row(v, y, y_scale, y_factor, y_sum, static_scale, row, D: tl.constexpr, BLOCK: tl.constexpr,
              TO: tl.constexpr, SUMS: tl.constexpr):
    """Row v float32 [BLOCK], zero beyond D, as the next layer reads it.

    TO bf16, fp16, fp32: y [T, D]
    TO fp8, int8: y [T, D] and y_scale f32 [T], or, with static_scale f32 [1], y alone; SUMS > 0: y_sum f16
              [T, ceil(D / SUMS)], the sums of so many of a row of y
    TO fp8_block: y [T, D], y_scale f32 [T, D/128]
    TO nvfp4: y u8 [T, D/2], y_scale e4m3 [T, D/16], of v / static_scale, or without one of v / y_factor f32 [T]
    """
    at = tl.arange(0, BLOCK)
    if TO == "nvfp4":
        if static_scale is not None:
            factor = tl.load(static_scale)
        else:
            largest = tl.max(tl.abs(v), 0)
            factor = tl.where(largest > 0, largest / limit(TO), 1.0)
            tl.store(y_factor + row, factor)
        packed, scale = to_nvfp4((v / factor).reshape(1, BLOCK), 1, BLOCK)
        half = tl.arange(0, BLOCK // 2)
        tl.store(y + row * (D // 2) + half, packed.reshape(BLOCK // 2), mask=half < D // 2)
        sixteenth = tl.arange(0, BLOCK // 16)
        tl.store(y_scale + row * (D // 16) + sixteenth, scale.reshape(BLOCK // 16), mask=sixteenth < D // 16)
    elif TO == "fp8_block":
        groups = v.reshape(BLOCK // 128, 128)
        largest = tl.max(tl.abs(groups), 1)
        q = quantize(groups * tl.where(largest > 0, 448.0 / largest, 0.0)[:, None], "fp8")
        tl.store(y + row * D + at, q.reshape(BLOCK), mask=at < D)
        group = tl.arange(0, BLOCK // 128)
        tl.store(y_scale + row * (D // 128) + group, largest / 448.0, mask=group < D // 128)
    elif TO == "fp8" or TO == "int8":
        if static_scale is not None:
            q = v / tl.load(static_scale)
            q = tl.minimum(tl.maximum(q, -limit(TO)), limit(TO))
        else:
            largest = tl.max(tl.abs(v), 0)
            q = v * tl.where(largest > 0, limit(TO) / largest, 0.0)
            tl.store(y_scale + row, largest / limit(TO))
        q = quantize(q, TO)
        tl.store(y + row * D + at, q, mask=at < D)
        if SUMS > 0:
            GROUPS: tl.constexpr = (D + SUMS - 1) // SUMS
            group = tl.arange(0, BLOCK // SUMS)
            sums = group_sums(q.reshape(1, BLOCK), SUMS).reshape(BLOCK // SUMS)
            tl.store(y_sum + row * GROUPS + group, sums, mask=group < GROUPS)
    else:
        tl.store(y + row * D + at, quantize(v, TO), mask=at < D)


@triton.jit
def store_columns(v, largest, y, y_scale, y_factor, y_sum, rows, inside, k, D: tl.constexpr, BM: tl.constexpr,
                  BK: tl.constexpr, TO: tl.constexpr, SUMS: tl.constexpr):
    """Columns k .. k + BK of several rows of D, as store_row stores whole ones: v float32 [BM, BK], zero beyond D;
    rows i64 [BM], stored where inside. largest f32 [BM]: the greatest magnitude of each row. TO fp8, int8, nvfp4, or
    fp8_block with BK a multiple of 128; of SUMS too."""
    at = k + tl.arange(0, BK)
    stored = inside[:, None] & (at < D)[None, :]
    if TO == "nvfp4":
        factor = tl.where(largest > 0, largest / limit(TO), 1.0)
        if k == 0:
            tl.store(y_factor + rows, factor, mask=inside)
        packed, scale = to_nvfp4(v / factor[:, None], BM, BK)
        half = k // 2 + tl.arange(0, BK // 2)
        tl.store(y + rows[:, None] * (D // 2) + half[None, :], packed, mask=inside[:, None] & (half < D // 2)[None, :])
        sixteenth = k // 16 + tl.arange(0, BK // 16)
        tl.store(y_scale + rows[:, None] * (D // 16) + sixteenth[None, :], scale,
                 mask=inside[:, None] & (sixteenth < D // 16)[None, :])
    elif TO == "fp8_block":
        groups = v.reshape(BM, BK // 128, 128)
        most = tl.max(tl.abs(groups), 2)
        q = quantize(groups * tl.where(most > 0, 448.0 / most, 0.0)[:, :, None], "fp8")
        tl.store(y + rows[:, None] * D + at[None, :], q.reshape(BM, BK), mask=stored)
        group = k // 128 + tl.arange(0, BK // 128)
        tl.store(y_scale + rows[:, None] * (D // 128) + group[None, :], most / 448.0,
                 mask=inside[:, None] & (group < D // 128)[None, :])
    else:
        if k == 0:
            tl.store(y_scale + rows, largest / limit(TO), mask=inside)
        q = quantize(v * tl.where(largest > 0, limit(TO) / largest, 0.0)[:, None], TO)
        tl.store(y + rows[:, None] * D + at[None, :], q, mask=stored)
        if SUMS > 0:
            GROUPS: tl.constexpr = (D + SUMS - 1) // SUMS
            part = k // SUMS + tl.arange(0, BK // SUMS)
            tl.store(y_sum + rows[:, None] * GROUPS + part[None, :], group_sums(q, SUMS),
                     mask=inside[:, None] & (part < GROUPS)[None, :])


@triton.jit
def quantize_rows(x, y, y_scale, y_factor, y_sum, static_scale, sizes, ROWS: tl.constexpr, GROUP: tl.constexpr,
                  D: tl.constexpr, X_STRIDE: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, TO: tl.constexpr,
                  SUMS: tl.constexpr):
    """y = x, or act(gate) * other where x holds [gate | other] of D channels each, rows X_STRIDE apart; GROUP rows for
    each token, or row of logits."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(sizes + ROWS) * GROUP:
        return
    at = tl.arange(0, BLOCK)
    v = tl.load(x + row * X_STRIDE + at, mask=at < D, other=0.0).to(tl.float32)
    if GATED != "":
        other = tl.load(x + row * X_STRIDE + D + at, mask=at < D, other=0.0).to(tl.float32)
        v = gate(v, other, GATED)
    store_row(v, y, y_scale, y_factor, y_sum, static_scale, row, D, BLOCK, TO, SUMS)
