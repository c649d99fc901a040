"""An instruction as it was parsed, and the registry of what instructions do.

A module adds instructions like this; tools/ptx/machine.py imports all such modules:

    @instruction("mma.sync", "mma.sp")
    def mma(op: Instruction, code: Code) -> Run:
        d, a, b, c = op.operands            # Vector, Vector, Vector, Vector
        shape = op.part("m16n8k16", "m16n8k8")
        def run(warps: Warps) -> None:
            left = [warps.read(register, np.uint32) for register in a.items]
            ...
            warps.write(d.items[0], result)
        return run

The name is a prefix of the opcode that ends at a dot (or is all of it); the longest that fits is taken. The decorated
function is called once for each instruction of a program, and what it returns at each execution. Unless it says
`each=True` it must work for any number of warps side by side (lanes 32 i to 32 i + 31 are warp i, possibly of several
blocks); with `each=True` it is called for one warp after the other (warps.num_warps == 1, all lanes of one block).

A predicate (@%p) is taken care of: what is executed sees it in warps.active, and is not called where no lane is active.
`waits=True`: the function may return True, which says that it did nothing and must be tried again when something else
has happened (of mbarrier.try_wait: instead of a false answer). Programs with such an instruction run each warp alone.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from .warp import Warps

WIDTHS = (1, 8, 16, 32, 64)
"""Bits of the banks of registers; those of 1 bit are predicates (bool)."""


class PtxError(Exception):
    """The program cannot be run, or did what no program may do. The machine adds where."""


@dataclass(frozen=True)
class Register:
    """width: bits; index: which of the registers of that width."""

    name: str
    width: int
    index: int


@dataclass(frozen=True)
class Immediate:
    """A literal: an integer (0f… and 0d… are the bits of a number), or a decimal fraction. A label is the number of
    the instruction behind it."""

    value: int | float

    def bits(self, width: int) -> int:
        if isinstance(self.value, float):
            return int(np.array(self.value, f"<f{width // 8}").view(f"<u{width // 8}"))
        return int(self.value) & ((1 << width) - 1)


@dataclass(frozen=True)
class Special:
    """%tid.x, %ctaid.y, %laneid, …"""

    name: str


@dataclass(frozen=True)
class Symbol:
    """The address of a variable in shared memory, a parameter of the kernel, or a label."""

    name: str


@dataclass(frozen=True)
class Address:
    """[base + offset], or of a tensor map [base, {coordinates}]."""

    base: Operand
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Vector:
    """{a, b, …}; None stands for _, a result that nobody wants."""

    items: tuple[Operand | None, ...]


@dataclass(frozen=True)
class Pair:
    """a|b: two results, as of shfl.sync and elect.sync. None stands for _."""

    first: Operand | None
    second: Operand | None


Operand = Register | Immediate | Special | Symbol | Address | Vector | Pair


@dataclass(frozen=True)
class Predicate:
    register: Register
    negated: bool


@dataclass(frozen=True)
class Instruction:
    """opcode: with all its modifiers, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32". line: in the text, from 1.
    Operands that are `_` are None."""

    opcode: str
    operands: tuple[Operand | None, ...]
    predicate: Predicate | None
    line: int

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")

    def has(self, modifier: str) -> bool:
        return modifier in self.opcode.split(".")

    def part(self, *known: str) -> str:
        """The first modifier that is one of the known. Raises PtxError if there is none."""
        for part in self.opcode.split("."):
            if part in known:
                return part
        raise PtxError(f"{self.opcode}: none of {', '.join(known)} is supported")


Run = Callable[["Warps"], "bool | None"]


class Code(Protocol):
    """What a program's instructions share while they are compiled. proxies: to be set by those that read shared memory
    otherwise than threads do (SharedAccess.check_fenced)."""

    proxies: bool

    def row(self, operand: Operand | None, width: int) -> int:
        """Index of the register of that width that holds the operand: `warps.bits[width][row]` is u8 to u64 [lanes],
        or bool. Constants and special registers have a register too."""

    def target(self, operand: Operand | None, width: int) -> int:
        """The same of a result; of `_` a register that nobody reads."""

    def special(self, name: str, width: int) -> int:
        """Register of what a launch knows: "%tid.x", or "param:" and the name of a parameter."""

    def carry(self) -> int:
        """The predicate that holds the carry of additions of several words."""


Compile = Callable[[Instruction, Code], Run]


@dataclass(frozen=True)
class Meaning:
    compile: Compile
    each: bool
    waits: bool


_MEANINGS: dict[str, Meaning] = {}


def instruction(*names: str, each: bool = False, waits: bool = False) -> Callable[[Compile], Compile]:
    """Says what the instructions with these names do; see above."""
    def add(function: Compile) -> Compile:
        for name in names:
            assert name not in _MEANINGS, f"{name} is there already"
            _MEANINGS[name] = Meaning(function, each, waits)
        return function
    return add


def meaning(opcode: str) -> Meaning:
    """Raises PtxError if nobody has said what the instruction does."""
    name = opcode
    while name:
        if name in _MEANINGS:
            return _MEANINGS[name]
        name = name.rpartition(".")[0]
    raise PtxError(f"unknown instruction {opcode}")
