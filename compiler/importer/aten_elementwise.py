"""Conversions of elementwise ATen operators."""
from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx

from ..ir.graph import Operand
from ..ir.types import DType
from .conversion import INT32_MAX, Context, aten, dtype_of, result_type

_UNARY = {"neg": "neg", "abs": "abs", "exp": "exp", "log": "log", "sqrt": "sqrt", "rsqrt": "rsqrt",
          "reciprocal": "reciprocal", "sin": "sin", "cos": "cos", "tanh": "tanh", "sigmoid": "sigmoid", "erf": "erf",
          "floor": "floor", "ceil": "ceil", "round": "round", "trunc": "trunc", "sign": "sign", "silu": "silu",
          "log1p": "log1p", "expm1": "expm1", "logical_not": "logical_not"}

for _name, _op in _UNARY.items():
    @aten(_name)
    def _unary(c: Context, node: torch.fx.Node, x: Operand, _op: str = _op) -> str:
        return c.emit(_op, x)


@aten("bitwise_not")
def _bitwise_not(c: Context, node: torch.fx.Node, x: Operand) -> str:
    if c.type(x).dtype != DType.BOOL:
        raise c.refuse("bits of integers are not supported")
    return c.emit("logical_not", x)


@aten("gelu")
def _gelu(c: Context, node: torch.fx.Node, x: Operand, approximate: str = "none") -> str:
    return c.emit("gelu", x, approximate=approximate)


@aten("softplus")
def _softplus(c: Context, node: torch.fx.Node, x: Operand, beta: float = 1, threshold: float = 20) -> str:
    """Above the threshold torch returns x itself, which differs from softplus by less than f32 can show."""
    if beta == 1:
        return c.emit("softplus", x)
    return c.emit("div", c.emit("softplus", c.emit("mul", x, float(beta))), float(beta))


@aten("relu")
def _relu(c: Context, node: torch.fx.Node, x: Operand) -> str:
    return c.emit("maximum", x, _zero(c, x))


def _zero(c: Context, x: Operand) -> float:
    return 0.0 if c.type(x).dtype.is_float else 0


@aten("leaky_relu")
def _leaky_relu(c: Context, node: torch.fx.Node, x: Operand, slope: float = 0.01) -> str:
    return c.emit("where", c.emit("gt", x, 0.0), x, c.emit("mul", x, float(slope)))


@aten("elu")
def _elu(c: Context, node: torch.fx.Node, x: Operand, alpha: float = 1, scale: float = 1, input_scale: float = 1,
         ) -> str:
    negative = c.emit("mul", c.emit("expm1", c.emit("mul", x, float(input_scale))), float(alpha))
    return c.emit("mul", c.emit("where", c.emit("gt", x, 0.0), x, negative), float(scale))


@aten("clamp", "clamp.Tensor", "hardtanh")
def _clamp(c: Context, node: torch.fx.Node, x: Operand, least: Operand | None = None, most: Operand | None = None,
           **kwargs: Any) -> str:
    low, high = kwargs.get("min_val", kwargs.get("min", least)), kwargs.get("max_val", kwargs.get("max", most))
    if "hardtanh" in str(node.target):
        low, high = (-1.0 if low is None else low), (1.0 if high is None else high)
    if low is not None:
        x = c.emit("maximum", x, number(c, low, x))
    if high is not None:
        x = c.emit("minimum", x, number(c, high, x))
    assert isinstance(x, str)
    return x


@aten("clamp_min", "clamp_min.Tensor")
def _clamp_min(c: Context, node: torch.fx.Node, x: Operand, least: Operand) -> str:
    return c.emit("maximum", x, number(c, least, x))


@aten("clamp_max", "clamp_max.Tensor")
def _clamp_max(c: Context, node: torch.fx.Node, x: Operand, most: Operand) -> str:
    return c.emit("minimum", x, number(c, most, x))


def number(c: Context, operand: Operand, like: Operand) -> Operand:
    """A literal for arithmetic with `like`: a float where that is one; an integer that i32 holds."""
    if isinstance(operand, str):
        return operand
    if c.type(like).dtype.is_float:
        return float(operand)
    if isinstance(operand, int) and abs(operand) > INT32_MAX:
        return int(math.copysign(INT32_MAX, operand))
    return operand


def _register_binary(op: str, *names: str) -> None:
    @aten(*names)
    def binary(c: Context, node: torch.fx.Node, a: Operand, b: Operand) -> str:
        x, y = operands(c, a, b)
        return c.emit(op, x, y)


def operands(c: Context, a: Operand, b: Operand) -> tuple[Operand, Operand]:
    """Literals adapted to the other operand; booleans that are counted become integers."""
    types = [c.type(o).dtype for o in (a, b) if isinstance(o, str)]
    if types and all(t == DType.BOOL for t in types) and not (isinstance(a, bool) or isinstance(b, bool)):
        a, b = ((c.cast(o, DType.I32) if isinstance(o, str) else o) for o in (a, b))
    return (number(c, a, b) if isinstance(b, str) else a), (number(c, b, a) if isinstance(a, str) else b)


