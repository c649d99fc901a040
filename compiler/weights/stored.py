"""Weights as a checkpoint stores them, without widening them first."""
from __future__ import annotations

import numpy as np

from ..checkpoint.checkpoint import Checkpoint
from .evaluate import TensorSource, row_slice
from .expr import WeightExpr

_MOVING_OPS = frozenset({"cat", "permute", "repeat_columns", "repeat_rows", "reshape", "slice"})


def bf16_rows(expr: WeightExpr, source: TensorSource, rows: tuple[int, int]) -> np.ndarray | None:
    """u16 bits of rows [begin, end) of a matrix that is nothing but rows of tensors in bfloat16, maybe a view of the
    file; None for any other, and for shapes that the checkpoint does not have. NaN and infinity are not looked for.

    Scales of inputs that no calibration chose are ones, and count as nothing.
    """
    if not isinstance(source, Checkpoint):  # which has none that were chosen
        return None
    whole = _unscaled(row_slice(expr, *rows))
    parts = whole.inputs if whole.op == "cat" and whole.attr("dim") == 0 else (whole,)
    found = []
    for part in map(_unscaled, parts):
        begin, end, tensor = 0, None, part
        if part.op == "slice" and part.attr("dim") == 0 and part.attr("step") == 1:
            begin, end, tensor = part.attr("start"), part.attr("stop"), part.inputs[0]
        if tensor.op != "tensor" or tensor.attr("name") not in source:
            return None
        name = tensor.attr("name")
        if source.dtype(name) != "BF16" or source.shape(name) != tensor.shape:
            return None
        found.append(source.store.read(name, begin, end))
    return found[0] if len(found) == 1 else np.concatenate(found)


def _unscaled(expr: WeightExpr) -> WeightExpr:
    while expr.op == "mul" and len(expr.inputs) == 2 and expr.inputs[0].shape == expr.shape and _is_one(expr.inputs[1]):
        expr = expr.inputs[0]
    return expr


def _is_one(expr: WeightExpr) -> bool:
    """Whether it is made of scales of inputs alone."""
    return expr.op == "input_scale" or (expr.op in _MOVING_OPS and all(map(_is_one, expr.inputs)))
