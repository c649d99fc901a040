"""A graph constant as a recipe over the tensors of a checkpoint, not as an array.

`concat(q_proj.weight, k_proj.weight; axis=0)` is a WeightExpr: frozen, hashable, printable, JSON-able. It is evaluated
(evaluate.py) while an engine is written, one constant at a time, and again for a refit.

Floating-point tensors of a checkpoint enter an expression as f32 whatever their type on disk (exact for bf16 and f16),
integer tensors as i32. An expression becomes bf16 or quantized by the operators that later passes put on top.
"""
from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..ir.types import DType, TensorType


@dataclass(frozen=True)
class WeightExpr:
    """op applied to operands: other expressions, or literal scalars.

    op      "tensor" (attrs name), "literal" (attrs data: the bytes), or a key of the operator registry or of
            `unpack.UNPACK_OPS`
    attrs   sorted (name, value) pairs; values are hashable
    type    of the result; shapes of constants hold no symbols
    output  which result of an operator that has several
    """

    op: str
    operands: tuple[WeightExpr | int | float | bool, ...]
    attrs: tuple[tuple[str, Any], ...]
    type: TensorType
    output: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(dim) for dim in self.type.shape)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.type.dtype.size_bytes

    def attr(self, name: str) -> Any:
        return dict(self.attrs)[name]

    @property
    def inputs(self) -> tuple[WeightExpr, ...]:
        """The operands that are expressions, literal scalars left out."""
        return tuple(o for o in self.operands if isinstance(o, WeightExpr))

    def tensor_names(self) -> tuple[str, ...]:
        """Names of the checkpoint tensors that take part, each once, in order of appearance."""
        names: dict[str, None] = {}
        stack: list[WeightExpr] = [self]
        while stack:
            expr = stack.pop()
            if expr.op == "tensor":
                names[expr.attr("name")] = None
            stack.extend(reversed(expr.inputs))
        return tuple(names)

    def __str__(self) -> str:
        if self.op == "tensor":
            return str(self.attr("name"))
        if self.op == "literal":
            values = literal_value(self).reshape(-1)
            shown = ", ".join(f"{v:.6g}" for v in values[:3].tolist())
            return f"literal({self.type}: {shown}{', …' if values.size > 3 else ''})"
        attrs = ", ".join(f"{k}={_text(v)}" for k, v in self.attrs)
        selected = f"[{self.output}]" if self.output else ""
        return f"{self.op}({', '.join(map(str, self.operands))}{'; ' if attrs else ''}{attrs}){selected}"

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "operands": [o.to_json() if isinstance(o, WeightExpr) else o for o in self.operands],
            "attrs": {k: attr_to_json(v) for k, v in self.attrs},
            "shape": list(self.type.shape),
            "dtype": self.type.dtype.value,
            "output": self.output,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> WeightExpr:
        operands = tuple(WeightExpr.from_json(o) if isinstance(o, Mapping) else o for o in data["operands"])
        attrs = tuple((k, attr_from_json(v)) for k, v in data["attrs"].items())
        return WeightExpr(data["op"], operands, attrs, TensorType(tuple(data["shape"]), DType(data["dtype"])),
                          data["output"])


def _text(value: Any) -> str:
    return value.value if isinstance(value, DType) else str(value)


def attr_to_json(value: Any) -> Any:
    match value:
        case bytes():
            return {"bytes": base64.b64encode(value).decode("ascii")}
        case DType():
            return {"dtype": value.value}
        case tuple():
            return [attr_to_json(v) for v in value]
        case _:
            return value


def attr_from_json(value: Any) -> Any:
    match value:
        case {"bytes": text}:
            return base64.b64decode(text)
        case {"dtype": name}:
            return DType(name)
        case list():
            return tuple(attr_from_json(v) for v in value)
        case _:
            return value


def apply(op: str, operands: Sequence[WeightExpr | int | float | bool], result: TensorType, output: int = 0,
          **attrs: Any) -> WeightExpr:
    """Any operator over expressions; `result` is the type of the result (the registry's inference gives it)."""
    return WeightExpr(op, tuple(operands), tuple(sorted(attrs.items())), result, output)


