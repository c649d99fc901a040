# mypy: allow-untyped-defs, allow-incomplete-defs
"""Sums and joins of what the ranks of a tensor-parallel engine have: each reads the others' memory.

All ranks run the same launches in the same order, and their memory has the same layout. What a kernel must know of the
others is a table, `peers` i64 [1 + 2 * RANKS]: this rank, the address of each rank's arena, and of each one's signals.
Signals are i32 [blocks, 16], zero before the first launch. A row belongs to a block: how far each rank has come, and in
the last places whether the host has given up (not zero), and how far this rank has come.

Blocks of one number meet, each with those of the other ranks and with no other block of its own: what a block reads or
overwrites of another rank's part must be what the block of that number makes there. Every meeting has a number that
goes up by one; numbers of a rank that is ahead count as well, and they may wrap around. A grid must be small enough
that all of it runs at a time.
"""
import triton
import triton.language as tl

from ..gpu.math import narrow
from ..norm.gpu import store_normalised

_SIGNALS: tl.constexpr = tl.constexpr(16)
_GIVEN_UP: tl.constexpr = tl.constexpr(14)
_REACHED: tl.constexpr = tl.constexpr(15)


@triton.jit
def _signals(peers, rank, RANKS: tl.constexpr):
    """Those of a rank, or of several, for this block."""
    return tl.load(peers + 1 + RANKS + rank).to(tl.pointer_type(tl.int32)) + tl.program_id(0) * _SIGNALS


@triton.jit
def _reached(peers, rank, RANKS: tl.constexpr):
    """The number of the last meeting that this block was at."""
    return tl.load(_signals(peers, rank, RANKS) + _REACHED)


@triton.jit
def _later(number, meetings: tl.constexpr):
    """The number of a later meeting. In the interpreter other sums must not wrap around."""
    return tl.add(number, meetings, sanitize_overflow=False)


@triton.jit
def _meet(peers, rank, number, RANKS: tl.constexpr):
    """Waits until this block has come to meeting `number` on all ranks; what they did before is then seen. Goes on
    without them if the host has given up."""
    tl.debug_barrier()
    others = tl.arange(0, RANKS)
    tl.atomic_store(_signals(peers, others, RANKS) + rank, number, sem="release", scope="sys")
    place = tl.arange(0, _SIGNALS)
    late = True
    while late:
        seen = tl.atomic_load(_signals(peers, rank, RANKS) + place, sem="acquire", scope="sys")
        behind = tl.min(tl.where(place < RANKS, tl.sub(seen, number, sanitize_overflow=False), 0), 0) < 0
        late = behind & (tl.sum(tl.where(place == _GIVEN_UP, seen, 0), 0) == 0)
    tl.debug_barrier()


@triton.jit
def _end(peers, rank, number, RANKS: tl.constexpr):
    """The next launch counts from there."""
    tl.store(_signals(peers, rank, RANKS) + _REACHED, number)


@triton.jit
def _part(place, peers, rank, other, SIZE: tl.constexpr):
    """The same place in another rank's arena; SIZE: bytes of an element."""
    away = (tl.load(peers + 1 + other) - tl.load(peers + 1 + rank)) // SIZE
    return place + tl.multiple_of(away, 16)


@triton.jit
def _parts(place, peers, rank, RANKS: tl.constexpr, SIZE: tl.constexpr):
    """The same place in all ranks' arenas, [RANKS, 1]."""
    away = (tl.load(peers + 1 + tl.arange(0, RANKS)) - tl.load(peers + 1 + rank)) // SIZE
    return place + tl.multiple_of(away, 16)[:, None]


