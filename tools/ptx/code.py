"""A program made ready to run: every instruction a function, gathered to stretches without jumps.

Constants, special registers and parameters get registers of their own, which are filled before a group of warps starts:
an instruction's function sees nothing but rows of registers.
"""
from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from .instruction import (
    Immediate,
    Instruction,
    Operand,
    Predicate,
    PtxError,
    Register,
    Run,
    Special,
    Symbol,
    meaning,
)
from .memory import PARAM_BASE
from .parser import Program
from .warp import Warps

ENDS = ("bra", "ret", "exit", "bar", "barrier", "trap")
_PARAM_ALIGNMENT = 128


@dataclass(frozen=True)
class Step:
    """An instruction and what it does."""

    op: Instruction
    run: Run


@dataclass
class Stretch:
    """Instructions that are executed one after the other, then one that the machine has to look at: a jump, a barrier,
    the end, an atomic operation, or one that may have to wait. last is None where a label follows; next: what stands
    behind it all. executions: by how many warps."""

    steps: list[Step]
    last: Instruction | None
    wait: Run | None
    next: int
    executions: int = 0


@dataclass
class Code:
    """rows: width -> number of registers. constants: (width, row) -> bits; specials: name -> [(width, row)]."""

    program: Program
    rows: dict[int, int] = field(init=False)
    constants: dict[tuple[int, int], int] = field(default_factory=dict)
    specials: dict[str, dict[int, int]] = field(default_factory=dict)
    stretches: dict[int, Stretch] = field(default_factory=dict)
    param_offsets: dict[str, int] = field(default_factory=dict)
    waits: bool = False
    proxies: bool = False
    """Whether units of their own, which copy or multiply, read shared memory: then fences are looked for."""

    def __post_init__(self) -> None:
        self.rows = dict(self.program.registers)
        self._known: dict[tuple[int, int], int] = {}
        self._nobody: dict[int, int] = {}
        self._carry: int | None = None
        offset = 0
        for param in self.program.params:
            offset = -(-offset // _PARAM_ALIGNMENT) * _PARAM_ALIGNMENT
            self.param_offsets[param.name] = offset
            offset += param.size
        self._compile()

    def row(self, operand: Operand | None, width: int) -> int:
        """As the protocol in instruction.py says."""
        if isinstance(operand, Register):
            if operand.width != width:
                raise PtxError(f"{operand.name} has {operand.width} bits, {width} are needed")
            return operand.index
        if isinstance(operand, Immediate):
            return self._constant(width, operand.bits(width))
        if isinstance(operand, Special):
            return self.special(operand.name, width)
        if isinstance(operand, Symbol):
            if operand.name in self.program.data:
                return self.special(f"param:{operand.name}", width)
            return self._constant(width, self._address(operand.name))
        raise PtxError(f"{operand} is no value")

    def target(self, operand: Operand | None, width: int) -> int:
        if operand is not None:
            return self.row(operand, width)
        if width not in self._nobody:
            self._nobody[width] = self._new(width)
        return self._nobody[width]

    def carry(self) -> int:
        if self._carry is None:
            self._carry = self._new(1)
        return self._carry

    def special(self, name: str, width: int) -> int:
        """name: "%tid.x", or "param:" and the name of one, or of a table of the program."""
        known = self.specials.setdefault(name, {})
        if width not in known:
            known[width] = self._new(width)
        return known[width]

    def _new(self, width: int) -> int:
        self.rows[width] += 1
        return self.rows[width] - 1

    def _constant(self, width: int, bits: int) -> int:
        if (width, bits) not in self._known:
            row = self._known[width, bits] = self._new(width)
            self.constants[width, row] = bits
        return self._known[width, bits]

    def _address(self, name: str) -> int:
        for places in (self.program.shared, self.program.local):
            if name in places:
                return places[name]
        if name in self.param_offsets:
            return PARAM_BASE + self.param_offsets[name]
        raise PtxError(f"there is no variable {name}")

    # stretches

    def _compile(self) -> None:
        _import_meanings()
        steps = [self._step(op) for op in self.program.instructions]
        begins = sorted({0, *(self._target(op) for op in self.program.instructions if _name(op) == "bra"),
                         *(at + 1 for at, op in enumerate(self.program.instructions) if self._stops(op))})
        for begin, limit in zip(begins, [*begins[1:], len(steps)], strict=True):
            if begin >= len(steps):
                continue
            last = self.program.instructions[limit - 1] if limit > begin else None
            if last is not None and self._stops(last):
                wait = steps[limit - 1]
                self.stretches[begin] = Stretch(
                    [step for step in steps[begin : limit - 1] if step], last, wait.run if wait else None, limit)
            else:
                self.stretches[begin] = Stretch([step for step in steps[begin:limit] if step], None, None, limit)

    def _stops(self, op: Instruction) -> bool:
        return _is_end(op) or is_atomic(op) or meaning(op.opcode).waits

    def _target(self, op: Instruction) -> int:
        assert isinstance(op.operands[0], Immediate)
        return int(op.operands[0].value)

    def _step(self, op: Instruction) -> Step | None:
        """None for what the machine does itself."""
        if _is_end(op):
            return None
        try:
            found = meaning(op.opcode)
            run = found.compile(op, self)
        except PtxError as error:
            raise PtxError(f"line {op.line}: {error}") from None
        self.waits |= found.waits
        if found.each:
            run = _one_by_one(run)
        return Step(op, _predicated(run, op.predicate) if op.predicate else run)


def _name(op: Instruction) -> str:
    return op.opcode.partition(".")[0]


def is_atomic(op: Instruction | None) -> bool:
    """Others may come in between before and after it."""
    return op is not None and _name(op) in ("atom", "red")


def _is_end(op: Instruction) -> bool:
    return _name(op) in ENDS and not op.opcode.startswith("bar.warp")


def _predicated(run: Run, predicate: Predicate) -> Run:
    row, negated = predicate.register.index, predicate.negated

    def only_where(warps: Warps) -> bool | None:
        before = warps.mask
        mask = np.logical_not(warps.bits[1][row]) if negated else warps.bits[1][row].copy()
        if before is not True:
            mask &= before
        if not mask.any():
            return None
        warps.mask = True if mask.all() else mask
        try:
            return run(warps)
        finally:
            warps.mask = before
    return only_where


def _one_by_one(run: Run) -> Run:
    def each(warps: Warps) -> bool | None:
        if warps.num_warps == 1:
            return run(warps)
        for i, one in enumerate(warps.alone):
            one.mask = True
            if warps.mask is not True:
                mask = warps.mask[32 * i : 32 * i + 32]
                if not mask.any():
                    continue
                one.mask = True if mask.all() else mask
            if run(one):
                raise PtxError("an instruction waits that is not registered as one that may")
        return None
    return each


@cache
def _import_meanings() -> None:
    """Every module of this folder that says what instructions do."""
    package = importlib.import_module(__package__)
    for found in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{__package__}.{found.name}")
