"""Registers of whole warps at once: what matrix instructions read and write."""
from __future__ import annotations

import numpy as np

from .instruction import Code, Instruction, Operand, PtxError, Vector
from .warp import LANES, Warps


def rows_of(code: Code, operand: Operand | None, op: Instruction) -> np.ndarray:
    """Indices of the 32-bit registers of a vector operand, or of a single one."""
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if not items or any(item is None for item in items):
        raise PtxError(f"{op.opcode}: {operand} is no vector of registers")
    return np.array([code.row(item, 32) for item in items])


def gather(warps: Warps, rows: np.ndarray) -> np.ndarray:
    """u32 [warps, registers, 32], contiguous."""
    found = warps.file[32][rows].reshape(len(rows), warps.num_warps, LANES)
    return np.ascontiguousarray(found.transpose(1, 0, 2))


def scatter(warps: Warps, rows: np.ndarray, values: np.ndarray) -> None:
    """values: 32-bit [warps, registers, 32], to the active lanes."""
    laid = values.view(np.uint32).transpose(1, 0, 2).reshape(len(rows), warps.lanes)
    if warps.mask is not True:
        laid = np.where(warps.mask, laid, warps.file[32][rows])
    warps.file[32][rows] = laid


def check_whole(warps: Warps, op: Instruction) -> None:
    """Raises PtxError where only some lanes of a warp are active, which .aligned forbids."""
    if warps.mask is True:
        return
    active = warps.mask.reshape(-1, LANES)
    if (active.any(1) != active.all(1)).any():
        raise PtxError(f"{op.opcode}: some lanes of a warp are not active")
