"""Weights as a checkpoint stores them, without widening them first."""
from __future__ import annotations

import numpy as np

from ..checkpoint.checkpoint import Checkpoint
from .evaluate import TensorSource, row_slice
from .expr import WeightExpr


def bf16_rows(expr: WeightExpr, source: TensorSource, rows: tuple[int, int]) -> np.ndarray | None:
    """u16 bits of rows [begin, end) of a matrix that is nothing but rows of tensors in bfloat16, maybe a view of the
    file; None for any other, and for shapes that the checkpoint does not have. NaN and infinity are not looked for."""
    if not isinstance(source, Checkpoint):
        return None
    whole = row_slice(expr, *rows)
    parts = whole.inputs if whole.op == "cat" and whole.attr("dim") == 0 else (whole,)
    found = []
    for part in parts:
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
