# mypy: allow-untyped-defs, allow-incomplete-defs
"""What adapters add to linear layers on GPUs: h = x aᵀ, then y += h b, each token with the matrices of its sequence."""
import triton
import triton.language as tl

from ..gpu.math import dot, narrow


@triton.jit
def dot_wide(v, w, acc):
    """acc + v @ w, accumulated in float32. v [M, K] of any floating type, w [K, N] bf16.

    Wider values are multiplied as the sum of three bf16, which together have all digits of a float32.
    """
    if v.dtype == tl.bfloat16:
        return dot(v, w, acc)
    else:
        wide = v.to(tl.float32)
        high = narrow(wide, tl.bfloat16)
        rest = wide - high.to(tl.float32)
        middle = narrow(rest, tl.bfloat16)
        low = narrow(rest - middle.to(tl.float32), tl.bfloat16)
        return dot(high, w, dot(middle, w, dot(low, w, acc)))


@triton.jit
def slots_of(adapters, token_seq, sizes, rows):
    """i32, the slot of each token's adapter; -1 for tokens without, and beyond the step's."""
    live = rows < tl.load(sizes)
    seq = tl.load(token_seq + rows, mask=live, other=0)
    return tl.load(adapters + seq, mask=live, other=-1)


@triton.jit
def next_slot(slots, after, NUM_SLOTS: tl.constexpr):
    """The smallest slot of these tokens that is above `after`; NUM_SLOTS if there is none."""
    return tl.min(tl.where(slots > after, slots, NUM_SLOTS), 0)


@triton.jit
def shrink(x, a, h, adapters, token_seq, sizes, K: tl.constexpr, RANK: tl.constexpr, MODULES: tl.constexpr,
           X_STRIDE: tl.constexpr, A_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr, NUM_SLOTS: tl.constexpr,
           K_SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
           BLOCK_K: tl.constexpr):
    """h f32 [S, T, MODULES * RANK], S sums of K_SPLIT channels each, together x aᵀ; x [T, K], rows X_STRIDE apart.

    a bf16: of the first module in slot 0, [RANK, K]; A_STRIDE elements to the next module's, SLOT_STRIDE to the next
    slot's. A block has BLOCK_M tokens, BLOCK_R rows of one module's a, and K_SPLIT channels. It goes through the slots
    that its tokens have; of each product it keeps the rows of that slot's tokens.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    slots = slots_of(adapters, token_seq, sizes, rows)
    slot = next_slot(slots, -1, NUM_SLOTS)
    if slot == NUM_SLOTS:
        return
    pieces: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
    module = tl.program_id(1) // pieces
    rank = tl.program_id(1) % pieces * BLOCK_R + tl.arange(0, BLOCK_R)
    begin = tl.program_id(2) * K_SPLIT
    mine = slots >= 0
    kept = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    while slot < NUM_SLOTS:
        matrix = a + slot.to(tl.int64) * SLOT_STRIDE + module.to(tl.int64) * A_STRIDE
        acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for step in range(0, K_SPLIT, BLOCK_K):
            k = begin + step + tl.arange(0, BLOCK_K)
            values = tl.load(x + rows.to(tl.int64)[:, None] * X_STRIDE + k[None, :],
                             mask=mine[:, None] & (k < K)[None, :], other=0.0)
            weights = tl.load(matrix + rank[None, :] * K + k[:, None], mask=(rank < RANK)[None, :] & (k < K)[:, None],
                              other=0.0)
            acc = dot_wide(values, weights, acc)
        kept = tl.where((slots == slot)[:, None], acc, kept)
        slot = next_slot(slots, slot, NUM_SLOTS)
    tokens = tl.load(sizes).to(tl.int64)
    place = h + (tl.program_id(2) * tokens + rows)[:, None] * (MODULES * RANK) + module * RANK + rank[None, :]
    tl.store(place, kept, mask=mine[:, None] & (rank < RANK)[None, :])


@triton.jit
def expand(y, h, b, adapters, token_seq, sizes, N: tl.constexpr, H_WIDTH: tl.constexpr, RANK: tl.constexpr,
           SLOT_STRIDE: tl.constexpr, NUM_SLOTS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
           BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, START0: tl.constexpr, WIDTH0: tl.constexpr, B0: tl.constexpr,
           COLUMN0: tl.constexpr, START1: tl.constexpr, WIDTH1: tl.constexpr, B1: tl.constexpr, COLUMN1: tl.constexpr,
           START2: tl.constexpr, WIDTH2: tl.constexpr, B2: tl.constexpr, COLUMN2: tl.constexpr, START3: tl.constexpr,
           WIDTH3: tl.constexpr, B3: tl.constexpr, COLUMN3: tl.constexpr):
    """y [T, N] += h b, in place, for up to four parts of its columns. h f32 [SPLITS, T, H_WIDTH], to be summed.

    Part i: WIDTHi columns from STARTi on, by RANK columns of h from COLUMNi on; its bf16 [RANK, WIDTHi] stands Bi
    elements behind b, which is of slot 0. A block has BLOCK_M tokens and BLOCK_N columns of one part.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    slots = slots_of(adapters, token_seq, sizes, rows)
    slot = next_slot(slots, -1, NUM_SLOTS)
    if slot == NUM_SLOTS:
        return
    end0: tl.constexpr = (WIDTH0 + BLOCK_N - 1) // BLOCK_N
    end1: tl.constexpr = end0 + (WIDTH1 + BLOCK_N - 1) // BLOCK_N
    end2: tl.constexpr = end1 + (WIDTH2 + BLOCK_N - 1) // BLOCK_N
    piece = tl.program_id(1)
    first, second, third = piece < end0, piece < end1, piece < end2
    before = tl.where(first, 0, tl.where(second, end0, tl.where(third, end1, end2)))
    start = tl.where(first, START0, tl.where(second, START1, tl.where(third, START2, START3)))
    width = tl.where(first, WIDTH0, tl.where(second, WIDTH1, tl.where(third, WIDTH2, WIDTH3)))
    offset = tl.where(first, B0, tl.where(second, B1, tl.where(third, B2, B3)))
    column = tl.where(first, COLUMN0, tl.where(second, COLUMN1, tl.where(third, COLUMN2, COLUMN3)))
    n = (piece - before) * BLOCK_N + tl.arange(0, BLOCK_N)
    mine = slots >= 0
    tokens = tl.load(sizes).to(tl.int64)
    kept = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    while slot < NUM_SLOTS:
        matrix = b + slot.to(tl.int64) * SLOT_STRIDE + offset
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(0, RANK, BLOCK_R):
            rank = step + tl.arange(0, BLOCK_R)
            inner = mine[:, None] & (rank < RANK)[None, :]
            values = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
            for split in range(SPLITS):
                values += tl.load(h + (split * tokens + rows)[:, None] * H_WIDTH + column + rank[None, :], mask=inner,
                                  other=0.0)
            weights = tl.load(matrix + rank[:, None] * width + n[None, :],
                              mask=(rank < RANK)[:, None] & (n < width)[None, :], other=0.0)
            acc = dot_wide(values, weights, acc)
        kept = tl.where((slots == slot)[:, None], acc, kept)
        slot = next_slot(slots, slot, NUM_SLOTS)
    place = y + rows.to(tl.int64)[:, None] * N + start + n[None, :]
    inside = mine[:, None] & (n < width)[None, :]
    total = tl.load(place, mask=inside, other=0.0).to(tl.float32) + kept
    tl.store(place, narrow(total, y.dtype.element_ty), mask=inside)
