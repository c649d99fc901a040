"""mov: registers, constants, addresses, and vectors of parts of a register."""
from __future__ import annotations

from typing import Any

import numpy as np

from .instruction import Code, Instruction, PtxError, Run, Vector, instruction
from .rows import KINDS, last_type, register_width, width_of
from .warp import Warps


@instruction(*[f"mov.{kind}" for kind in KINDS],
             "cvta.param.u64", "cvta.shared.u64", "cvta.to.global.u64", "cvta.to.shared.u64", "cvta.global.u64")
def move(op: Instruction, code: Code) -> Run:
    """Also to and from vectors, the first element being the lowest bits. Addresses are the same in every space."""
    width = width_of(last_type(op))
    to, source = op.operands
    if isinstance(to, Vector):
        return _unpack(to, source, width, code)
    if isinstance(source, Vector):
        return _pack(to, source, width, code)
    d, a = code.target(to, width), code.row(source, width)

    def run(warps: Warps) -> None:
        rows = warps.bits[width]
        np.copyto(rows[d], rows[a], where=warps.mask)
    return run


def _unpack(to: Vector, source: Any, width: int, code: Code) -> Run:
    each = width // len(to.items)
    a, kind = code.row(source, width), f"u{each // 8}"
    targets = [(i, code.target(item, each)) for i, item in enumerate(to.items) if item is not None]
    if any(register_width(item) not in (each, 0) for item in to.items):
        raise PtxError(f"the elements of a {width}-bit register have {each} bits each")

    def run(warps: Warps) -> None:
        parts = warps.bits[width][a].view(kind).reshape(warps.lanes, -1)
        rows = warps.bits[each]
        for i, d in targets:
            np.copyto(rows[d], parts[:, i], where=warps.mask)
    return run


def _pack(to: Any, source: Vector, width: int, code: Code) -> Run:
    each = width // len(source.items)
    d, kind = code.target(to, width), f"u{each // 8}"
    sources = [code.row(item, each) for item in source.items]

    def run(warps: Warps) -> None:
        rows = warps.bits[each]
        parts = np.empty((warps.lanes, len(sources)), kind)
        for i, a in enumerate(sources):
            parts[:, i] = rows[a]
        np.copyto(warps.bits[width][d], parts.view(f"u{width // 8}")[:, 0], where=warps.mask)
    return run