def tensor(name: str, shape: Sequence[int], dtype: DType = DType.F32) -> WeightExpr:
    """The tensor of that name in the checkpoint, which must have that shape. dtype: F32, I32 or BOOL, see above."""
    return apply("tensor", (), TensorType(tuple(shape), dtype), name=name)


def literal(value: np.ndarray) -> WeightExpr:
    """A small array that is part of the expression itself: what the model computes from its configuration."""
    dtype = {"float32": DType.F32, "int32": DType.I32, "bool": DType.BOOL, "int8": DType.I8, "uint8": DType.U8}
    value = np.ascontiguousarray(value) if value.ndim else value
    return apply("literal", (), TensorType(value.shape, dtype[value.dtype.name]), data=value.tobytes())


def literal_value(expr: WeightExpr) -> np.ndarray:
    """The array of a literal; read-only."""
    return np.frombuffer(expr.attr("data"), expr.type.dtype.numpy).reshape(expr.shape)


def concat(parts: Sequence[WeightExpr], axis: int) -> WeightExpr:
    if len(parts) == 1:
        return parts[0]
    shape = list(parts[0].shape)
    for part in parts[1:]:
        assert part.type.dtype == parts[0].type.dtype, f"concat of {part.type} and {parts[0].type}"
        assert [*part.shape[:axis], *part.shape[axis + 1:]] == [*shape[:axis], *shape[axis + 1:]], (
            f"concat of shapes {[p.shape for p in parts]} along axis {axis}")
    shape[axis] = sum(part.shape[axis] for part in parts)
    return apply("cat", parts, TensorType(tuple(shape), parts[0].type.dtype), dim=axis)


def stack(parts: Sequence[WeightExpr], axis: int) -> WeightExpr:
    """Equal shapes [...] -> [..., len(parts) at `axis`, ...]."""
    return concat([reshape(p, (*p.shape[:axis], 1, *p.shape[axis:])) for p in parts], axis)


def permute(expr: WeightExpr, dims: Sequence[int]) -> WeightExpr:
    dims = tuple(dims)
    if dims == tuple(range(len(dims))):
        return expr
    if expr.op == "permute":
        inner = expr.attr("dims")
        return permute(expr.inputs[0], [inner[d] for d in dims])
    return apply("permute", (expr,), TensorType(tuple(expr.shape[d] for d in dims), expr.type.dtype), dims=dims)


def transpose(expr: WeightExpr) -> WeightExpr:
    """Swaps the last two dimensions."""
    rank = len(expr.shape)
    return permute(expr, (*range(rank - 2), rank - 1, rank - 2))


def reshape(expr: WeightExpr, shape: Sequence[int]) -> WeightExpr:
    shape = tuple(shape)
    assert math.prod(shape) == math.prod(expr.shape), f"reshape of {expr.shape} to {shape}"
    if shape == expr.shape:
        return expr
    if expr.op == "reshape":
        return reshape(expr.inputs[0], shape)
    return apply("reshape", (expr,), TensorType(shape, expr.type.dtype), shape=shape)


def slice_(expr: WeightExpr, axis: int, start: int, stop: int) -> WeightExpr:
    """Elements [start, stop) along one axis."""
    assert 0 <= start <= stop <= expr.shape[axis], f"slice [{start}, {stop}) of {expr.shape} along axis {axis}"
    if (start, stop) == (0, expr.shape[axis]):
        return expr
    shape = (*expr.shape[:axis], stop - start, *expr.shape[axis + 1:])
    return apply("slice", (expr,), TensorType(shape, expr.type.dtype), dim=axis, start=start, stop=stop, step=1)


def cast(expr: WeightExpr, dtype: DType) -> WeightExpr:
    if expr.type.dtype == dtype:
        return expr
    return apply("cast", (expr,), TensorType(expr.shape, dtype), dtype=dtype)


def elementwise(op: str, a: WeightExpr, b: WeightExpr | int | float) -> WeightExpr:
    """add, sub or mul of expressions of one rank, broadcast along sizes of 1; f32 if either operand is."""
    if not isinstance(b, WeightExpr):
        return apply(op, (a, b), TensorType(a.shape, DType.F32 if isinstance(b, float) else a.type.dtype))
    assert len(a.shape) == len(b.shape), f"{op} of {a.type} and {b.type}"
    dtype = DType.F32 if DType.F32 in (a.type.dtype, b.type.dtype) else a.type.dtype
    return apply(op, (a, b), TensorType(np.broadcast_shapes(a.shape, b.shape), dtype))


