"""What lanes of a warp tell each other: shfl, vote, redux, match, activemask."""
from __future__ import annotations

from typing import Any

import numpy as np

from .instruction import Code, Instruction, Pair, PtxError, Run, instruction
from .rows import INTEGERS, constant, per_warp, require_whole_warps
from .warp import LANES, Warps

_LANE = np.arange(LANES)


def _check_members(op: Instruction, place: int) -> None:
    """All lanes take part in what Triton writes, or the mask is not looked at."""
    members = constant(op.operands[place])
    if members is None or members & 0xFFFFFFFF != 0xFFFFFFFF:
        raise PtxError(f"{op.opcode} with some lanes of a warp is not supported")


@instruction("shfl.sync")
def shuffle(op: Instruction, code: Code) -> Run:
    """Each lane takes another one's value; where there is none in its segment it keeps its own, and p is false."""
    mode = op.part("up", "down", "bfly", "idx")
    _check_members(op, 4)
    both = op.operands[0]
    first, second = (both.first, both.second) if isinstance(both, Pair) else (both, None)
    d, p = code.target(first, 32), None if second is None else code.row(second, 1)
    a, b, c = (code.row(operand, 32) for operand in op.operands[1:4])

    def run(warps: Warps) -> None:
        require_whole_warps(op, warps)
        rows = warps.bits[32]
        by, limits = (per_warp(rows[row]).astype(np.int64) for row in (b, c))
        clamp, segment = limits & 31, limits >> 8 & 31
        lowest = _LANE & segment
        highest = lowest | (clamp & ~segment)
        by = by & 31
        if mode == "up":
            source = _LANE - by
            inside = source >= highest
        elif mode == "down":
            source = _LANE + by
            inside = source <= highest
        elif mode == "bfly":
            source = _LANE ^ by
            inside = source <= highest
        else:
            source = lowest | (by & ~segment)
            inside = source <= highest
        found = np.take_along_axis(per_warp(rows[a]), np.where(inside, source, _LANE), 1)
        np.copyto(rows[d], found.reshape(-1), where=warps.mask)
        if p is not None:
            np.copyto(warps.bits[1][p], inside.reshape(-1), where=warps.mask)
    return run


def _as_mask(flags: np.ndarray) -> np.ndarray:
    """bool [warps, 32] -> u32 [warps]."""
    return np.packbits(flags, 1, bitorder="little").view(np.uint32)[:, 0]


@instruction("vote.sync")
def vote(op: Instruction, code: Code) -> Run:
    mode = op.part("any", "all", "uni", "ballot")
    _check_members(op, 2)
    d, p = code.target(op.operands[0], 32 if mode == "ballot" else 1), code.row(op.operands[1], 1)

    def run(warps: Warps) -> None:
        require_whole_warps(op, warps)
        flags = per_warp(warps.bits[1][p])
        found: Any
        if mode == "ballot":
            found = _as_mask(flags)
        elif mode == "uni":
            found = flags.all(1) | ~flags.any(1)
        else:
            found = flags.any(1) if mode == "any" else flags.all(1)
        np.copyto(warps.bits[32 if mode == "ballot" else 1][d], np.repeat(found, LANES), where=warps.mask)
    return run


@instruction("activemask.b32")
def active_mask(op: Instruction, code: Code) -> Run:
    d = code.target(op.operands[0], 32)

    def run(warps: Warps) -> None:
        np.copyto(warps.bits[32][d], np.repeat(_as_mask(per_warp(warps.active)), LANES), where=warps.mask)
    return run


@instruction("redux.sync")
def reduce(op: Instruction, code: Code) -> Run:
    """One value of all lanes."""
    name, kind = op.parts[2], op.parts[-1]
    _check_members_register(op)
    ufunc: Any = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
                  "xor": np.bitwise_xor}[name]
    view = INTEGERS.get(kind, "f4")
    if kind == "f32":
        if op.has("NaN"):
            ufunc = np.minimum if name == "min" else np.maximum
        else:
            ufunc = np.fmin if name == "min" else np.fmax
    elif kind not in ("s32", "u32", "b32"):
        raise PtxError(f"unknown instruction {op.opcode}")
    absolute = op.has("abs")
    d, a, members = code.target(op.operands[0], 32), code.row(op.operands[1], 32), code.row(op.operands[2], 32)

    def run(warps: Warps) -> None:
        require_whole_warps(op, warps)
        rows = warps.views[view]
        given = warps.bits[32][members]
        if (given[warps.active] != 0xFFFFFFFF).any():
            raise PtxError(f"{op.opcode} with some lanes of a warp is not supported")
        values = per_warp(rows[a])
        if absolute:
            values = np.abs(values)
        np.copyto(rows[d], np.repeat(ufunc.reduce(values, 1), LANES), where=warps.mask, casting="unsafe")
    return run


def _check_members_register(op: Instruction) -> None:
    if len(op.operands) != 3:
        raise PtxError(f"{op.opcode} has three operands")


@instruction("match.any.sync", "match.all.sync")
def match(op: Instruction, code: Code) -> Run:
    """Which lanes have the same value."""
    width = int(op.opcode[-2:])
    _check_members(op, 2)
    both = op.operands[0]
    first, second = (both.first, both.second) if isinstance(both, Pair) else (both, None)
    d, a = code.target(first, 32), code.row(op.operands[1], width)
    p = None if second is None else code.row(second, 1)
    everyone = op.has("all")

    def run(warps: Warps) -> None:
        require_whole_warps(op, warps)
        values = per_warp(warps.bits[width][a])
        same = values[:, :, None] == values[:, None, :]
        found = np.packbits(same, 2, bitorder="little").view(np.uint32)[:, :, 0]
        if everyone:
            found = np.where(same.all((1, 2))[:, None], found, np.uint32(0))
        np.copyto(warps.bits[32][d], found.reshape(-1), where=warps.mask)
        if p is not None:
            np.copyto(warps.bits[1][p], np.repeat(same.all((1, 2)), LANES), where=warps.mask)
    return run


@instruction("bar.warp.sync")
def warp_barrier(op: Instruction, code: Code) -> Run:
    def run(warps: Warps) -> None:
        require_whole_warps(op, warps)
    return run
