"""GGUF as a source of weights: a small model written as llama.cpp's converter does gives transformers' logits."""
from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from ingot.compiler.checkpoint.errors import CheckpointError
from ingot.compiler.checkpoint.open import open_checkpoint
from ingot.compiler.importer.importer import import_model
from ingot.compiler.ir.interpret import run
from tools.small_models import random_model, small_config

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
}


def gguf_name(name: str) -> str:
    name = name.replace("model.layers.", "blk.")
    for own, theirs in sorted(NAMES.items(), key=lambda item: -len(item[0])):
        name = name.replace(own + ".", theirs + ".")
    return name


def interleaved(w: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp rotates neighbours where transformers rotates halves: the rows of each head change places."""
    return w.reshape(heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def write(path: Path, model: PreTrainedModel, architecture: str) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("small")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if architecture == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    for name, parameter in model.state_dict().items():
        value = parameter.numpy()
        if architecture == "llama" and "q_proj" in name:
            value = interleaved(value, config.num_attention_heads)
        if architecture == "llama" and "k_proj" in name:
            value = interleaved(value, config.num_key_value_heads)
        block = ".".join(name.split(".")[:3]).replace("model.layers.", "blk.")
        if name.endswith("experts.gate_up_proj"):
            for part, kind in zip(np.split(value, 2, axis=1), ("gate", "up"), strict=True):
                writer.add_tensor(f"{block}.ffn_{kind}_exps.weight", np.ascontiguousarray(part))
        elif name.endswith("experts.down_proj"):
            writer.add_tensor(f"{block}.ffn_down_exps.weight", value)
        else:
            writer.add_tensor(gguf_name(name), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("model_type", "architecture", "overrides"), [
    ("llama", "llama", {}),
    ("qwen3", "qwen3", {"head_dim": 128}),  # transformers takes its default instead of the file's
    ("qwen3_moe", "qwen3moe", {})])  # and here its default sizes of experts
def test_logits_equal_transformers(model_type: str, architecture: str, overrides: dict[str, int], tmp_path: Path,
                                   ) -> None:
    model = random_model(small_config(model_type, tie_word_embeddings=False, **overrides))
    write(tmp_path / "model.gguf", model, architecture)
    checkpoint = open_checkpoint(tmp_path)
    if "moe" in model_type:
        vars(checkpoint)["config"] = model.config
    imported = import_model(checkpoint)
    ids = np.arange(30, dtype=np.int32) * 7 % 500
    graph = imported.graph
    got = run(graph, {"token_ids": ids, "positions": np.arange(30, dtype=np.int32)}, checkpoint)[graph.outputs[0]]
    with torch.no_grad():
        expected = model(torch.from_numpy(ids).long()[None]).logits[0].numpy()
    assert imported.warnings == []
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def test_an_architecture_that_is_not_known(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "unheard-of")
    writer.add_tensor("w", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"cannot make a configuration .*unheard-of"):
        import_model(open_checkpoint(tmp_path))


@pytest.mark.slow
def test_a_real_file_gives_the_same_model_as_the_checkpoint_made_of_it(smollm2_gguf: Path, smollm2_checkpoint: Path,
                                                                      ) -> None:
    unpacked, saved = (open_checkpoint(path) for path in (smollm2_gguf, smollm2_checkpoint))
    graphs = [import_model(checkpoint).graph for checkpoint in (unpacked, saved)]
    assert graphs[0].nodes == graphs[1].nodes and set(graphs[0].constants) == set(graphs[1].constants)