def unpack_columns(words: WeightExpr, word: int, bits: int, order: Sequence[int] | None = None,
                   signed: bool = False) -> WeightExpr:
    """i32 [..., C] -> i32 [..., C * word / bits]; order: where a word's element j is, by default lowest bits first."""
    times = word // bits
    shape = (*words.shape[:-1], words.shape[-1] * times)
    return apply("unpack_columns", (words,), TensorType(shape, DType.I32), word=word, bits=bits,
                 order=tuple(order or range(times)), signed=signed)


def unpack_rows(words: WeightExpr, word: int, bits: int, order: Sequence[int] | None = None,
                signed: bool = False) -> WeightExpr:
    """i32 [R, K] -> i32 [R * word / bits, K]."""
    times = word // bits
    return apply("unpack_rows", (words,), TensorType((words.shape[0] * times, words.shape[1]), DType.I32), word=word,
                 bits=bits, order=tuple(order or range(times)), signed=signed, times=times)


def repeat(expr: WeightExpr, axis: int, times: int, size: int) -> WeightExpr:
    """Along the first (0) or the last (-1) axis: each row or column `times` times, `size` in all."""
    if (times, size) == (1, expr.shape[axis]):
        return expr
    shape = (size, *expr.shape[1:]) if axis == 0 else (*expr.shape[:-1], size)
    name = "repeat_rows" if axis == 0 else "repeat_columns"
    return apply(name, (expr,), TensorType(shape, expr.type.dtype), times=times, size=size)


def take_columns(expr: WeightExpr, index: WeightExpr) -> WeightExpr:
    """expr [N, G], index i32 [1, K] -> [N, K]."""
    return apply("take_columns", (expr, index), TensorType((expr.shape[0], index.shape[1]), expr.type.dtype))


def scale_columns(expr: WeightExpr, scale: WeightExpr, bits: int) -> WeightExpr:
    """expr f32 [N, K], scale f32 [1, K]; see unpack.scale_columns."""
    return apply("scale_columns", (expr, scale), expr.type, bits=bits)


def dequantize(codes: WeightExpr, scales: WeightExpr, kind: str, rows: int, columns: int,
               factor: WeightExpr | None = None) -> WeightExpr:
    """codes [.., N, K] times scales and factor, broadcast to it -> f32; see unpack.dequantize, and carried.py for what
    is made of the codes alone."""
    operands = (codes, scales) if factor is None else (codes, scales, factor)
    return apply("dequantize", operands, TensorType(codes.shape, DType.F32), kind=kind, rows=rows, columns=columns)


def input_scale(name: str, width: int, head: int = 0, inverse: bool = False) -> WeightExpr:
    """f32 [width]: what calibration chose for the inputs of the layer whose matrix is the parameter `name`, or its
    inverse; ones where nothing was chosen. A power of two, so that what is multiplied by it keeps its digits.

    head: elements of a head, where heads that share keys and values share their scales too.
    """
    return apply("input_scale", (), TensorType((width,), DType.F32), name=name, head=head, inverse=inverse)


def input_scales(expr: WeightExpr) -> list[WeightExpr]:
    """Those in an expression, each once."""
    found: dict[WeightExpr, None] = {}
    stack: list[WeightExpr] = [expr]
    while stack:
        part = stack.pop()
        if part.op == "input_scale":
            found[part] = None
        stack.extend(reversed(part.inputs))
    return list(found)


def decode(op: str, codes: WeightExpr) -> WeightExpr:
    """op: "e2m1" or "e8m0"; i32 codes -> f32 of the same shape."""
    return apply(op, (codes,), TensorType(codes.shape, DType.F32))


def substitute(expr: WeightExpr, recipes: Mapping[str, WeightExpr]) -> WeightExpr:
    """The expression with the tensors that `recipes` names replaced by these recipes."""
    if expr.op == "tensor":
        return recipes.get(expr.attr("name"), expr)
    operands = tuple(substitute(o, recipes) if isinstance(o, WeightExpr) else o for o in expr.operands)
    return expr if operands == expr.operands else replace(expr, operands=operands)
