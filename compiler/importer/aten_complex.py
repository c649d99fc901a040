"""Complex numbers, which some models rotate their queries with, as pairs of real values."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx

from ..ir.graph import Operand
from .conversion import CONVERSIONS, Context, Conversion, operator_name

COMPLEX_CONVERSIONS: dict[str, Conversion] = {}


@dataclass(frozen=True)
class Complex:
    """A complex value of the traced program: the names of its real and imaginary part, both of its shape."""

    real: Operand
    imaginary: Operand


def _complex(*names: str) -> Any:
    def register(conversion: Conversion) -> Conversion:
        COMPLEX_CONVERSIONS.update(dict.fromkeys(names, conversion))
        return conversion
    return register


def convert_complex(c: Context, node: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator that takes or gives complex values. What only moves elements moves both parts."""
    name = operator_name(node)
    if name in COMPLEX_CONVERSIONS:
        return COMPLEX_CONVERSIONS[name](c, node, *args, **kwargs)
    if name not in _MOVES:
        raise c.refuse("this operator has no conversion for complex numbers")
    parts = [CONVERSIONS[name](c, node, *[getattr(a, part) if isinstance(a, Complex) else a for a in args], **kwargs)
             for part in ("real", "imaginary")]
    return Complex(*parts)


_MOVES = ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze.dims", "permute", "transpose.int", "expand",
          "slice.Tensor", "select.int", "clone", "alias", "index.Tensor", "index_select")


@_complex("polar")
def _polar(c: Context, node: torch.fx.Node, length: Operand, angle: Operand) -> Complex:
    return Complex(c.emit("mul", length, c.emit("cos", angle)), c.emit("mul", length, c.emit("sin", angle)))


@_complex("complex")
def _pair(c: Context, node: torch.fx.Node, real: Operand, imaginary: Operand) -> Complex:
    return Complex(real, imaginary)


@_complex("view_as_complex", "view_as_complex_copy")
def _view_as_complex(c: Context, node: torch.fx.Node, x: Operand) -> Complex:
    """[.., 2] -> complex [..]."""
    shape = c.shape(x)
    last = len(shape) - 1
    return Complex(*(c.emit("reshape", c.emit("slice", x, dim=last, start=i, stop=i + 1, step=1), shape=shape[:-1])
                     for i in (0, 1)))


@_complex("view_as_real", "view_as_real_copy")
def _view_as_real(c: Context, node: torch.fx.Node, z: Complex) -> str:
    """complex [..] -> [.., 2]."""
    shape = (*c.shape(z.real), 1)
    return c.emit("cat", c.emit("reshape", z.real, shape=shape), c.emit("reshape", z.imaginary, shape=shape),
                  dim=len(shape) - 1)


@_complex("mul.Tensor")
def _mul(c: Context, node: torch.fx.Node, a: Complex | Operand, b: Complex | Operand) -> Complex:
    if not isinstance(a, Complex):
        a, b = b, a
    assert isinstance(a, Complex)
    if not isinstance(b, Complex):
        return Complex(c.emit("mul", a.real, b), c.emit("mul", a.imaginary, b))
    return Complex(
        c.emit("sub", c.emit("mul", a.real, b.real), c.emit("mul", a.imaginary, b.imaginary)),
        c.emit("add", c.emit("mul", a.real, b.imaginary), c.emit("mul", a.imaginary, b.real)))


@_complex("real", "imag")
def _part(c: Context, node: torch.fx.Node, z: Complex) -> Operand:
    return z.real if operator_name(node) == "real" else z.imaginary
