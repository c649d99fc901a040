"""Expressions over loop indices: what one element of a result is.

An Expr is frozen, hashable and printable; equal loops are equal expressions, and compile once.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..ir.types import Dim, DType, split_dim

_SIGNS = {"add": "+", "sub": "-", "mul": "*"}


@dataclass(frozen=True)
class Expr:
    """op     "const"  the number `value`
           "index"  the loop index of axis `value`
           "extent" a symbol's number; value: (symbol, axis, factor), so that axis is factor · symbol long
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
            case "extent":
                return str(self.value[0])
            case "load":
                return f"in{self.value}[{', '.join(map(str, self.args))}]"
            case "add" | "sub" | "mul" if self.dtype == DType.I32:
                return f"({self.args[0]} {_SIGNS[self.op]} {self.args[1]})"
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


def times(a: Expr, factor: Dim, extents: Extents | None = None) -> Expr:
    """extents: needed for a symbolic factor."""
    number, symbol = split_dim(factor)
    if symbol is None:
        return from_terms(*terms(Expr("mul", (a, const(number)), None, DType.I32)))
    length, (atoms, constant) = extent_of(symbol, extents or {}), terms(a)
    products = {Expr("mul", (atom, length), None, DType.I32): f * number for atom, f in atoms.items()}
    return from_terms({**products, length: constant * number}, 0)


class UnknownExtent(Exception):
    """No axis of the loop tells how many tokens there are."""


def extent_of(symbol: str, extents: Extents) -> Expr:
    for axis, dim in extents.items():
        factor, found = split_dim(dim)
        if found == symbol:
            return Expr("extent", (), (symbol, axis, factor), DType.I32)
    raise UnknownExtent(symbol)


Bounds = tuple[int | None, int | None]


def bounds(expr: Expr, extents: Extents) -> Bounds:
    """(least, largest) value of an integer expression; None where nothing bounds it."""
    if expr.op == "const":
        return int(expr.value), int(expr.value)
    if expr.op == "index":
        extent = extents[expr.value]
        return 0, extent - 1 if isinstance(extent, int) else None
    divisor = _divisor(expr)
    if divisor is not None and expr.op == "mod":
        return 0, divisor - 1
    if divisor is not None:
        low, high = bounds(expr.args[0], extents)
        return None if low is None else low // divisor, None if high is None else high // divisor
    atoms, constant = terms(expr)
    if expr in atoms:  # a value that was loaded, or computed from one
        return None, None
    ends = [_scaled(bounds(atom, extents), factor) for atom, factor in atoms.items()]
    return _total(constant, [low for low, _ in ends]), _total(constant, [high for _, high in ends])


def _scaled(bounds: Bounds, factor: int) -> Bounds:
    low, high = (None if end is None else end * factor for end in bounds)
    return (low, high) if factor > 0 else (high, low)


def _total(constant: int, ends: list[int | None]) -> int | None:
    known = [end for end in ends if end is not None]
    return constant + sum(known) if len(known) == len(ends) else None


def _divisor(expr: Expr) -> int | None:
    """d of an integer x // d or x mod d with a constant d > 0."""
    if expr.op not in ("floor_div", "mod") or expr.dtype != DType.I32 or expr.args[1].op != "const":
        return None
    divisor = int(expr.args[1].value)
    return divisor if divisor > 0 else None


def floor_div(expr: Expr, divisor: Dim, extents: Extents) -> Expr:
    """expr // divisor: multiples of the divisor come out, what is smaller than it vanishes."""
    if isinstance(divisor, str):
        return _by_symbol("floor_div", expr, divisor, extents)
    whole, rest = _divided(expr, divisor)
    if _within(rest, divisor, extents):
        return whole
    coarse, _, grain = _grained(rest, divisor, extents)
    if grain > 1:  # (g·a + b) // (g·c) = a // c
        return add(whole, floor_div(coarse, divisor // grain, extents))
    inner = _divisor(rest)
    if rest.op == "floor_div" and inner is not None:  # (a // b) // c = a // (b·c)
        return add(whole, floor_div(rest.args[0], inner * divisor, extents))
    return add(whole, Expr("floor_div", (rest, const(divisor)), None, DType.I32))


def mod(expr: Expr, divisor: Dim, extents: Extents) -> Expr:
    """expr mod divisor, likewise."""
    if isinstance(divisor, str):
        return _by_symbol("mod", expr, divisor, extents)
    _, rest = _divided(expr, divisor)
    if _within(rest, divisor, extents):
        return rest
    coarse, fine, grain = _grained(rest, divisor, extents)
    if grain > 1:  # (g·a + b) mod (g·c) = g·(a mod c) + b
        return add(times(mod(coarse, divisor // grain, extents), grain), fine)
    return Expr("mod", (rest, const(divisor)), None, DType.I32)


def _by_symbol(op: str, expr: Expr, divisor: Dim, extents: Extents) -> Expr:
    """What was multiplied by the symbol comes out, if what was added to it is smaller than the divisor."""
    number, symbol = split_dim(divisor)
    length, (atoms, constant) = extent_of(str(symbol), extents), terms(expr)
    whole: dict[Expr, int] = {}
    rest: dict[Expr, int] = {}
    for atom, factor in atoms.items():
        multiple = atom.op == "mul" and atom.args[1] == length and factor % number == 0
        (whole if multiple else rest)[atom.args[0] if multiple else atom] = factor // number if multiple else factor
    remainder = from_terms(rest, constant)
    if _below_symbol(remainder, number, str(symbol), extents):
        return from_terms(whole, 0) if op == "floor_div" else remainder
    return Expr(op, (expr, times(length, number)), None, DType.I32)


def _below_symbol(expr: Expr, number: int, symbol: str, extents: Extents) -> bool:
    """Whether 0 <= expr < number · symbol, for a sum of loop indices with positive factors."""
    atoms, most = terms(expr)
    if most < 0 or any(atom.op != "index" or factor < 0 for atom, factor in atoms.items()):
        return False
    slope = 0
    for atom, factor in atoms.items():
        size, found = split_dim(extents[atom.value])
        if found not in (None, symbol):
            return False
        slope += factor * size if found else 0
        most += -factor if found else factor * (size - 1)
    return slope <= number and slope - number + most < 0


def _within(expr: Expr, divisor: int, extents: Extents) -> bool:
    low, high = bounds(expr, extents)
    return low is not None and high is not None and low >= 0 and high < divisor


def _divided(expr: Expr, divisor: int) -> tuple[Expr, Expr]:
    """(whole, rest) with expr = whole · divisor + rest."""
    atoms, constant = terms(expr)
    whole = {atom: factor // divisor for atom, factor in atoms.items() if factor % divisor == 0}
    rest = {atom: factor for atom, factor in atoms.items() if factor % divisor}
    return from_terms(whole, constant // divisor), from_terms(rest, constant % divisor)


def _grained(expr: Expr, divisor: int, extents: Extents) -> tuple[Expr, Expr, int]:
    """(a, b, g) with expr = g·a + b, 0 <= b < g, for the largest such g that divides the divisor; g = 1: none."""
    for grain in sorted({math.gcd(factor, divisor) for factor in terms(expr)[0].values()} - {1}, reverse=True):
        coarse, fine = _divided(expr, grain)
        if _within(fine, grain, extents):
            return coarse, fine, grain
    return expr, ZERO, 1