@triton.jit
def _sum(source, peers, rank, at, inside, RANKS: tl.constexpr, SIZE: tl.constexpr):
    """float32, added in the order of the ranks: the same bits wherever it is done."""
    total = tl.load(_part(source, peers, rank, 0, SIZE) + at, mask=inside, other=0.0).to(tl.float32)
    for other in tl.static_range(1, RANKS):
        total += tl.load(_part(source, peers, rank, other, SIZE) + at, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def one_shot(source, destination, peers, sizes, ROWS: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr,
             SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """destination [T, WIDTH] = the sum of all ranks' source [T, WIDTH], rounded once; the two may be one.

    Each rank reads all parts; a block of BLOCK elements. What is written may be what others read: only after the second
    meeting.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    count = tl.load(sizes + ROWS).to(tl.int64) * WIDTH
    if first >= count:
        return
    rank = tl.load(peers)
    number = _reached(peers, rank, RANKS)
    _meet(peers, rank, _later(number, 1), RANKS)
    at = first + tl.arange(0, BLOCK)
    total = _sum(source, peers, rank, at, at < count, RANKS, SIZE)
    _meet(peers, rank, _later(number, 2), RANKS)
    tl.store(destination + at, narrow(total, destination.dtype.element_ty), mask=at < count)
    _end(peers, rank, _later(number, 2), RANKS)


@triton.jit
def one_shot_norm(source, residual, total, weight, y, y_scale, y_factor, y_sum, peers, sizes, ROWS: tl.constexpr,
                  WIDTH: tl.constexpr, RANKS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
                  EPS: tl.constexpr, TO: tl.constexpr, SUMS: tl.constexpr):
    """total = the sum of all ranks' source + residual, y = rms_norm(total), a row a block: what one_shot and the norm
    behind it give, to the bit. total may be residual, not source. y, y_scale, y_factor, y_sum: store_row.

    Nobody else reads what is written here; the second meeting keeps source until all have read it.
    """
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(sizes + ROWS):
        return
    rank = tl.load(peers)
    number = _reached(peers, rank, RANKS)
    inner = tl.arange(0, BLOCK)
    at, inside = row * WIDTH + inner, inner < WIDTH
    before = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    _meet(peers, rank, _later(number, 1), RANKS)
    v = _sum(source, peers, rank, at, inside, RANKS, SIZE)
    v = narrow(v, source.dtype.element_ty).to(tl.float32) + before
    rounded = narrow(v, total.dtype.element_ty)
    tl.store(total + at, rounded, mask=inside)
    store_normalised(rounded.to(tl.float32), weight, None, y, y_scale, y_factor, y_sum, row, WIDTH, BLOCK, EPS, TO,
                     SUMS)
    _meet(peers, rank, _later(number, 2), RANKS)
    _end(peers, rank, _later(number, 2), RANKS)


@triton.jit
def two_shot(source, destination, peers, sizes, ROWS: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr,
             SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """As one_shot, in two halves: of every RANKS pieces of BLOCK elements each rank sums one, and then reads those of
    the others.

    A piece that a rank sums is read by no other before the second meeting, in no rank's memory, so the sum may
    overwrite it; the third keeps what lies in source and destination until all have read it.
    """
    block = tl.program_id(0).to(tl.int64)
    count = tl.load(sizes + ROWS).to(tl.int64) * WIDTH
    groups = (count + RANKS * BLOCK - 1) // (RANKS * BLOCK)
    if block >= groups:
        return
    rank = tl.load(peers)
    number = _reached(peers, rank, RANKS)
    inner = tl.arange(0, BLOCK)
    _meet(peers, rank, _later(number, 1), RANKS)
    for group in range(block, groups, tl.num_programs(0)):
        at = (group * RANKS + rank) * BLOCK + inner
        total = _sum(source, peers, rank, at, at < count, RANKS, SIZE)
        tl.store(destination + at, narrow(total, destination.dtype.element_ty), mask=at < count)
    _meet(peers, rank, _later(number, 2), RANKS)
    others = tl.arange(0, RANKS)[:, None]
    for group in range(block, groups, tl.num_programs(0)):
        at = (group * RANKS + others) * BLOCK + inner[None, :]
        theirs = (at < count) & (others != rank)
        sums = tl.load(_parts(destination, peers, rank, RANKS, SIZE) + at, mask=theirs)
        tl.store(destination + at, sums, mask=theirs)
    _meet(peers, rank, _later(number, 3), RANKS)
    _end(peers, rank, _later(number, 3), RANKS)


@triton.jit
def all_gather(source, destination, peers, sizes, ROWS: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr,
               SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """destination [T, RANKS * WIDTH] = the ranks' source [T, WIDTH] side by side. Nobody else reads destination, which
    does not overlap source; the second meeting keeps source until all have read it."""
    block = tl.program_id(0).to(tl.int64)
    count = tl.load(sizes + ROWS).to(tl.int64) * WIDTH
    pieces = (count + BLOCK - 1) // BLOCK
    if block >= pieces:
        return
    rank = tl.load(peers)
    number = _reached(peers, rank, RANKS)
    others = tl.arange(0, RANKS)[:, None]
    _meet(peers, rank, _later(number, 1), RANKS)
    for piece in range(block, pieces, tl.num_programs(0)):
        at = (piece * BLOCK + tl.arange(0, BLOCK))[None, :]
        parts = tl.load(_parts(source, peers, rank, RANKS, SIZE) + at, mask=at < count)
        to = at // WIDTH * (RANKS * WIDTH) + others * WIDTH + at % WIDTH
        tl.store(destination + to, parts, mask=at < count)
    _meet(peers, rank, _later(number, 2), RANKS)
    _end(peers, rank, _later(number, 2), RANKS)
