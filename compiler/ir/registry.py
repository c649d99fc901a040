"""The operator registry with all operators loaded."""
from __future__ import annotations

from . import ops_attention, ops_elementwise, ops_fused, ops_linear, ops_reduce, ops_view
from .op import OPS

__all__ = ["OPS", "ops_attention", "ops_elementwise", "ops_fused", "ops_linear", "ops_reduce", "ops_view"]
