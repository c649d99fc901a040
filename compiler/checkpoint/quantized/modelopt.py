"""NVIDIA ModelOpt (hf_quant_config.json). Which layout a layer has is told by its tensors: mixed recipes read too.

| format | weight | scales |
|---|---|---|
| FP8 | e4m3 [N, K] | weight_scale f32: one, [N], or blocks [N/128, 1, K/128, 1] |
| INT4 AWQ | u8 [N/2, K], lower half bytes are even rows, two's complement | weight_scale [N, K/128] |
| SmoothQuant | i8 [N, K] | weight_scale f32 [N] |
| NVFP4 | u8 [N, K/2], lower half bytes are even columns, e2m1 | weight_scale e4m3 [N, K/16], weight_scale_2 f32 |

Experts that the model holds as one tensor X [E, K, N] (gpt-oss, Llama 4) are X itself and X_weight_scale: e4m3 with one
scale, [E] or [E, N]; or NVFP4 as u8 [E, K/2, N], with X_weight_scale e4m3 [E, K/16, N] and X_weight_scale_2 f32.

pre_quant_scale [K] multiplies the inputs of its layer. W4A8's weight_scale_2 is a scale of its fp8 arithmetic, not of
the weight.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...weights.expr import decode, dequantize, permute, repeat, reshape, unpack_columns, unpack_rows
from ..errors import CheckpointError
from .fp8 import float8_weight
from .weights import (
    INPUT_SCALES,
    KV_SCALES,
    Grid,
    Quantized,
    QuantizedWeight,
    Tensors,
    grid_of,
    int4_groups,
    scaled,
    with_input_scale,
)

ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL", "W4A16_AWQ", "W4A8_AWQ",
              "W8A8_SQ_PER_CHANNEL", "W8A16", "NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "MIXED_PRECISION")


def read_modelopt(tensors: Tensors, config: Mapping[str, Any]) -> Quantized:
    """config: "quantization" of hf_quant_config.json, or quantization_config of config.json.

    Raises CheckpointError for an unknown algorithm, and for tensors that do not fit each other.
    """
    algorithm = str(config.get("quant_algo") or "").upper()
    if algorithm and algorithm not in ALGORITHMS:
        raise CheckpointError(f"{tensors.where}: ModelOpt's {algorithm!r} is not read; read are "
                              f"{', '.join(ALGORITHMS)}")
    found = Quantized("ModelOpt" + (f" {algorithm}" if algorithm else ""))
    for base in tensors.names(".weight_scale"):
        found.weights[f"{base}.weight"] = _weight(tensors, base)
    for name in tensors.names("_weight_scale"):
        found.weights[name] = _experts(tensors, name)
    inputs = (".input_scale", "_input_scale")
    if tensors.drop((*inputs, ".weight_scale_2")) and any(map(tensors.names, inputs)):
        found.unused.add(INPUT_SCALES)
    if tensors.drop((".k_scale", ".v_scale", ".output_scale")):
        found.unused.add(KV_SCALES)
    return found


def _weight(tensors: Tensors, base: str) -> QuantizedWeight:
    name, scale, inputs = f"{base}.weight", f"{base}.weight_scale", tensors.optional(f"{base}.pre_quant_scale", 1)
    match tensors.dtype(name) if name in tensors else "", tensors.dtype(scale):
        case "F8_E4M3", _:
            plain, bits = float8_weight(tensors, base, scale), 8
        case "I8", _:
            plain, bits = _int8(tensors, name, scale), 8
        case "U8", "F8_E4M3":
            plain, bits = _nvfp4(tensors, base), 4
        case "U8", _:
            plain, bits = _int4(tensors, name, scale), 4
        case kind, scale_kind:
            raise CheckpointError(f"{tensors.where}: {name} is stored as {kind or 'nothing'} with scales in "
                                  f"{scale_kind}; expected e4m3, i8 or u8")
    expr = with_input_scale(plain.expr, inputs, bits if plain.scheme else 0)
    shown = plain.format + ("" if inputs is None else ", scaled inputs")
    return QuantizedWeight(expr, shown, plain.scheme, plain.groups)


def _int8(tensors: Tensors, name: str, scale: str) -> QuantizedWeight:
    weight, scales = tensors.leaf(name, 2), tensors.leaf(scale)
    n, k = weight.shape
    grid = grid_of((n, k), scales.shape)
    if grid is None:
        raise tensors.misfit(name, weight.shape, scale)
    return QuantizedWeight(scaled(weight, scales, grid, "int8"), f"int8, {grid.describe(n, k)}",
                           "int8" if grid.columns == k else "")


def _int4(tensors: Tensors, name: str, scale: str) -> QuantizedWeight:
    weight, scales = unpack_rows(tensors.leaf(name, 2), 8, 4, signed=True), tensors.leaf(scale)
    n, k = weight.shape
    grid = grid_of((n, k), scales.shape)
    if grid is None:
        raise tensors.misfit(name, weight.shape, scale)
    keeps = grid.columns % 32 == 0 and grid.rows == 1
    return QuantizedWeight(scaled(weight, scales, grid), f"int4, {grid.describe(n, k)}", "w4a8" if keeps else "",
                           int4_groups(grid.columns, k, True) if keeps else "")


def _nvfp4(tensors: Tensors, base: str) -> QuantizedWeight:
    name, scale, whole = f"{base}.weight", f"{base}.weight_scale", f"{base}.weight_scale_2"
    weight = decode("e2m1", unpack_columns(tensors.leaf(name, 2), 8, 4))
    scales, outer = tensors.leaf(scale, 2), tensors.leaf(whole)
    (n, k), groups = weight.shape, scales.shape[1]
    if scales.shape[0] != n or k % groups:
        raise tensors.misfit(name, weight.shape, scale)
    weight = scaled(weight, scales, Grid(1, k // groups), "nvfp4", reshape(outer, (1, 1)))
    return QuantizedWeight(weight, f"nvfp4, groups of {k // groups}")


def _experts(tensors: Tensors, name: str) -> QuantizedWeight:
    """Of the model's parameter [E, K, N]; [E, N, K] is what is scaled, so that a row is an output channel's."""
    scale = f"{name}_weight_scale"
    kinds = tensors.dtype(name) if name in tensors else "nothing", tensors.dtype(scale)
    stored, scales = tensors.leaf(name, 3), tensors.leaf(scale)
    turned, n = permute(stored, (0, 2, 1)), stored.shape[2]
    if kinds == ("U8", "F8_E4M3"):
        weight = decode("e2m1", unpack_columns(turned, 8, 4))
        experts, _, k = weight.shape
        if len(scales.shape) != 3 or (scales.shape[0], scales.shape[2]) != (experts, n) or k % scales.shape[1]:
            raise tensors.misfit(name, stored.shape, scale)
        size = k // scales.shape[1]
        over = repeat(permute(scales, (0, 2, 1)), -1, size, k)
        outer = reshape(tensors.leaf(f"{scale}_2"), (1, 1, 1))
        made = dequantize(weight, over, "nvfp4", 1, size, outer)
        return QuantizedWeight(permute(made, (0, 2, 1)), f"nvfp4, groups of {size}, fused experts")
    if kinds[0] != "F8_E4M3":
        raise CheckpointError(f"{tensors.where}: {name}, experts in one tensor, is stored as {kinds[0]} with scales in "
                              f"{kinds[1]}; read are e4m3, and u8 with scales in e4m3 (NVFP4)")
    experts, _, k = turned.shape
    shapes = {(): (1, 1, 1), (1,): (1, 1, 1), (experts,): (experts, 1, 1), (experts, n): (experts, n, 1),
              (experts, 1, 1): (experts, 1, 1), (experts, 1, n): (experts, n, 1)}
    if scales.shape not in shapes:
        raise tensors.misfit(name, stored.shape, scale)
    shape = shapes[scales.shape]
    shown = "one scale a row" if shape[1] > 1 else "one scale an expert" if shape[0] > 1 else "one scale a tensor"
    made = dequantize(turned, reshape(scales, shape), "e4m3", 1 if shape[1] > 1 else n, k)
    return QuantizedWeight(permute(made, (0, 2, 1)), f"fp8, {shown}, fused experts")
