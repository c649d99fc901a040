"""Weights in float8 (e4m3) with scales beside them, as DeepSeek's models and transformers' fine-grained FP8 have them.

    weight e4m3 [N, K], weight_scale_inv f32 [ceil(N / 128), ceil(K / 128)], or one scale for all

The scales multiply, whatever their name says.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .weights import INPUT_SCALES, Quantized, QuantizedWeight, Tensors, grid_of, scaled


def read_fp8(tensors: Tensors, config: Mapping[str, Any]) -> Quantized:
    """Raises CheckpointError for scales that do not fit their weight."""
    found, block = Quantized("FP8"), config.get("weight_block_size")
    for suffix in (".weight_scale_inv", ".weight_scale"):
        for base in tensors.names(suffix):
            found.weights[f"{base}.weight"] = float8_weight(
                tensors, base, f"{base}{suffix}", (int(block[0]), int(block[1])) if block else None)
    if tensors.drop((".input_scale", ".activation_scale")):
        found.unused.add(INPUT_SCALES)
    return found


def float8_weight(tensors: Tensors, base: str, scale: str, block: tuple[int, int] | None = None) -> QuantizedWeight:
    """e4m3 [N, K] times its scale: one, one a row, or one a block."""
    weight, scales = tensors.leaf(f"{base}.weight", 2), tensors.scales(scale)
    n, k = weight.shape
    grid = grid_of((n, k), scales.shape, block)
    if grid is None:
        raise tensors.misfit(f"{base}.weight", weight.shape, scale)
    return QuantizedWeight(scaled(weight, scales, grid, "e4m3"), f"fp8, {grid.describe(n, k)}")
