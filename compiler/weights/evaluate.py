"""Evaluation of weight expressions to numpy arrays: what the engine writer, refit and the interpreter call."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from ingot.runtime.errors import RequestError

from ..ir.op import as_tuple
from ..ir.registry import OPS
from ..ir.types import TensorType
from .expr import WeightExpr, concat, literal_value, permute, reshape, slice_
from .unpack import EXPANDING_OPS, ROW_WISE_UNPACK_OPS, UNPACK_OPS


class TensorSource(Protocol):
    """Where the tensors of a checkpoint come from."""

    def get(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Rows [begin, end) along the first axis; f32 for any floating-point type on disk, i32 or bool else."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...


class WeightShapeError(RequestError):
    """A tensor of the checkpoint has another shape than the model's configuration asks for."""


def evaluate(expr: WeightExpr, source: TensorSource, rows: tuple[int, int] | None = None) -> np.ndarray:
    """The array that an expression stands for, contiguous; bf16 as u16 bits.

    rows: only [begin, end) of the first axis, without the memory for the rest wherever the operators allow.
    Raises what the source raises for a missing or malformed tensor.
    """
    if rows is not None:
        expr = row_slice(expr, *rows)
    result = np.ascontiguousarray(_evaluate(expr, source, {})).reshape(expr.shape)
    assert result.dtype == expr.type.dtype.numpy, f"{expr} gave {result.dtype}, its type is {expr.type}"
    return result


def _evaluate(expr: WeightExpr, source: TensorSource, done: dict[WeightExpr, tuple[np.ndarray, ...]]) -> np.ndarray:
    """done: results of operators with several outputs, which each output would compute again."""
    if expr.op == "tensor":
        return _read(expr, source, 0, None)
    if expr.op == "literal":
        return literal_value(expr)
    if expr.op == "input_scale":
        return _input_scale(expr, source)
    attrs = dict(expr.attrs)
    if expr.op == "slice" and attrs["dim"] == 0 and expr.inputs[0].op == "tensor":
        return _read(expr.inputs[0], source, attrs["start"], attrs["stop"])
    whole = WeightExpr(expr.op, expr.operands, expr.attrs, expr.type) if expr.output else expr
    if whole in done:
        return done[whole][expr.output]
    operands = [_evaluate(o, source, done) if isinstance(o, WeightExpr) else o for o in expr.operands]
    function = UNPACK_OPS[expr.op] if expr.op in UNPACK_OPS else OPS[expr.op].reference
    results = as_tuple(function(*operands, **attrs))
    if len(results) > 1:
        done[whole] = results
    return results[expr.output]


def _input_scale(expr: WeightExpr, source: TensorSource) -> np.ndarray:
    """Of a source that has such; see calibration/scaled_source.py."""
    of = getattr(source, "input_scale", None)
    found = of(expr.attr("name")) if of is not None else None
    if found is None:
        return np.ones(expr.shape, np.float32)
    return (1 / found if expr.attr("inverse") else found).astype(np.float32)


def _read(expr: WeightExpr, source: TensorSource, begin: int, end: int | None) -> np.ndarray:
    name = expr.attr("name")
    shape = source.shape(name)
    if shape != expr.shape:
        raise WeightShapeError(f"tensor {name}: the model expects {list(expr.shape)}, the checkpoint has {list(shape)}")
    return source.get(name, begin, end)


def row_slice(expr: WeightExpr, begin: int, end: int) -> WeightExpr:
    """Rows [begin, end) of the first axis, with the slice moved as close to the checkpoint as the operators allow."""
    if (begin, end) == (0, expr.shape[0]):
        return expr
    attrs, inputs = dict(expr.attrs), expr.inputs
    match expr.op:
        case "slice" if attrs["dim"] == 0:
            return row_slice(inputs[0], attrs["start"] + begin, attrs["start"] + end)
        case "slice":
            return slice_(row_slice(inputs[0], begin, end), attrs["dim"], attrs["start"], attrs["stop"])
        case "cat" if attrs["dim"] == 0:
            return concat(_overlapping_parts(inputs, begin, end), 0)
        case "cat":
            return concat([row_slice(part, begin, end) for part in inputs], attrs["dim"])
        case "permute" if attrs["dims"][0] == 0:
            return permute(row_slice(inputs[0], begin, end), attrs["dims"])
        case "reshape":
            row, inner_row = math.prod(expr.shape[1:]), math.prod(inputs[0].shape[1:])
            if inner_row and begin * row % inner_row == end * row % inner_row == 0:
                inner = row_slice(inputs[0], begin * row // inner_row, end * row // inner_row)
                return reshape(inner, (end - begin, *expr.shape[1:]))
        case op if op in EXPANDING_OPS:
            return _expanded_rows(expr, begin, end)
        case op if op in ROW_WISE_UNPACK_OPS or (op in OPS and OPS[op].kind == "elementwise"):
            operands = [_rows_of_operand(o, expr, begin, end) for o in expr.operands]
            return replace(expr, operands=tuple(operands),
                           type=TensorType((end - begin, *expr.shape[1:]), expr.type.dtype))
    return slice_(expr, 0, begin, end)


def _expanded_rows(expr: WeightExpr, begin: int, end: int) -> WeightExpr:
    times = expr.attr("times")
    low, high = begin // times, min(-(-end // times), expr.inputs[0].shape[0])
    attrs, size = dict(expr.attrs), (high - low) * times
    if "size" in attrs:
        size = attrs["size"] = min(size, expr.shape[0] - low * times)
    part = WeightExpr(expr.op, (row_slice(expr.inputs[0], low, high),), tuple(sorted(attrs.items())),
                      TensorType((size, *expr.shape[1:]), expr.type.dtype))
    return slice_(part, 0, begin - low * times, end - low * times)


def _overlapping_parts(parts: Sequence[WeightExpr], begin: int, end: int) -> list[WeightExpr]:
    """The pieces of the parts, joined along the first axis, that lie in rows [begin, end) of the whole."""
    pieces, offset = [], 0
    for part in parts:
        low, high = max(begin - offset, 0), min(end - offset, part.shape[0])
        if low < high:
            pieces.append(row_slice(part, low, high))
        offset += part.shape[0]
    return pieces or [row_slice(parts[0], 0, 0)]


def _rows_of_operand(operand: WeightExpr | int | float | bool, result: WeightExpr, begin: int, end: int,
                     ) -> WeightExpr | int | float | bool:
    """An operand that is broadcast along the first axis stays whole."""
    if isinstance(operand, WeightExpr) and operand.shape[:1] == result.shape[:1] and (
            result.op in ROW_WISE_UNPACK_OPS or len(operand.shape) == len(result.shape)):
        return row_slice(operand, begin, end)
    return operand
