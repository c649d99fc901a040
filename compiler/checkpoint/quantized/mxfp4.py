"""MXFP4 as gpt-oss has it: the experts of a layer, e2m1 in blocks of 32 with a power of two each.

    gate_up_proj_blocks u8 [E, N, K / 32, 16], the lower half byte first; gate_up_proj_scales u8 [E, N, K / 32]

The model's own parameter is [E, K, N].
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...weights.expr import decode, dequantize, permute, repeat, reshape, unpack_columns
from ..errors import CheckpointError
from .weights import Quantized, QuantizedWeight, Tensors

_BLOCK = 32


def read_mxfp4(tensors: Tensors, config: Mapping[str, Any]) -> Quantized:
    """Raises CheckpointError for scales that do not fit their blocks."""
    found = Quantized("MXFP4")
    for name in tensors.names("_blocks"):
        blocks, scales = tensors.leaf(f"{name}_blocks", 4), tensors.leaf(f"{name}_scales", 3)
        experts, n, groups, packed = blocks.shape
        if scales.shape != (experts, n, groups) or packed * 2 != _BLOCK:
            raise CheckpointError(f"{tensors.where}: {name}: blocks {list(blocks.shape)} and scales "
                                  f"{list(scales.shape)} do not fit; expected [E, N, K / 32, 16] and [E, N, K / 32]")
        codes = unpack_columns(reshape(blocks, (experts, n, groups * packed)), 8, 4)
        powers = repeat(decode("e8m0", scales), -1, _BLOCK, groups * _BLOCK)
        weight = permute(dequantize(decode("e2m1", codes), powers, "mxfp4", 1, _BLOCK), (0, 2, 1))
        found.weights[name] = QuantizedWeight(weight, "mxfp4, blocks of 32")
    return found
