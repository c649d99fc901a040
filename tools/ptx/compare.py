"""Comparisons, and what is chosen by them."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .floating import widen
from .instruction import Code, Instruction, Pair, PtxError, Run, instruction
from .rows import last_type, width_of
from .warp import Warps


@instruction("selp")
def select(op: Instruction, code: Code) -> Run:
    kind = last_type(op)
    width = width_of(kind)
    d, p = code.target(op.operands[0], width), code.row(op.operands[3], 1)
    a, b = code.row(op.operands[1], width), code.row(op.operands[2], width)

    def run(warps: Warps) -> None:
        rows = warps.bits[width]
        np.copyto(rows[d], np.where(warps.bits[1][p], rows[a], rows[b]), where=warps.mask)
    return run


_COMPARE: dict[str, Callable[..., Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
_OPPOSITE = {"equ": "ne", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}


def _ordered(name: str) -> Callable[..., Any]:
    """Of floats: those that end in u are true of NaN. ne is false of it, as in PTX and not as in numpy."""
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if name == "ne":
        return lambda a, b: (a < b) | (a > b)
    if name in _OPPOSITE:
        opposite = _ordered(_OPPOSITE[name])
        return lambda a, b: ~opposite(a, b)
    return _COMPARE[name]


@instruction("setp")
def compare(op: Instruction, code: Code) -> Run:
    """p[|q] = a < b [and c]; q is the same of the opposite."""
    parts = op.parts
    if parts[-1] in ("f16x2", "bf16x2", "bf16"):
        return _compare_narrow(op, code)
    kind = last_type(op)
    joined = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}.get(parts[2])
    if len(parts) > 3 and joined is None and "ftz" not in parts:
        raise PtxError(f"unknown instruction {op.opcode}")
    test = _ordered(parts[1]) if kind[0] == "f" else _COMPARE[parts[1]]
    both = op.operands[0]
    first, second = (both.first, both.second) if isinstance(both, Pair) else (both, None)
    width = width_of(kind)
    p, a, b = code.target(first, 1), code.row(op.operands[1], width), code.row(op.operands[2], width)
    q = None if second is None else code.row(second, 1)
    c = code.row(op.operands[3], 1) if joined else 0
    if joined is None and q is None and test in _COMPARE.values():
        def fast(warps: Warps) -> None:
            rows = warps.views[kind]
            test(rows[a], rows[b], out=warps.bits[1][p], where=warps.mask)
        return fast

    def run(warps: Warps) -> None:
        rows, predicates = warps.views[kind], warps.bits[1]
        found = test(rows[a], rows[b])
        opposite = ~found
        if joined is not None:
            found, opposite = joined(found, predicates[c]), joined(opposite, predicates[c])
        np.copyto(predicates[p], found, where=warps.mask)
        if q is not None:
            np.copyto(predicates[q], opposite, where=warps.mask)
    return run


def _compare_narrow(op: Instruction, code: Code) -> Run:
    """setp.lt.f16x2 p|q, a, b: p of the lower halves, q of the upper ones; setp.lt.bf16 p, a, b."""
    name, kind, both = op.parts[1], op.parts[-1], op.operands[0]
    if len(op.parts) != 3 or isinstance(both, Pair) != kind.endswith("x2"):
        raise PtxError(f"unknown instruction {op.opcode}")
    test, width = _ordered(name), 32 if kind.endswith("x2") else 16
    targets = [code.target(item, 1) for item in ((both.first, both.second) if isinstance(both, Pair) else (both,))]
    a, b = (code.row(operand, width) for operand in op.operands[1:])

    def run(warps: Warps) -> None:
        rows = warps.bits[width]
        found = test(widen(rows[a], kind), widen(rows[b], kind))
        for i, target in enumerate(targets):
            np.copyto(warps.bits[1][target], found[i :: len(targets)], where=warps.mask)
    return run
