"""Expressions over loop indices: what one element of a result is.

An Expr is frozen, hashable and printable; equal loops are equal expressions, and compile once.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..ir.types import Dim, DType


@dataclass(frozen=True)
class Expr:
    """op     "const"  the number `value`
           "index"  the loop index of axis `value`
           "load"   element `args` (one index a dimension) of input number `value`
           "pick"   args[0] says where: args[1 + j] for the j-th range of `value`, the ends of the ranges
           else     an elementwise operator; `value` is its attribute, if it has one
    """

    op: str
    args: tuple[Expr, ...] = ()
    value: Any = None
    dtype: DType = DType.F32

    def __str__(self) -> str:
        match self.op:
            case "const":
                return str(self.value)
            case "index":
                return f"i{self.value}"
            case "load":
                return f"in{self.value}[{', '.join(map(str, self.args))}]"
            case "add" | "sub" | "mul" if self.dtype == DType.I32:
                return f"({self.args[0]} {dict(add='+', sub='-', mul='*')[self.op]} {self.args[1]})"
        extra = "" if self.value is None else f"; {getattr(self.value, 'value', self.value)}"
        return f"{self.op}({', '.join(map(str, self.args))}{extra})"

    def walk(self) -> list[Expr]:
        """This expression and all below it."""
        found = [self]
        for arg in self.args:
            found += arg.walk()
        return found

    def mapped(self, function: Callable[[Expr], Expr | None]) -> Expr:
        """The expression with every part for which the function gives another replaced, from the top."""
        new = function(self)
        return new if new is not None else replace(self, args=tuple(arg.mapped(function) for arg in self.args))


def const(value: int | float | bool, dtype: DType = DType.I32) -> Expr:
    return Expr("const", (), value, dtype)


ZERO = const(0)


def index(axis: int) -> Expr:
    return Expr("index", (), axis, DType.I32)


def load(number: int, indices: tuple[Expr, ...], dtype: DType) -> Expr:
    return Expr("load", indices, number, dtype)


# --- index arithmetic: sums of atoms with integer factors ---

Terms = tuple[dict[Expr, int], int]
Extents = Mapping[int, Dim]
"""Loop axis -> its extent; a symbolic one has no upper bound here."""


def terms(expr: Expr) -> Terms:
    """An integer expression as {atom: factor} and a constant."""
    if expr.op == "const":
        return {}, int(expr.value)
    if expr.op in ("add", "sub") and expr.dtype == DType.I32:
        (left, a), (right, b) = terms(expr.args[0]), terms(expr.args[1])
        sign = 1 if expr.op == "add" else -1
        merged = dict(left)
        for atom, factor in right.items():
            merged[atom] = merged.get(atom, 0) + sign * factor
        return {atom: factor for atom, factor in merged.items() if factor}, a + sign * b
    if expr.op == "mul" and expr.dtype == DType.I32:
        for side, other in (expr.args, expr.args[::-1]):
            if other.op == "const":
                atoms, constant = terms(side)
                factor = int(other.value)
                return {atom: f * factor for atom, f in atoms.items() if f * factor}, constant * factor
    return {expr: 1}, 0


def from_terms(atoms: Mapping[Expr, int], constant: int) -> Expr:
    """The inverse of `terms`, in one normal form."""
    parts = [atom if factor == 1 else Expr("mul", (atom, const(factor)), None, DType.I32)
             for atom, factor in sorted(atoms.items(), key=lambda item: (-abs(item[1]), str(item[0]))) if factor]
    if constant or not parts:
        parts.append(const(constant))
    total = parts[0]
    for part in parts[1:]:
        total = Expr("add", (total, part), None, DType.I32)
    return total


def add(a: Expr, b: Expr) -> Expr:
    return from_terms(*terms(Expr("add", (a, b), None, DType.I32)))


def times(a: Expr, factor: int) -> Expr:
    return from_terms(*terms(Expr("mul", (a, const(factor)), None, DType.I32)))


def bounds(expr: Expr, extents: Extents) -> tuple[int, int | None]:
    """(least, largest) value of an index, which is never negative; None: unbounded."""
    if expr.op == "const":
        return int(expr.value), int(expr.value)
    if expr.op == "index":
        extent = extents[expr.value]
        return 0, extent - 1 if isinstance(extent, int) else None
    if expr.op == "mod":
        return 0, int(expr.args[1].value) - 1
    if expr.op == "floor_div":
        low, high = bounds(expr.args[0], extents)
        divisor = int(expr.args[1].value)
        return low // divisor, None if high is None else high // divisor
    atoms, constant = terms(expr)
    if expr in atoms:  # a loaded index, or one that the rules do not take apart
        return 0, None
    low, high = constant, constant if constant is not None else None
    for atom, factor in atoms.items():
        least, most = bounds(atom, extents)
        ends = [least * factor, None if most is None else most * factor]
        if factor < 0:
            ends.reverse()
        if ends[0] is None:
            return 0, None
        low += ends[0]
        high = None if high is None or ends[1] is None else high + ends[1]
    return low, high


def floor_div(expr: Expr, divisor: int, extents: Extents) -> Expr:
    """expr // divisor: multiples of the divisor come out, what is smaller than it vanishes."""
    whole, rest = _divided(expr, divisor)
    low, high = bounds(rest, extents)
    if 0 <= low and high is not None and high < divisor:
        return whole
    if rest.op == "floor_div":  # (a // b) // c = a // (b·c)
        return add(whole, floor_div(rest.args[0], int(rest.args[1].value) * divisor, extents))
    return add(whole, Expr("floor_div", (rest, const(divisor)), None, DType.I32))


def mod(expr: Expr, divisor: int, extents: Extents) -> Expr:
    _, rest = _divided(expr, divisor)
    low, high = bounds(rest, extents)
    if 0 <= low and high is not None and high < divisor:
        return rest
    return Expr("mod", (rest, const(divisor)), None, DType.I32)


def _divided(expr: Expr, divisor: int) -> tuple[Expr, Expr]:
    """(whole, rest) with expr = whole · divisor + rest."""
    atoms, constant = terms(expr)
    whole = {atom: factor // divisor for atom, factor in atoms.items() if factor % divisor == 0}
    rest = {atom: factor for atom, factor in atoms.items() if factor % divisor}
    return from_terms(whole, constant // divisor), from_terms(rest, constant % divisor)
