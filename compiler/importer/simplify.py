"""Rules that keep the imported graph in normal form while it is built.

emit(builder, op, inputs, **attrs) is how the conversions add operators:
- identities add nothing: reshape to the same shape, slice of everything, cast to the same type, times 1.0, plus 0
- reshape of a reshape and permute of a permute are one; a permute that moves only extents of 1 is a reshape
- a permute sinks below what works on each element or along one dimension, so that the transposes which models put
  around attention meet and cancel, and everything between them reads memory in order
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..ir.graph import Node, Operand
from ..ir.infer import broadcast_shapes, promote
from ..ir.op import as_tuple
from ..ir.registry import OPS
from ..ir.types import Dim, DType
from ..weights.expr import permute as permute_expr
from .builder import GraphBuilder, is_elementwise

_ALONG_ONE_DIM = ("softmax", "cumsum", "sort", "topk")
_OVER_LAST_DIM = ("rms_norm", "layer_norm", "linear")


def emit(b: GraphBuilder, op: str, inputs: Sequence[Operand], **attrs: Any) -> str:
    """The value of an operator with one output."""
    (name,) = emit_all(b, op, inputs, **attrs)
    return name


def emit_all(b: GraphBuilder, op: str, inputs: Sequence[Operand], **attrs: Any) -> tuple[str, ...]:
    inputs = tuple(inputs)
    if is_elementwise(op) and len(inputs) > 1:
        inputs = _with_literals(b, inputs)
    if is_elementwise(op):
        uniform = _uniform(b, op, inputs, attrs)
        if uniform is not None:
            return uniform
    same = _identity(b, op, inputs, attrs)
    if same is not None:
        return (same,)
    if op == "reshape":
        return (_reshape(b, inputs[0], tuple(attrs["shape"])),)
    if op == "permute":
        return (_permute(b, inputs[0], tuple(attrs["dims"])),)
    sunk = _sink_permute(b, op, inputs, attrs)
    return sunk if sunk is not None else b.add(op, inputs, **attrs)


def _with_literals(b: GraphBuilder, inputs: tuple[Operand, ...]) -> tuple[Operand, ...]:
    """A value that is the same number everywhere becomes a literal, if another operand has the result's shape."""
    fulls = [b.produced_by(i, "full") for i in inputs]
    shapes = [b.type_of(i).shape for i in inputs]
    others = [b.types[i].shape for full, i in zip(fulls, inputs, strict=True) if full is None and isinstance(i, str)]
    if not others:
        return inputs
    whole = broadcast_shapes(shapes)
    return tuple(full.attrs["value"] if full is not None and whole in others else i
                 for full, i in zip(fulls, inputs, strict=True))


def _uniform(b: GraphBuilder, op: str, inputs: tuple[Operand, ...], attrs: dict[str, Any]) -> tuple[str, ...] | None:
    """What is the same number everywhere stays one number: computed now. A choice that is made already is taken."""
    if op == "where" and not isinstance(inputs[0], str):
        chosen, shape = inputs[1] if inputs[0] else inputs[2], broadcast_shapes([b.type_of(i).shape for i in inputs])
        if isinstance(chosen, str) and promote([b.type_of(i) for i in inputs[1:]]) == b.types[chosen].dtype:
            return (emit(b, "expand", (chosen,), shape=shape),)
    numbers = []
    for operand in inputs:
        full = b.produced_by(operand, "full")
        if isinstance(operand, str) and full is None:
            return None
        numbers.append(full.attrs["value"] if full is not None else operand)
    (result,) = as_tuple(OPS[op].reference(*map(np.asarray, numbers), **attrs))
    (type_,) = OPS[op].infer([b.type_of(i) for i in inputs], attrs)
    return b.add("full", (), shape=type_.shape, value=result.astype(type_.dtype.numpy).item(), dtype=type_.dtype)


def _identity(b: GraphBuilder, op: str, inputs: tuple[Operand, ...], attrs: dict[str, Any]) -> str | None:
    """The operand that the result equals, if there is one."""
    x = inputs[0] if inputs and isinstance(inputs[0], str) else None
    match op:
        case "reshape" | "expand" if x and b.types[x].shape == tuple(attrs["shape"]):
            return x
        case "permute" if tuple(attrs["dims"]) == tuple(range(len(attrs["dims"]))):
            return x
        case "slice" if x and (attrs["start"], attrs["stop"], attrs["step"]) == (0, b.types[x].shape[attrs["dim"]], 1):
            return x
        case "cat" if len(inputs) == 1:
            return x
        case "cast" if x and b.types[x].dtype == attrs["dtype"]:
            return x
        case "mul" if x and type(inputs[1]) is int and inputs[1] == 1:
            return x
        case "add" | "sub" if x and type(inputs[1]) is int and inputs[1] == 0 and b.types[x].dtype != DType.BOOL:
            return x
        case "mul" | "div" if x and _is_number(inputs[1], 1) and b.types[x].dtype.is_float:
            return x
        case "add" | "sub" if x and _is_number(inputs[1], 0) and b.types[x].dtype.is_float:
            return x
        case "mul" | "add" if isinstance(inputs[1], str) and _is_number(inputs[0], 1 if op == "mul" else 0) and (
                b.types[inputs[1]].dtype.is_float):
            return inputs[1]
    return None


