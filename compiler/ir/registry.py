"""The operator registry with all operators loaded."""
from __future__ import annotations

from ..fusion import reference as ops_loop
from . import (
    ops_attention,
    ops_collective,
    ops_elementwise,
    ops_fused,
    ops_linear,
    ops_lora,
    ops_moe,
    ops_reduce,
    ops_view,
)
from .op import OPS

__all__ = ["OPS", "ops_attention", "ops_collective", "ops_elementwise", "ops_fused", "ops_linear", "ops_loop",
           "ops_lora", "ops_moe", "ops_reduce", "ops_view"]
