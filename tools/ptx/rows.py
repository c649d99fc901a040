"""What most instructions are: a function of rows of registers, lane by lane."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .instruction import Code, Instruction, PtxError, Register, Run
from .warp import Warps

INTEGERS = {f"{letter}{width}": f"{'i' if letter == 's' else 'u'}{width // 8}"
            for letter in "sub" for width in (8, 16, 32, 64)}
"""PTX's type -> numpy's; those of bits are unsigned."""
FLOATS = {"f16": "f2", "f32": "f4", "f64": "f8"}
KINDS = INTEGERS | FLOATS | {"pred": "b1"}


def width_of(kind: str) -> int:
    return 1 if kind == "b1" else 8 * int(kind[1])


def last_type(op: Instruction) -> str:
    """The numpy type of the last modifier. Raises PtxError if it is none."""
    name = op.opcode.rpartition(".")[2]
    if name not in KINDS:
        raise PtxError(f"{op.opcode}: type {name!r} is not supported")
    return KINDS[name]


def apply(op: Instruction, code: Code, ufunc: Any, kind: str) -> Run:
    """d = ufunc(a, …), all of one type."""
    width = width_of(kind)
    d = code.target(op.operands[0], width)
    sources = [code.row(operand, width) for operand in op.operands[1:]]
    if len(sources) == 1:
        (a,) = sources

        def unary(warps: Warps) -> None:
            rows = warps.views[kind]
            ufunc(rows[a], out=rows[d], where=warps.mask)
        return unary
    a, b = sources

    def binary(warps: Warps) -> None:
        rows = warps.views[kind]
        ufunc(rows[a], rows[b], out=rows[d], where=warps.mask)
    return binary


def compute(op: Instruction, code: Code, function: Callable[..., Any], result: str, *kinds: str) -> Run:
    """d = function(a, …). kinds: of the sources; the function gives an array of the type `result`, or of one that
    numpy casts to it without complaint."""
    d = code.target(op.operands[0], width_of(result))
    sources = [(kind, code.row(operand, width_of(kind)))
               for kind, operand in zip(kinds, op.operands[1:], strict=True)]
    if len(sources) == 2:
        (first, a), (second, b) = sources

        def two(warps: Warps) -> None:
            views = warps.views
            np.copyto(views[result][d], function(views[first][a], views[second][b]), where=warps.mask, casting="unsafe")
        return two

    def run(warps: Warps) -> None:
        views = warps.views
        found = function(*[views[kind][row] for kind, row in sources])
        np.copyto(views[result][d], found, where=warps.mask, casting="unsafe")
    return run


def register_width(operand: Any) -> int:
    """Bits of a register; of anything else 0."""
    return operand.width if isinstance(operand, Register) else 0


def constant(operand: Any) -> int | None:
    """The value of a literal, else None."""
    value = getattr(operand, "value", None)
    return value if isinstance(value, int) else None


def per_warp(row: np.ndarray) -> np.ndarray:
    """[lanes] -> [warps, 32]."""
    return row.reshape(-1, 32)


def require_whole_warps(op: Instruction, warps: Warps) -> np.ndarray:
    """bool [warps]: those that execute it. Raises PtxError if lanes of a warp have parted."""
    if warps.mask is True:
        return np.ones(warps.num_warps, bool)
    active = per_warp(warps.mask)
    some: np.ndarray = np.any(active, axis=1)
    every: np.ndarray = np.all(active, axis=1)
    if (some != every).any():
        raise PtxError(f"{op.opcode} wants all lanes of a warp; only some are here")
    return every