for _op, _names in {
    "mul": ("mul.Tensor", "mul.Scalar"),
    "maximum": ("maximum",),
    "minimum": ("minimum",),
    "floor_div": ("floor_divide", "floor_divide.Scalar"),
    "mod": ("remainder.Tensor", "remainder.Scalar"),
}.items():
    _register_binary(_op, *_names)


@aten("eq.Tensor", "eq.Scalar", "ne.Tensor", "ne.Scalar", "lt.Tensor", "lt.Scalar", "le.Tensor", "le.Scalar",
      "gt.Tensor", "gt.Scalar", "ge.Tensor", "ge.Scalar")
def _compare(c: Context, node: torch.fx.Node, a: Operand, b: Operand) -> str:
    op = str(node.target).split(".")[1]
    return c.emit(op, a, b)


@aten("add.Tensor", "add.Scalar")
def _add(c: Context, node: torch.fx.Node, a: Operand, b: Operand, alpha: float = 1) -> str:
    return _sum(c, "add", a, b, alpha)


@aten("sub.Tensor", "sub.Scalar")
def _sub(c: Context, node: torch.fx.Node, a: Operand, b: Operand, alpha: float = 1) -> str:
    return _sum(c, "sub", a, b, alpha)


@aten("rsub.Scalar", "rsub.Tensor")
def _rsub(c: Context, node: torch.fx.Node, a: Operand, b: Operand, alpha: float = 1) -> str:
    return _sum(c, "sub", b, a, alpha)


def _sum(c: Context, op: str, a: Operand, b: Operand, alpha: float) -> str:
    if alpha != 1:
        b = c.emit("mul", b, alpha) if isinstance(b, str) else b * alpha
    x, y = operands(c, a, b)
    return c.emit(op, x, y)


@aten("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode")
def _div(c: Context, node: torch.fx.Node, a: Operand, b: Operand, rounding_mode: str | None = None) -> str:
    if rounding_mode is None:
        return c.emit("div", c.as_float(a), float(b) if not isinstance(b, str) else c.as_float(b))
    x, y = operands(c, a, b)
    if result_type(c, node).dtype.is_float:
        return c.emit("floor" if rounding_mode == "floor" else "trunc", c.emit("div", x, y))
    if rounding_mode == "floor":
        return c.emit("floor_div", x, y)
    return c.cast(c.emit("trunc", c.emit("div", c.as_float(x), c.as_float(y))), DType.I32)


@aten("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")
def _pow(c: Context, node: torch.fx.Node, a: Operand, b: Operand) -> str:
    """Whole exponents stay integers: pow(x, 2) is a square."""
    if isinstance(b, float) and b.is_integer():
        b = int(b)
    return c.emit("pow", float(a) if isinstance(a, int) and result_type(c, node).dtype.is_float else a, b)


@aten("logical_and", "bitwise_and.Tensor", "bitwise_and.Scalar", "logical_or", "bitwise_or.Tensor",
      "bitwise_or.Scalar", "logical_xor", "bitwise_xor.Tensor")
def _logical(c: Context, node: torch.fx.Node, a: Operand, b: Operand) -> str:
    name = str(node.target)
    if "bitwise" in name and any(c.type(o).dtype != DType.BOOL for o in (a, b)):
        raise c.refuse("bits of integers are not supported")
    return c.emit("ne" if "xor" in name else "logical_and" if "and" in name else "logical_or", a, b)


@aten("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def _where(c: Context, node: torch.fx.Node, condition: Operand, a: Operand, b: Operand) -> str:
    return c.emit("where", condition, *operands(c, a, b))


@aten("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(c: Context, node: torch.fx.Node, x: Operand, mask: Operand, value: Operand) -> str:
    return c.emit("where", mask, number(c, value, x), x)


@aten("_to_copy", "to.dtype", "to.dtype_layout", "type_as")
def _to_copy(c: Context, node: torch.fx.Node, x: Operand, *_: Any, dtype: torch.dtype | None = None,
             **kwargs: Any) -> str:
    old, new = c.type(x).dtype, dtype_of(node.meta["val"].dtype)
    if new == DType.BOOL and old != DType.BOOL:
        return c.emit("ne", x, _zero(c, x))
    return c.cast(x, new)


@aten("isnan")
def _isnan(c: Context, node: torch.fx.Node, x: Operand) -> str:
    return c.emit("ne", x, x)


@aten("isinf")
def _isinf(c: Context, node: torch.fx.Node, x: Operand) -> str:
    return c.emit("eq", c.emit("abs", x), math.inf)
