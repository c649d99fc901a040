"""compressed-tensors (llm-compressor, vLLM): float8, int8, and integers packed into words of 32 bits.

    float-quantized       weight e4m3 [N, K]; weight_scale [1], [N, 1] or blocks
    int-quantized         weight i8 [N, K]; weight_scale [1], [N, 1] or [N, G], weight_zero_point i8 of the same shape
    pack-quantized        weight_packed i32 [N, K * bits / 32], 2^(bits-1) added, lowest bits first; weight_shape [2];
                          weight_scale [N, G], weight_zero_point i32 [N * bits / 32, G]; weight_g_idx i32 [K] where
                          channels are in act-order
    nvfp4-pack-quantized  weight_packed u8 [N, K/2]; weight_scale e4m3 [N, K/16], divided by weight_global_scale f32 [1]
    mxfp4-pack-quantized  weight_packed u8 [N, K/2]; weight_scale u8 [N, K/32], powers of two (e8m0)
    mxfp8-quantized       weight e4m3 [N, K]; weight_scale u8 [N, K/32], powers of two (e8m0)
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...weights.expr import (
    WeightExpr,
    apply,
    decode,
    elementwise,
    reshape,
    slice_,
    take_columns,
    unpack_columns,
    unpack_rows,
)
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
    spread,
)

FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized",
           "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision")


def read_compressed_tensors(tensors: Tensors, config: Mapping[str, Any]) -> Quantized:
    """Raises CheckpointError for a format, sparsity or transform that is not read, and for tensors that do not fit."""
    groups = list((config.get("config_groups") or {}).values())
    for form in [config.get("format"), *(group.get("format") for group in groups)]:
        if form not in (None, *FORMATS):
            raise CheckpointError(f"{tensors.where}: compressed-tensors' format {form!r} is not read; read are "
                                  f"{', '.join(FORMATS)}")
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise CheckpointError(f"{tensors.where}: weights stored sparsely ({sparsity!r}) are not read; dense ones are")
    if (config.get("transform_config") or {}).get("config_groups"):
        raise CheckpointError(f"{tensors.where}: inputs that are rotated (transform_config) are not read")
    found = Quantized("compressed-tensors")
    for base in tensors.names(".weight_scale"):
        weights = [group["weights"] for group in groups if group.get("weights")]
        found.weights[f"{base}.weight"] = _weight(tensors, base, weights)
    if tensors.drop((".input_scale", ".input_zero_point", ".input_global_scale")):
        found.unused.add(INPUT_SCALES)
    if tensors.drop((".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point", ".q_scale", ".q_zero_point")):
        found.unused.add(KV_SCALES)
    return found


def _weight(tensors: Tensors, base: str, weights: list[Mapping[str, Any]]) -> QuantizedWeight:
    name, packed, scale = f"{base}.weight", f"{base}.weight_packed", f"{base}.weight_scale"
    if packed in tensors:
        return _fp4(tensors, base) if tensors.dtype(packed) == "U8" else _packed(tensors, base, weights)
    kind = tensors.dtype(name) if name in tensors else "nothing"
    if kind == "F8_E4M3":
        tensors.drop((f"{base}.weight_zero_point",))
        blocks = {tuple(w["block_structure"]) for w in weights if w.get("block_structure")}
        return float8_weight(tensors, base, scale, blocks.pop() if len(blocks) == 1 else None)
    if kind != "I8":
        raise CheckpointError(f"{tensors.where}: {name} is stored as {kind} and has a scale; expected e4m3 or i8")
    weight, scales = tensors.leaf(name, 2), tensors.leaf(scale)
    n, k = weight.shape
    grid = grid_of((n, k), scales.shape)
    if grid is None:
        raise tensors.misfit(name, weight.shape, scale)
    zeros = tensors.optional(f"{base}.weight_zero_point")
    centred = weight if zeros is None else elementwise("sub", weight, spread(zeros, weight.shape, grid))
    kind = "int8" if zeros is None else ""
    return QuantizedWeight(scaled(centred, scales, grid, kind), f"int8, {grid.describe(n, k)}",
                           kind if grid.columns == k else "")


def _packed(tensors: Tensors, base: str, weights: list[Mapping[str, Any]]) -> QuantizedWeight:
    """Which of the configuration's groups a layer belongs to is told by its sizes: bits from the words of a row."""
    words, scales = tensors.leaf(f"{base}.weight_packed", 2), tensors.leaf(f"{base}.weight_scale", 2)
    shape = f"{base}.weight_shape"
    tensors.leaf(shape, 1)
    n, k = (int(size) for size in tensors.checkpoint.get(shape))
    fitting = sorted({int(w["num_bits"]) for w in weights if -(-k * int(w["num_bits"]) // 32) == words.shape[1]})
    if len(fitting) != 1 or fitting[0] not in (2, 4, 8) or words.shape[0] != n:
        raise CheckpointError(f"{tensors.where}: {base}.weight_packed {list(words.shape)} does not hold {n} x {k} "
                              f"numbers of {', '.join(str(w['num_bits']) for w in weights)} bits; read are 2, 4 and 8")
    bits = fitting[0]
    q = slice_(unpack_columns(words, 32, bits), 1, 0, k)
    zeros: WeightExpr | None = None
    if f"{base}.weight_zero_point" in tensors:
        zeros = slice_(unpack_rows(tensors.leaf(f"{base}.weight_zero_point", 2), 32, bits), 0, 0, n)
    groups, index = scales.shape[1], tensors.optional(f"{base}.weight_g_idx", 1)
    grid = grid_of((n, k), scales.shape)
    if grid is None or grid.rows != 1:
        raise tensors.misfit(f"{base}.weight", (n, k), f"{base}.weight_scale")

    def by_channel(x: WeightExpr) -> WeightExpr:
        return spread(x, (n, k), grid) if index is None else take_columns(x, reshape(index, (1, k)))

    centred = elementwise("sub", q, 1 << (bits - 1) if zeros is None else by_channel(zeros))
    shown = f"int{bits}, {grid.describe(n, k)}" + ("" if index is None else ", channels in act-order")
    keeps = "w4a8" if bits <= 4 and index is None and grid.columns % 32 == 0 else ""
    if bits == 8 and groups == 1 and zeros is None:
        keeps = "int8"
    on_gpus = int4_groups(grid.columns, k, zeros is None) if keeps == "w4a8" else ""
    return QuantizedWeight(elementwise("mul", centred, by_channel(scales)), shown, keeps, on_gpus)


def _fp4(tensors: Tensors, base: str) -> QuantizedWeight:
    """NVFP4, or MXFP4, whose scales are powers of two and have none above them."""
    weight = decode("e2m1", unpack_columns(tensors.leaf(f"{base}.weight_packed", 2), 8, 4))
    scales, power = tensors.scales(f"{base}.weight_scale"), tensors.dtype(f"{base}.weight_scale") in ("U8", "F8_E8M0")
    (n, k), groups = weight.shape, scales.shape[-1]
    if scales.shape != (n, groups) or k % groups:
        raise tensors.misfit(f"{base}.weight", weight.shape, f"{base}.weight_scale")
    grid, shown = Grid(1, k // groups), f"{'mxfp4' if power else 'nvfp4'}, groups of {k // groups}"
    if power:
        return QuantizedWeight(scaled(weight, scales, grid, "mxfp4"), shown)
    outer = reshape(tensors.leaf(f"{base}.weight_global_scale"), (1, 1))
    return QuantizedWeight(scaled(weight, scales, grid, "nvfp4", apply("div", (1.0, outer), outer.type)), shown)
