"""GPTQ (AutoGPTQ, GPTQModel) and AutoAWQ: integers packed into words of 32 bits, a scale and a zero for each group.

    qweight i32, qzeros i32 [G, N * bits / 32], scales f16 [G, N], g_idx i32 [K]

    w[n, k] = (q[k, n] - zero[g, n]) * scale[g, n], g the group of input channel k

GPTQ packs qweight along K, [K * bits / 32, N], lowest bits first; g_idx names the group of each channel, in any order
where the checkpoint was made with act-order; and its first format stores zeros less one. AutoAWQ packs along N,
[K, N / 8], in an order that suits a GPU's registers.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...weights.expr import (
    WeightExpr,
    elementwise,
    repeat,
    reshape,
    take_columns,
    unpack_columns,
    unpack_rows,
)
from ..errors import CheckpointError
from .weights import Quantized, QuantizedWeight, Tensors, int4_groups, transposed

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word the element of each column lies: columns 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on."""


def read_gptq(tensors: Tensors, config: Mapping[str, Any]) -> Quantized:
    """Raises CheckpointError for a width other than 2, 4 or 8 bits, and for tensors that do not fit each other."""
    bits = int(config.get("bits", 4))
    if bits not in (2, 4, 8):
        raise CheckpointError(f"{tensors.where}: GPTQ with {bits} bits; read are 2, 4 and 8")
    known = ("gptq", "gptq_v2")
    form = config.get("checkpoint_format") or "gptq"
    if form not in known:
        raise CheckpointError(f"{tensors.where}: GPTQ in the format {form!r}; read are {', '.join(known)}")
    found = Quantized("GPTQ")
    for base in tensors.names(".qweight"):
        q = unpack_columns(transposed(tensors.leaf(f"{base}.qweight", 2)), 32, bits)
        scales = transposed(tensors.leaf(f"{base}.scales", 2))
        zeros = transposed(unpack_columns(tensors.leaf(f"{base}.qzeros", 2), 32, bits))
        if form == "gptq":
            # Less one, and 2^bits - 1 for a zero of 0: unpacked again, the sum keeps its lowest bits.
            one_more = elementwise("add", zeros, 1)
            zeros = unpack_columns(one_more, bits, bits)
        index = tensors.optional(f"{base}.g_idx", 1)
        found.weights[f"{base}.weight"] = _weight(tensors, base, q, scales, zeros, index, bits, config)
    return found


def read_awq(tensors: Tensors, config: Mapping[str, Any]) -> Quantized:
    """Raises CheckpointError for another packing than GEMM's or other than 4 bits."""
    bits, version = int(config.get("bits", config.get("w_bit", 4))), str(config.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise CheckpointError(f"{tensors.where}: AutoAWQ with {bits} bits, packed for {version.upper()}; read are "
                              "4 bits packed for GEMM")
    found = Quantized("AutoAWQ")
    for base in tensors.names(".qweight"):
        q = unpack_rows(transposed(tensors.leaf(f"{base}.qweight", 2)), 32, bits, _AWQ_ORDER)
        scales = transposed(tensors.leaf(f"{base}.scales", 2))
        zeros = transposed(unpack_columns(tensors.leaf(f"{base}.qzeros", 2), 32, bits, _AWQ_ORDER))
        found.weights[f"{base}.weight"] = _weight(tensors, base, q, scales, zeros, None, bits, config)
    return found


def _weight(tensors: Tensors, base: str, q: WeightExpr, scales: WeightExpr, zeros: WeightExpr,
            index: WeightExpr | None, bits: int, config: Mapping[str, Any]) -> QuantizedWeight:
    """q i32 [N, K], scales f32 [N, G], zeros i32 [N, G], index i32 [K]: the group of each channel."""
    (n, k), groups = q.shape, scales.shape[1]
    asked = int(config.get("group_size", config.get("q_group_size", -1)))
    size = asked if 0 < asked <= k else k
    if scales.shape != (n, -(-k // size)) or zeros.shape != scales.shape or (index is not None and index.shape != (k,)):
        raise CheckpointError(f"{tensors.where}: {base}: qweight holds {n} rows of {k}, scales are for "
                              f"{scales.shape[0]} rows of {groups} groups, zeros for {zeros.shape[0]} rows of "
                              f"{zeros.shape[1]}; expected groups of {size}")
    ordered = bool(config.get("desc_act", False)) and index is not None
    if ordered:
        assert index is not None
        scales, zeros = (take_columns(x, reshape(index, (1, k))) for x in (scales, zeros))
    elif groups > 1:
        scales, zeros = repeat(scales, -1, size, k), repeat(zeros, -1, size, k)
    weight = elementwise("mul", elementwise("sub", q, zeros), scales)
    shown = f"int{bits}, {f'groups of {size}' if groups > 1 else 'one scale a row'}" + (
        ", channels in act-order" if ordered else "")
    # Channels in act-order that share a block of 32 have scales of different groups.
    keeps = bits <= 4 and not ordered and size % 32 == 0
    on_gpus = int4_groups(size, k, bool(config.get("sym", False))) if keeps else ""
    return QuantizedWeight(weight, shown, "w4a8" if keeps else "", on_gpus)
