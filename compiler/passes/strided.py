"""Which operands kernels read in place although they are column ranges of wider rows."""
from __future__ import annotations

from ..ir.graph import Node

_STRIDED = {"rope_kv_write": (0, 1, 2), "kv_write": (0, 1), "attention": (0,), "rms_norm": (0,), "quantize": (0,),
            "layer_norm": (0,)}


def accepts_strided(node: Node, operand: int) -> bool:
    """A value [T, …] whose rows lie further apart than they are long."""
    return operand in _STRIDED.get(node.op, ())
