"""ldmatrix, stmatrix, movmatrix: 8 × 8 matrices of 16 bits between shared memory and the lanes of a warp.

Lanes 8 i to 8 i + 7 point to the rows of matrix i, 16 bytes each. Register i of a lane holds elements 2 × (lane % 4)
and the one behind of row lane / 4 of matrix i; with .trans, of its column lane / 4. The forms of 8, 6 and 4 bits
are not supported. Source: PTX ISA, "ldmatrix", "stmatrix", "movmatrix".
"""
from __future__ import annotations

import numpy as np

from .instruction import Code, Instruction, PtxError, Run, instruction
from .tensor_registers import check_whole, gather, rows_of, scatter
from .warp import LANES, Warps

_COUNTS = {"x1": 1, "x2": 2, "x4": 4}


def spread_rows(rows: np.ndarray, transposed: bool) -> np.ndarray:
    """rows: u8 [warps, matrices, 8, 16] -> registers u32 [warps, matrices, 32]."""
    matrices = np.ascontiguousarray(rows).view(np.uint16)
    if transposed:
        matrices = np.ascontiguousarray(matrices.swapaxes(-1, -2))
    return matrices.view(np.uint32).reshape(*rows.shape[:2], LANES)


def collect_rows(registers: np.ndarray, transposed: bool) -> np.ndarray:
    """registers: u32 [warps, matrices, 32] -> rows u8 [warps, matrices, 8, 16]."""
    matrices = np.ascontiguousarray(registers).view(np.uint16).reshape(*registers.shape[:2], 8, 8)
    if transposed:
        matrices = np.ascontiguousarray(matrices.swapaxes(-1, -2))
    return matrices.view(np.uint8)


@instruction("ldmatrix.sync")
def ldmatrix(op: Instruction, code: Code) -> Run:
    count, transposed = _form(op)
    d, source = rows_of(code, op.operands[0], op), op.operands[1]
    _check_count(op, d, count)

    def run(warps: Warps) -> None:
        check_whole(warps, op)
        rows = warps.load_shared(_addresses(warps.address(source), count), 16)
        held = rows.reshape(warps.num_warps, LANES, 16)[:, : 8 * count].reshape(warps.num_warps, count, 8, 16)
        scatter(warps, d, spread_rows(held, transposed))
    return run


@instruction("stmatrix.sync")
def stmatrix(op: Instruction, code: Code) -> Run:
    count, transposed = _form(op)
    target, d = op.operands[0], rows_of(code, op.operands[1], op)
    _check_count(op, d, count)

    def run(warps: Warps) -> None:
        check_whole(warps, op)
        rows = collect_rows(gather(warps, d), transposed).reshape(warps.num_warps, 8 * count, 16)
        repeated = rows[:, np.arange(LANES) % (8 * count)].reshape(warps.lanes, 16)
        warps.store_shared(_addresses(warps.address(target), count), repeated)
    return run


@instruction("movmatrix.sync")
def movmatrix(op: Instruction, code: Code) -> Run:
    d, a = rows_of(code, op.operands[0], op), rows_of(code, op.operands[1], op)
    if not (op.has("m8n8") and op.has("trans") and op.has("b16")):
        raise PtxError(f"{op.opcode}: only m8n8.trans.b16 is supported")

    def run(warps: Warps) -> None:
        check_whole(warps, op)
        scatter(warps, d, spread_rows(collect_rows(gather(warps, a), False), True))
    return run


def _form(op: Instruction) -> tuple[int, bool]:
    """Number of matrices, whether they are transposed."""
    if not (op.has("m8n8") and op.has("b16")):
        raise PtxError(f"{op.opcode}: only m8n8 of b16 is supported")
    return _COUNTS[op.part(*_COUNTS)], op.has("trans")


def _check_count(op: Instruction, rows: np.ndarray, count: int) -> None:
    if len(rows) != count:
        raise PtxError(f"{op.opcode}: {len(rows)} registers, expected {count}")


def _addresses(address: np.ndarray, count: int) -> np.ndarray:
    """Only the first 8 × count lanes' addresses count: the others repeat them."""
    return address.reshape(-1, LANES)[:, np.arange(LANES) % (8 * count)].reshape(-1)
