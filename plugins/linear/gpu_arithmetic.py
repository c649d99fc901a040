"""What a linear layer's kernel computes beside the products of the Tensor Cores: instructions a thread, as counted in
disassembled loops. Those of addresses and of copies are left out."""
from __future__ import annotations

from .gpu_formats import FORMATS

_WIDENING = {"bf16": 3.5, "fp16": 3.5, "fp8": 1.75, "int8": 1.0}
"""Four bits, by the type that they are widened to: for each weight of a block's tile. Those of 16 bits are scaled."""

_SCALING = {"fp8": 1.0, "int8": 2.0}
"""For a group's sum, by the type of the activations: a multiply-add, behind a conversion where sums are integers."""

_SCALING_BY_BLOCKS = 2.0
"""Of fp8_block: times the weights' scale, which takes in the token's, and added."""


def defers(format: str, activation: str) -> bool:
    """Whether the sum over each group of channels is scaled apart, in a second accumulator."""
    return format == "fp8_block" or (FORMATS[format].is_int4 and activation in ("fp8", "int8"))


def widening(format: str, activation: str) -> float:
    """Instructions for each weight, as often as a block reads it."""
    return _WIDENING[activation] if FORMATS[format].is_int4 else 0.0


def scaling(format: str, activation: str) -> float:
    """Instructions for each multiply-add of the product: one group of channels shares them."""
    if not defers(format, activation):
        return 0.0
    count = _SCALING_BY_BLOCKS if format == "fp8_block" else _SCALING[activation]
    return count / FORMATS[format].channels_per_scale
