"""The table of conversions from ATen operators, and what each of them is given.

A conversion is a function `(c: Context, node: torch.fx.Node, *args, **kwargs)`, registered under the operator's ATen
name; arguments that are values come as names in the graph, sizes as dimensions. It returns the name of the result,
or a tuple of names.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from ..ir.graph import Operand
from ..ir.types import Dim, DType, TensorType, make_dim
from .builder import GraphBuilder
from .errors import ImportRefused
from .simplify import emit, emit_all

Conversion = Callable[..., Any]
CONVERSIONS: dict[str, Conversion] = {}

SYMBOL = "T"
INT32_MAX = 2**31 - 1


def aten(*names: str) -> Callable[[Conversion], Conversion]:
    """Register the decorated conversion for these operators ("add.Tensor")."""
    def register(conversion: Conversion) -> Conversion:
        for name in names:
            assert name not in CONVERSIONS, f"{name} has two conversions"
            CONVERSIONS[name] = conversion
        return conversion
    return register


@dataclass(frozen=True)
class Symbolic:
    """A size that depends on the number of tokens. It may say how large something is, not take part in arithmetic."""

    dim: Dim


@dataclass
class Context:
    """node: the one being converted.

    max_seq_len: the longest sequence that will be served. Some models scale their positions by the longest one at
    hand; an engine, whose steps hold many sequences, always takes the limit.
    """

    builder: GraphBuilder
    max_seq_len: int | None = None
    node: torch.fx.Node | None = None
    warnings: list[str] = field(default_factory=list)

    def emit(self, op: str, *inputs: Operand, **attrs: Any) -> str:
        return emit(self.builder, op, inputs, **attrs)

    def emit_all(self, op: str, *inputs: Operand, **attrs: Any) -> tuple[str, ...]:
        return emit_all(self.builder, op, inputs, **attrs)

    def type(self, operand: Operand) -> TensorType:
        return self.builder.type_of(operand)

    def shape(self, operand: Operand) -> tuple[Dim, ...]:
        return self.builder.type_of(operand).shape

    def is_constant(self, operand: Operand) -> bool:
        return isinstance(operand, str) and operand in self.builder.constants

    def cast(self, operand: Operand, dtype: DType) -> str:
        return self.emit("cast", operand, dtype=dtype)

    def as_float(self, operand: Operand) -> Operand:
        """Integers and booleans widened to f32."""
        return operand if self.type(operand).dtype == DType.F32 else self.cast(operand, DType.F32)

    def refuse(self, reason: str) -> ImportRefused:
        """The error to raise: names operator, module and source line."""
        operator = operator_name(self.node) if self.node is not None else "?"
        return ImportRefused(f"{operator}: {reason}\n  in {self.builder.origin}")


def operator_name(node: torch.fx.Node) -> str:
    """aten.add.Tensor -> "add.Tensor"; the default overload's name is left out."""
    if not hasattr(node.target, "_schema"):  # a function of Python's, on sizes
        return str(getattr(node.target, "__name__", node.target))
    return str(node.target).removeprefix("aten.").removesuffix(".default")


def dim_of(size: int | torch.SymInt, context: Context) -> Dim:
    """A size of the traced program as a dimension: a number, "T", or "k*T"."""
    if isinstance(size, int):
        return size
    expr = size.node.expr
    if expr.is_Integer:
        return int(expr)
    symbols = list(expr.free_symbols)
    factor, rest = expr.as_coeff_Mul()
    if len(symbols) == 1 and rest == symbols[0] and factor.is_Integer and factor > 0:
        return make_dim(int(factor), SYMBOL)
    shown = str(expr.xreplace(dict.fromkeys(symbols, type(symbols[0])(SYMBOL))) if symbols else expr)
    raise context.refuse(f"a size of {shown} is not a multiple of the {SYMBOL} tokens of a step")


def dtype_of(dtype: torch.dtype) -> DType:
    """Whatever the model computes in: floats are f32, integers i32."""
    if dtype == torch.bool:
        return DType.BOOL
    return DType.F32 if dtype.is_floating_point or dtype.is_complex else DType.I32


def type_of(value: torch.Tensor, context: Context) -> TensorType:
    return TensorType(tuple(dim_of(size, context) for size in value.shape), dtype_of(value.dtype))


def result_type(context: Context, node: torch.fx.Node) -> TensorType:
    """The type that the tracer recorded for a node with one result."""
    return type_of(node.meta["val"], context)


def axis(dim: int, rank: int) -> int:
    """A dimension that may count from the end."""
    return dim + rank if dim < 0 else dim


def axes(dims: Sequence[int] | int | None, rank: int) -> tuple[int, ...]:
    """None or nothing: all of them."""
    if dims is None or dims == []:
        return tuple(range(rank))
    return tuple(sorted(axis(d, rank) for d in ([dims] if isinstance(dims, int) else dims)))
