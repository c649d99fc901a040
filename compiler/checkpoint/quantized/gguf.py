"""What the tensors of a GGUF file are stored as. They are dequantized when they are read; this is for the report."""
from __future__ import annotations

from typing import TYPE_CHECKING

from ...weights.expr import WeightExpr, tensor
from .weights import Quantized, QuantizedWeight

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

_PLAIN = ("F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64")

_SCHEMES = {"Q4_0": "w4a8", "Q4_1": "w4a8", "Q4_K": "w4a8", "Q8_0": "int8g32"}
"""GGML type -> the scheme that holds its numbers: to the bit but for Q4_K, whose scales are no float16."""

_GROUPS = {"Q4_0": "int4_g32", "Q4_1": "int4_g32m", "Q4_K": "int4_g32m"}
"""Likewise the format on GPUs."""


def gguf_types(checkpoint: Checkpoint) -> Quantized | None:
    """None for another checkpoint than a GGUF file, or one whose tensors are all plain numbers."""
    if checkpoint.gguf_architecture is None:
        return None
    found = Quantized("GGUF")
    for name in checkpoint.names():
        if (kind := checkpoint.dtype(name)) not in _PLAIN:
            found.weights[name] = QuantizedWeight(tensor(name, checkpoint.shape(name)), kind, _SCHEMES.get(kind, ""),
                                                  _GROUPS.get(kind, ""))
    return found if found.weights else None


def leaves_columns_alone(expr: WeightExpr) -> bool:
    """Whether the rows of the tensors in it are rows of the whole: then their blocks along K are its blocks."""
    if expr.op == "tensor":
        return True
    rank = len(expr.shape)
    match expr.op:
        case "cat" | "slice":
            kept = int(expr.attr("dim")) % rank != rank - 1
        case "permute":
            kept = int(expr.attr("dims")[-1]) == rank - 1
        case "reshape":
            kept = expr.inputs[0].shape[-1:] == expr.shape[-1:]
        case _:
            kept = False
    return kept and all(leaves_columns_alone(inner) for inner in expr.inputs)