def _is_number(operand: Operand, number: int) -> bool:
    return not isinstance(operand, str | bool) and operand == number


def _reshape(b: GraphBuilder, x: Operand, shape: tuple[Dim, ...]) -> str:
    inner = b.produced_by(x, "reshape")
    if inner is not None:
        return emit(b, "reshape", inner.inputs, shape=shape)
    return b.add("reshape", (x,), shape=shape)[0]


def _permute(b: GraphBuilder, x: Operand, dims: tuple[int, ...]) -> str:
    inner = b.produced_by(x, "permute")
    if inner is not None:
        return emit(b, "permute", inner.inputs, dims=tuple(inner.attrs["dims"][d] for d in dims))
    shape = b.type_of(x).shape
    if keeps_order(shape, dims):
        return _reshape(b, x, tuple(shape[d] for d in dims))
    return b.add("permute", (x,), dims=dims)[0]


def keeps_order(shape: Sequence[Dim], dims: Sequence[int]) -> bool:
    """Whether a permute leaves the elements where they are: only extents of 1 change places."""
    moved = [d for d in dims if shape[d] != 1]
    return moved == sorted(moved)


def _inverse(dims: Sequence[int]) -> tuple[int, ...]:
    inverse = [0] * len(dims)
    for i, d in enumerate(dims):
        inverse[d] = i
    return tuple(inverse)


def _sink_permute(b: GraphBuilder, op: str, inputs: tuple[Operand, ...], attrs: dict[str, Any],
                  ) -> tuple[str, ...] | None:
    """op(permute(x), ..) -> permute(op(x, ..)), where that is possible without other work."""
    permutes = [p for p in (b.produced_by(i, "permute") for i in inputs) if p is not None]
    if not permutes:
        return None
    dims: tuple[int, ...] = permutes[0].attrs["dims"]
    rank = len(dims)
    if is_elementwise(op) or op == "cat":
        operands = [_unpermuted(b, i, dims) for i in inputs]
        if any(o is None for o in operands):
            return None
        inner_attrs = {**attrs, "dim": dims[attrs["dim"]]} if op == "cat" else attrs
        results = emit_all(b, op, [o for o in operands if o is not None], **inner_attrs)
    elif inputs[0] != permutes[0].output:
        return None
    elif op == "slice" or op in _ALONG_ONE_DIM:
        results = emit_all(b, op, permutes[0].inputs, **{**attrs, "dim": dims[attrs["dim"]]})
    elif op.startswith("reduce_") and attrs["keepdim"]:
        over = tuple(sorted(dims[d] for d in attrs["dims"]))
        results = emit_all(b, op, permutes[0].inputs, **{**attrs, "dims": over})
    elif op in _OVER_LAST_DIM and dims[-1] == rank - 1:
        results = emit_all(b, op, (permutes[0].inputs[0], *inputs[1:]), **attrs)
    elif op == "expand" and len(attrs["shape"]) == rank:
        shape = tuple(attrs["shape"][i] for i in _inverse(dims))
        results = emit_all(b, op, permutes[0].inputs, shape=shape)
    else:
        return None
    return tuple(emit(b, "permute", (result,), dims=dims) for result in results)


def _unpermuted(b: GraphBuilder, operand: Operand, dims: tuple[int, ...]) -> Operand | None:
    """What becomes `operand` when it is permuted by `dims`, if it is there already, is a scalar, or costs nothing."""
    if not isinstance(operand, str):
        return operand
    node: Node | None = b.produced_by(operand, "permute")
    if node is not None and node.attrs["dims"] == dims:
        return node.inputs[0]
    shape = b.types[operand].shape
    if len(shape) > len(dims):
        return None
    padded = (1,) * (len(dims) - len(shape)) + shape
    inverse = _inverse(dims)
    if operand in b.constants:
        if all(dim == 1 for dim in padded):
            return operand
        whole = emit(b, "reshape", (operand,), shape=padded)
        return b.constant(permute_expr(b.constants[whole], inverse), f"{operand}.permute")
    if keeps_order(padded, inverse):
        return emit(b, "reshape", (operand,), shape=tuple(padded[i] for i in inverse))
    return None
