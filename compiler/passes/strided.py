"""Which operands kernels read in place although they are column ranges of wider rows."""
from __future__ import annotations

from ingot.plugins.scheme import SCHEMES

from ..ir.graph import Node
from ..ir.types import TensorType

_BY_TOKEN = {"rope_kv_write": (0, 1, 2), "kv_write": (0, 1), "attention": (0,), "rope": (0,), "rms_norm": (0,),
             "layer_norm": (0,)}
"""Values [T, …]: whatever lies inside a token's row, the rows of tokens may be further apart than they are long."""

_BY_ROW = {"quantize": (0,), "linear": (0,), "lora_shrink": (0,)}
"""Values [T, K]: kernels that know no rows within those of tokens."""

_GPU_BY_TOKEN = {"rope_kv_write": (0, 1, 2), "kv_write": (0, 1), "attention": (0,), "rope": (0,),
                 "rms_norm": (0,), "layer_norm": (0,)}
_GPU_BY_ROW = {"linear": (0,), "lora_shrink": (0,)}

ALIGNED_ELEMENTS = 8
"""Kernels of GPUs take column ranges that begin at multiples of 16 bytes, in rows of such multiples: of 16-bit values
so many."""


def accepts_strided(node: Node, operand: int, type_: TensorType) -> bool:
    if operand in _BY_ROW.get(node.op, ()):
        # A matrix of rounded inputs takes them as `quantize` writes them.
        floats = node.op == "quantize" or not SCHEMES[node.attrs.get("scheme", "fp32")].rounds_inputs
        return floats and sum(dim != 1 for dim in type_.shape) <= 2
    return operand in _BY_TOKEN.get(node.op, ())


def gpu_accepts_strided(node: Node, operand: int, type_: TensorType) -> bool:
    """Kernels of GPUs; what a matrix takes quantized is read by the launch that quantizes it."""
    if operand in _GPU_BY_ROW.get(node.op, ()):
        return sum(dim != 1 for dim in type_.shape) <= 2
    return operand in _GPU_BY_TOKEN.get(node.op, ())
