"""Writers of quantized checkpoints, from the layouts as published; they share no code with the readers.

Each takes a matrix [N, K] and gives the tensors that hold it, and the matrix that these tensors stand for.
"""
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig, PreTrainedModel

Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, torch.Tensor]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def to_fp8(w: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q = (w / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return q, q.float() * scale


def fp8_tensor(w: torch.Tensor) -> Written:
    scale = w.abs().max() / 448
    q, value = to_fp8(w, scale)
    return {"weight": q, "weight_scale": scale, "input_scale": torch.tensor(0.01)}, value


def fp8_row(w: torch.Tensor, column: bool = False) -> Written:
    scale = w.abs().amax(1) / 448
    q, value = to_fp8(w, scale[:, None])
    return {"weight": q, "weight_scale": scale[:, None] if column else scale}, value


def fp8_blocks(w: torch.Tensor, size: int = 128) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scales [N / size, K / size], value); the last blocks may be smaller."""
    n, k = w.shape
    scale = torch.empty(-(-n // size), -(-k // size))
    q, value = torch.empty_like(w, dtype=torch.float8_e4m3fn), torch.empty_like(w)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
            scale[i, j] = w[part].abs().max() / 448
            q[part], value[part] = to_fp8(w[part], scale[i, j])
    return q, scale, value


def modelopt_fp8_blocks(w: torch.Tensor) -> Written:
    q, scale, value = fp8_blocks(w)
    return {"weight": q, "weight_scale": scale[:, None, :, None]}, value


def deepseek_fp8(w: torch.Tensor) -> Written:
    q, scale, value = fp8_blocks(w)
    return {"weight": q, "weight_scale_inv": scale}, value


def compressed_fp8_blocks(w: torch.Tensor) -> Written:
    q, scale, value = fp8_blocks(w)
    return {"weight": q, "weight_scale": scale}, value


def grouped_int4(w: torch.Tensor, size: int = 128) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(i64 [N, K] in -8..7, scale [N, G], value)."""
    groups = w.reshape(len(w), -1, size)
    scale = (groups.abs().amax(2) / 7).half().float()
    q = (groups / scale[..., None]).round().clamp(-8, 7)
    return q.long().reshape(w.shape), scale, (q * scale[..., None]).reshape(w.shape)


def zero_int4(w: torch.Tensor, size: int, bits: int = 4) -> tuple[torch.Tensor, ...]:
    """(i64 [N, K] in 0..2^bits-1, scale f16 [N, G], zero i64 [N, G], value)."""
    top = 2**bits - 1
    groups = w.reshape(len(w), -1, size)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scale = ((high - low) / top).half().float()
    zero = (-low / scale).round().clamp(0, top)
    q = (groups / scale[..., None] + zero[..., None]).round().clamp(0, top)
    value = ((q - zero[..., None]) * scale[..., None]).reshape(w.shape)
    return q.long().reshape(w.shape), scale.half(), zero.long(), value


def into_words(q: torch.Tensor, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """i64 [N, C * 32 / bits] -> i32 [N, C]; order: which element lies at each place from the lowest bits on."""
    per = 32 // bits
    words = torch.zeros(q.shape[0], q.shape[1] // per, dtype=torch.int64)
    for place, element in enumerate(order or range(per)):
        words |= q[:, element::per] << (bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def modelopt_awq(w: torch.Tensor) -> Written:
    """The layer's inputs are multiplied by pre_quant_scale, so its weight is that of the scaled inputs."""
    inputs = (torch.arange(w.shape[1]) % 5 * 0.25 + 0.5).bfloat16()
    q, scale, value = grouped_int4(w / inputs.float())
    low, high = q[0::2] & 15, q[1::2] & 15
    return {"weight": (low | high << 4).to(torch.uint8), "weight_scale": scale, "pre_quant_scale": inputs}, \
        value * inputs.float()


def modelopt_w4a8(w: torch.Tensor) -> Written:
    q, scale, value = grouped_int4(w)
    return {"weight": (q[0::2] & 15 | (q[1::2] & 15) << 4).to(torch.uint8), "weight_scale": scale,
            "weight_scale_2": torch.tensor(0.5), "input_scale": torch.tensor(0.01)}, value


def int8_row(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale = w.abs().amax(1) / 127
    q = (w / scale[:, None]).round()
    return q.to(torch.int8), scale, q * scale[:, None]


def modelopt_smoothquant(w: torch.Tensor) -> Written:
    inputs = (torch.arange(w.shape[1]) % 3 * 0.5 + 0.5).bfloat16()
    q, scale, value = int8_row(w / inputs.float())
    return {"weight": q, "weight_scale": scale, "input_scale": torch.tensor(0.01), "pre_quant_scale": inputs}, \
        value * inputs.float()


def e2m1_codes(w: torch.Tensor) -> torch.Tensor:
    """The nearest of the sixteen values."""
    return (w[..., None] - E2M1).abs().argmin(-1)


def nvfp4(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes two a byte, e4m3 scales, their scale, value)."""
    groups = w.reshape(len(w), -1, 16)
    outer = w.abs().max() / (6 * 448)
    scale = (groups.abs().amax(2) / 6 / outer).to(torch.float8_e4m3fn)
    whole = (scale.float() * outer)[..., None]
    codes = e2m1_codes(groups / whole).reshape(w.shape)
    value = (E2M1[codes].reshape(groups.shape) * whole).reshape(w.shape)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8), scale, outer, value


def modelopt_nvfp4(w: torch.Tensor) -> Written:
    codes, scale, outer, value = nvfp4(w)
    return {"weight": codes, "weight_scale": scale, "weight_scale_2": outer, "input_scale": torch.tensor(0.01)}, value


def compressed_nvfp4(w: torch.Tensor) -> Written:
    codes, scale, outer, value = nvfp4(w)
    return {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": (1 / outer).reshape(1)}, value


def powers_of_two(w: torch.Tensor, most: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(groups of 32, their scale, that scale's exponent as e8m0); the largest is at most `most` steps."""
    groups = w.reshape(len(w), -1, 32)
    exponent = torch.ceil(torch.log2(groups.abs().amax(2) / most))
    return groups, (2.0 ** exponent)[..., None], (exponent + 127).to(torch.uint8)


def compressed_mxfp4(w: torch.Tensor) -> Written:
    groups, scale, exponent = powers_of_two(w, 6)
    codes = e2m1_codes(groups / scale).reshape(w.shape)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    value = (E2M1[codes].reshape(groups.shape) * scale).reshape(w.shape)
    return {"weight_packed": packed, "weight_scale": exponent}, value


def compressed_mxfp8(w: torch.Tensor) -> Written:
    groups, scale, exponent = powers_of_two(w, 448)
    q = (groups / scale).to(torch.float8_e4m3fn)
    return {"weight": q.reshape(w.shape), "weight_scale": exponent}, (q.float() * scale).reshape(w.shape)


def compressed_int8(w: torch.Tensor) -> Written:
    q, scale, value = int8_row(w)
    return {"weight": q, "weight_scale": scale[:, None]}, value


def compressed_int8_zero(w: torch.Tensor) -> Written:
    q, scale, zero, value = zero_int4(w, w.shape[1], 8)
    tensors = {"weight": q - 128, "weight_zero_point": zero - 128}
    return {name: t.to(torch.int8) for name, t in tensors.items()} | {"weight_scale": scale}, value


def compressed_w4a16(w: torch.Tensor) -> Written:
    q, scale, value = grouped_int4(w)
    return {"weight_packed": into_words(q + 8, 4), "weight_scale": scale, "weight_shape": torch.tensor(w.shape)}, value


def compressed_w4a16_zero(w: torch.Tensor) -> Written:
    q, scale, zero, value = zero_int4(w, 32)
    return {"weight_packed": into_words(q, 4), "weight_scale": scale, "weight_shape": torch.tensor(w.shape),
            "weight_zero_point": into_words(zero.T.contiguous(), 4).T.contiguous()}, value


def awq(w: torch.Tensor) -> Written:
    q, scale, zero, value = zero_int4(w, 64)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {"qweight": into_words(q.T, 4, order), "qzeros": into_words(zero.T, 4, order),
            "scales": scale.T.contiguous()}, value


def gptq(w: torch.Tensor, bits: int = 4, size: int = 64, ordered: bool = False, less: int = 1) -> Written:
    """less: what the format takes from zeros. ordered: groups hold channels from all over the matrix."""
    places = torch.randperm(w.shape[1], generator=torch.Generator().manual_seed(0)) if ordered \
        else torch.arange(w.shape[1])
    q, scale, zero, value = zero_int4(w[:, places], size, bits)
    back = places.argsort()
    stored = (zero - less) % 2**bits
    return {"qweight": into_words(q[:, back], bits).T.contiguous(), "qzeros": into_words(stored.T, bits),
            "scales": scale.T.contiguous(), "g_idx": (back // size).to(torch.int32)}, value[:, back]


@dataclass(frozen=True)
class Layout:
    """quantization: goes into config.json, or with `beside` into hf_quant_config.json. shown: the reader's words."""

    write: Callable[[torch.Tensor], Written]
    quantization: dict[str, Any]
    shown: str
    scheme: str = ""
    beside: bool = False
    extra: dict[str, torch.Tensor] = field(default_factory=dict)


def _modelopt(write: Callable[[torch.Tensor], Written], algorithm: str, shown: str, scheme: str = "",
              **extra: torch.Tensor) -> Layout:
    return Layout(write, {"quant_algo": algorithm, "kv_cache_quant_algo": None}, shown, scheme, True,
                  {name.replace("__", "."): value for name, value in extra.items()})


def _compressed(write: Callable[[torch.Tensor], Written], form: str, shown: str, scheme: str = "",
                **weights: Any) -> Layout:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return Layout(write, {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}, shown, scheme)


def _gptq(shown: str, scheme: str = "", form: str = "gptq", **options: Any) -> Layout:
    config = {"quant_method": "gptq", "bits": options.get("bits", 4), "group_size": options.get("size", 64),
              "desc_act": options.get("ordered", False), "checkpoint_format": form, "sym": False}
    return Layout(lambda w: gptq(w, **options, less=int(form == "gptq")), config, shown, scheme)


_SCALES = {f"model__layers__{layer}__self_attn__{part}_proj__{part}_scale": torch.tensor(0.02)
           for layer in range(2) for part in "kv"}

LAYOUTS = {
    "modelopt fp8": _modelopt(fp8_tensor, "FP8", "fp8, one scale a tensor", **_SCALES),
    "modelopt fp8 rows": _modelopt(fp8_row, "FP8_PER_CHANNEL_PER_TOKEN", "fp8, one scale a row"),
    "modelopt fp8 blocks": _modelopt(modelopt_fp8_blocks, "FP8_PB_WO", "fp8, blocks of 128x128"),
    "modelopt awq": _modelopt(modelopt_awq, "W4A16_AWQ", "int4, groups of 128, scaled inputs", "w4a8"),
    "modelopt w4a8": _modelopt(modelopt_w4a8, "W4A8_AWQ", "int4, groups of 128", "w4a8"),
    "modelopt smoothquant": _modelopt(modelopt_smoothquant, "W8A8_SQ_PER_CHANNEL",
                                      "int8, one scale a row, scaled inputs", "int8"),
    "modelopt nvfp4": _modelopt(modelopt_nvfp4, "NVFP4", "nvfp4, groups of 16"),
    "compressed fp8": _compressed(lambda w: fp8_row(w, True), "float-quantized", "fp8, one scale a row", num_bits=8,
                                  type="float", strategy="channel"),
    "compressed fp8 blocks": _compressed(compressed_fp8_blocks, "float-quantized", "fp8, blocks of 128x128", num_bits=8,
                                         type="float", strategy="block", block_structure=[128, 128]),
    "compressed int8": _compressed(compressed_int8, "int-quantized", "int8, one scale a row", "int8", num_bits=8,
                                   type="int", strategy="channel"),
    "compressed int8 zeros": _compressed(compressed_int8_zero, "int-quantized", "int8, one scale a row", num_bits=8,
                                         type="int", strategy="channel", symmetric=False),
    "compressed w4a16": _compressed(compressed_w4a16, "pack-quantized", "int4, groups of 128", "w4a8", num_bits=4,
                                    type="int", strategy="group", group_size=128),
    "compressed w4a16 zeros": _compressed(compressed_w4a16_zero, "pack-quantized", "int4, groups of 32", "w4a8",
                                          num_bits=4, type="int", strategy="group", group_size=32, symmetric=False),
    "compressed mxfp4": _compressed(compressed_mxfp4, "mxfp4-pack-quantized", "mxfp4, groups of 32", num_bits=4,
                                    type="float", strategy="group", group_size=32),
    "compressed mxfp8": _compressed(compressed_mxfp8, "mxfp8-quantized", "fp8, groups of 32", num_bits=8, type="float",
                                    strategy="group", group_size=32),
    "compressed nvfp4": _compressed(compressed_nvfp4, "nvfp4-pack-quantized", "nvfp4, groups of 16", num_bits=4,
                                    type="float", strategy="tensor_group", group_size=16),
    "awq": Layout(awq, {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True},
                  "int4, groups of 64", "w4a8"),
    "gptq": _gptq("int4, groups of 64", "w4a8"),
    "gptq v2": _gptq("int4, groups of 64", "w4a8", "gptq_v2"),
    "gptq act-order": _gptq("int4, groups of 64, channels in act-order", ordered=True),
    "gptq 8 bits": _gptq("int8, groups of 64", bits=8),
    "deepseek": Layout(deepseek_fp8, {"quant_method": "fp8", "weight_block_size": [128, 128],
                                      "activation_scheme": "dynamic"}, "fp8, blocks of 128x128"),
}


def mxfp4(w: torch.Tensor) -> Written:
    """Of experts [E, K, N] -> blocks, scales, value."""
    groups = w.transpose(1, 2).reshape(w.shape[0], w.shape[2], -1, 32)
    exponent = (groups.abs().amax(3).clamp(min=1e-20) / 6).log2().ceil()
    codes = e2m1_codes(groups / torch.exp2(exponent)[..., None])
    value = (E2M1[codes] * torch.exp2(exponent)[..., None]).reshape(w.shape[0], w.shape[2], -1).transpose(1, 2)
    return {"blocks": (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8),
            "scales": (exponent + 127).to(torch.uint8)}, value.contiguous()


def modelopt_fp8_experts(w: torch.Tensor, rows: bool = False) -> Written:
    """Of experts [E, K, N]."""
    scale = (w.abs().amax(1) if rows else w.abs().max()) / 448
    q, value = to_fp8(w, scale[:, None] if rows else scale)
    return {"": q, "_weight_scale": scale, "_input_scale": torch.tensor(0.01)}, value


def modelopt_nvfp4_experts(w: torch.Tensor) -> Written:
    turned = w.transpose(1, 2).contiguous()
    codes, scale, outer, value = nvfp4(turned.flatten(0, 1))
    back = [t.unflatten(0, turned.shape[:2]).transpose(1, 2).contiguous() for t in (codes, scale, value)]
    return {"": back[0], "_weight_scale": back[1], "_weight_scale_2": outer}, back[2]


EXPERTS = {
    "mxfp4": (lambda w: ({f"_{part}": t for part, t in mxfp4(w)[0].items()}, mxfp4(w)[1]), "mxfp4, blocks of 32"),
    "modelopt fp8": (modelopt_fp8_experts, "fp8, one scale a tensor, fused experts"),
    "modelopt fp8 rows": (lambda w: modelopt_fp8_experts(w, True), "fp8, one scale a row, fused experts"),
    "modelopt nvfp4": (modelopt_nvfp4_experts, "nvfp4, groups of 16, fused experts"),
}
"""Writers of parameters that hold all experts of a layer, [E, K, N], and the reader's words."""


def write_checkpoint(folder: Path, model: PreTrainedModel, layout: Layout) -> dict[str, torch.Tensor]:
    """Writes the model with its linear layers quantized, and makes the model's own weights the values that were
    written. Returns these."""
    tensors: Tensors = {f"model.{name}" if name.startswith("layers") else name: t for name, t in layout.extra.items()}
    values: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        base = name.removesuffix(".weight")
        if base.endswith("_proj"):
            parts, values[name] = layout.write(value.float())
            tensors |= {f"{base}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        elif not (name == "lm_head.weight" and model.config.tie_word_embeddings):
            tensors[name] = value
    _save(folder, model.config, tensors, layout.quantization, layout.beside)
    model.load_state_dict(values, strict=False)
    return values


def write_experts(folder: Path, model: PreTrainedModel, layout: str) -> dict[str, torch.Tensor]:
    """As write_checkpoint, with the experts quantized instead. layout: key of EXPERTS."""
    tensors: Tensors = {}
    values: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            parts, values[name] = EXPERTS[layout][0](value.float())
            tensors |= {f"{name}{part}": tensor for part, tensor in parts.items()}
        else:
            tensors[name] = value
    beside = layout.startswith("modelopt")
    _save(folder, model.config, tensors, {"quant_algo": None} if beside else {
        "quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, beside)
    model.load_state_dict(values, strict=False)
    return values


def _save(folder: Path, config: PretrainedConfig, tensors: Tensors, quantization: dict[str, Any], beside: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    entries = json.loads(config.to_json_string(use_diff=False))
    if beside:
        (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"},
                                                                 "quantization": quantization}))
    else:
        entries["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(entries))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
