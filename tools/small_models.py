"""Small random models of any architecture that transformers has: the default configuration with small dimensions, few
layers (each kind of layer once), few experts, and windows shorter than the texts that they are tried on."""
from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

NUM_TOKENS = 40
"""Length of the texts: longer than every window below."""

_WINDOW = 8
_HIDDEN, _HEADS, _HEAD_DIM = 64, 4, 16

_SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "embedding_size", "word_embed_proj_dim"),
                    _HIDDEN),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "decoder_ffn_dim",
                     "encoder_ffn_dim", "dim_ff"), 96),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads",
                     "decoder_attention_heads", "swa_num_attention_heads"), _HEADS),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "global_head_dim", "swa_head_dim",
                     "swa_v_head_dim", "attention_head_dim"), _HEAD_DIM),
    **dict.fromkeys(("qk_rope_head_dim", "index_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
                     "shared_intermediate_size", "moe_shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "n_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts",
                     "experts_per_token", "moe_top_k"), 2),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "local_attention", "attention_window_size",
                     "sliding_window_size", "local_window_size", "window_size", "swa_window"), _WINDOW),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"), 128),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "type_vocab_size"), 512),
    **dict.fromkeys(("num_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers"), 2),
    "n_group": 2, "topk_group": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "index_n_heads": 2,
    "index_topk": 64, "hidden_size_per_layer_input": 16, "image_size": 32, "patch_size": 8, "first_k_dense_replace": 1,
    "image_token_id": 3, "video_token_id": 4, "audio_token_id": 5, "boi_token_id": 6, "eoi_token_id": 7,
    "image_token_index": 3, "vision_start_token_id": 6, "vision_end_token_id": 7, "kv_channels": _HEAD_DIM,
}

_GIVEN_WHERE_UNSET = ("head_dim", "num_experts_per_tok", "n_routed_experts", "pad_token_id", "bos_token_id",
                      "eos_token_id", "moe_intermediate_size", "num_experts")
"""Sizes that are chosen even where the default configuration leaves them open."""

_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_global_key_value_heads",
             "swa_num_key_value_heads")


_SPECIAL = yaml.safe_load(Path(__file__).with_name("small_models.yaml").read_text())
"""Attributes that some classes need besides; what they are called and why stands there."""


def small_config(model_type: str, **overrides: Any) -> PretrainedConfig:
    """overrides: attributes of the text part that are given instead of chosen."""
    return _small(CONFIG_MAPPING[model_type], {**_SPECIAL.get(model_type, {}), **overrides})


def _small(config_class: type[PretrainedConfig], overrides: dict[str, Any]) -> PretrainedConfig:
    default = config_class()
    values = {k: v for k, v in default.to_dict().items() if k not in ("model_type", "transformers_version")}
    chosen: dict[str, Any] = {}
    for name in config_class.sub_configs:
        sub = getattr(default, name, None)
        if isinstance(sub, PretrainedConfig):
            is_text = sub is default.get_text_config()
            chosen[name] = _small(type(sub), overrides if is_text else {}).to_dict()
    if any(getattr(default, name, None) is default.get_text_config() for name in config_class.sub_configs):
        overrides = {}
    for name, value in values.items():
        if name in chosen:
            continue
        if name in _SIZES and (type(value) is int or (value is None and name in _GIVEN_WHERE_UNSET)):
            chosen[name] = _SIZES[name]
        elif name in _KV_HEADS and isinstance(value, int):
            chosen[name] = value if value == 1 else 2 if value != values.get("num_attention_heads") else _HEADS
    if "is_decoder" in values:
        chosen["is_decoder"] = True
    chosen |= _layers(default, values)
    chosen |= {name: _small_rope(value) for name, value in values.items() if name == "rope_parameters" and value}
    accepted = inspect.signature(config_class.__init__).parameters
    takes_all = any(p.kind == inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    chosen = {k: v for k, v in (chosen | overrides).items() if k in accepted or takes_all}
    return config_class(**chosen)


def _layers(default: PretrainedConfig, values: dict[str, Any]) -> dict[str, Any]:
    """Two layers or more, so that each combination of what is chosen by layer occurs."""
    try:
        count = default.num_hidden_layers
    except AttributeError:
        return {}
    if not isinstance(count, int):
        return {}
    name = next((k for k in ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
                 if k in values), "num_hidden_layers")
    lists = {k: v for k, v in values.items() if isinstance(v, list) and len(v) == count > 1}
    kinds = [tuple(str(v[i]) for v in lists.values()) for i in range(count)]
    first = sorted({kinds.index(kind) for kind in kinds})[:6]
    indices = first if len(first) > 1 else [0, 1][:max(count, 1)]
    return {name: len(indices), **{k: [v[i] for i in indices] for k, v in lists.items()}}


def _small_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Scaled kinds keep their scaling; the lists of the long kind have one factor a frequency."""
    small = {k: _small_rope(v) if isinstance(v, dict) else v for k, v in rope.items()}
    for name in ("short_factor", "long_factor"):
        if isinstance(small.get(name), list):
            count = int(_HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
            small[name] = rope[name][:count]
    return small


def random_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Weights of a size that keeps every part of the model in play, biases and norms that are not neutral."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim > 1:
                parameter.copy_(noise * 0.08)
            else:
                parameter.add_(noise * 0.1)
    return model


def save_random(config: PretrainedConfig, folder: Path, seed: int = 0) -> PreTrainedModel:
    """Writes the checkpoint; returns the model that transformers would load from it."""
    model = random_model(config, seed)
    model.save_pretrained(folder)
    return model
