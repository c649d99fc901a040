"""The importer end to end: a small random checkpoint, imported and interpreted, equals transformers in fp32."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ingot.compiler.checkpoint.errors import BadWeights
from ingot.compiler.checkpoint.open import open_checkpoint
from ingot.compiler.importer.errors import CheckpointMismatch, ImportRefused
from ingot.compiler.importer.importer import ImportedModel, import_config, import_model
from ingot.compiler.ir.interpret import run
from tools.small_models import NUM_TOKENS, save_random, small_config


def i32(values: list[Any]) -> np.ndarray:
    return np.array(values, np.int32)


IDS = np.random.default_rng(1).integers(8, 512, NUM_TOKENS).astype(np.int32)


def logits_of(folder: Path, **options: Any) -> np.ndarray:
    checkpoint = open_checkpoint(folder)
    graph = import_model(checkpoint, **options).graph
    inputs = {"token_ids": IDS, "positions": np.arange(NUM_TOKENS, dtype=np.int32)}
    return run(graph, inputs, checkpoint)[graph.outputs[0]]


def reference(folder: Path) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.from_numpy(IDS).long()[None], use_cache=False).logits[0].numpy()


def assert_agrees(folder: Path, **options: Any) -> None:
    got, expected = logits_of(folder, **options), reference(folder)
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "untied, biases, llama3 scaling": ("llama", {
        "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                            "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}),
    "windows, norms of q and k, 1 + w": ("gemma3_text", {}),
    "soft caps": ("gemma2", {}),
    "experts with biases, interleaved and transposed; sinks": ("gpt_oss", {}),
    "experts merged from one tensor each": ("mixtral", {}),
    "latent attention, groups of experts, shared experts": ("deepseek_v3", {}),
    "chunks, complex rotation": ("llama4_text", {}),
    "learned positions, transposed weights": ("gpt2", {}),
    "attention written out, local": ("gpt_neo", {}),
    "torch's attention": ("falcon", {}),
    "partial rotation": ("stablelm", {}),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_interpretation_equals_transformers(name: str, tmp_path: Path) -> None:
    model_type, overrides = MODELS[name]
    save_random(small_config(model_type, **overrides), tmp_path)
    assert_agrees(tmp_path)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_random(small_config("llama"), folder)
    return folder


@pytest.fixture(scope="module")
def imported(llama: Path) -> ImportedModel:
    return import_model(open_checkpoint(llama))


def test_the_graph_is_in_normal_form(imported: ImportedModel) -> None:
    """No transposition is left in a model whose own code transposes around attention; equal values are one."""
    ops = [node.op for node in imported.graph.nodes]
    assert "permute" not in ops and ops.count("cos") == ops.count("sin") == ops.count("embedding") == 1
    keys = [(n.op, n.inputs, str(n.attrs)) for n in imported.graph.nodes]
    assert len(set(keys)) == len(keys)


def test_slots_count_the_calls(imported: ImportedModel) -> None:
    calls = [n for n in imported.graph.nodes if n.op == "attention"]
    assert [n.attrs["slot"] for n in calls] == [0, 1]
    assert imported.graph.types[calls[0].values[0]].shape == ("T", 4, 16)


def test_probes_are_the_outputs_of_the_modules(llama: Path, imported: ImportedModel) -> None:
    graph, checkpoint, seen = imported.graph, open_checkpoint(llama), {}
    assert list(graph.probes) == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"]
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    for path in graph.probes:
        model.get_submodule(path).register_forward_hook(
            lambda module, args, out, path=path: seen.update({path: out[0] if isinstance(out, tuple) else out}))
    with torch.no_grad():
        model(torch.from_numpy(IDS).long()[None])
    values = run(graph, {"token_ids": IDS, "positions": np.arange(NUM_TOKENS, dtype=np.int32)}, checkpoint,
                 keep=graph.probes.values())
    for path, value in graph.probes.items():
        np.testing.assert_allclose(values[value], seen[path].numpy(), rtol=1e-4, atol=1e-5)


def test_origins_name_module_and_line(imported: ImportedModel) -> None:
    attention = next(n for n in imported.graph.nodes if n.op == "attention")
    assert attention.origin.startswith("model.layers.0.self_attn (modeling_llama.py:")
    assert all(node.origin for node in imported.graph.nodes)


def test_the_positions_decide_the_rotation(llama: Path, imported: ImportedModel) -> None:
    """A step need not begin at position 0."""
    graph, checkpoint = imported.graph, open_checkpoint(llama)
    at_0, at_5 = (run(graph, {"token_ids": IDS[:4], "positions": np.arange(4, dtype=np.int32) + start}, checkpoint,
                      keep=["positions"]) for start in (0, 5))
    shifted = graph.outputs[0]
    np.testing.assert_allclose(at_0[shifted], at_5[shifted], rtol=1e-4, atol=1e-4)  # attention sees only differences
    stretched = run(graph, {"token_ids": IDS[:4], "positions": i32([0, 3, 6, 9])}, checkpoint)[shifted]
    assert np.abs(stretched - at_0[shifted]).max() > 1e-3


def test_a_dry_run_gives_the_same_graph(llama: Path, imported: ImportedModel) -> None:
    dry = import_config(open_checkpoint(llama).config)
    assert dry.graph.nodes == imported.graph.nodes and set(dry.graph.constants) == set(imported.graph.constants)


def edited(llama: Path, folder: Path, **changes: torch.Tensor | None) -> Path:
    """A copy of the checkpoint with tensors replaced or (None) left out."""
    tensors = {**load_file(llama / "model.safetensors"), **changes}
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / "model.safetensors")
    (folder / "config.json").write_text((llama / "config.json").read_text())
    return folder


Q0 = "model.layers.0.self_attn.q_proj.weight"


def test_missing_tensors_name_both_sides(llama: Path, tmp_path: Path) -> None:
    folder = edited(llama, tmp_path, **{Q0: None, "model.layers.0.self_attn.q_porj.weight": torch.zeros(64, 64)})
    with pytest.raises(CheckpointMismatch) as error:
        import_model(open_checkpoint(folder))
    text = str(error.value)
    assert "lacks 1 of the tensors that LlamaForCausalLM needs" in text and Q0 in text
    assert "similar: model.layers.0.self_attn.q_porj.weight" in text


def test_missing_experts_name_what_the_checkpoint_would_call_them(tmp_path: Path) -> None:
    save_random(small_config("mixtral"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if "layers.1.block_sparse_moe.experts" not in n},
              tmp_path / "model.safetensors")
    with pytest.raises(CheckpointMismatch, match=r"model.layers.1.mlp.experts.gate_up_proj .*in the checkpoint: .*"
                                                 r"layers.1.block_sparse_moe.experts"):
        import_model(open_checkpoint(tmp_path))


def test_another_shape_names_both(llama: Path, tmp_path: Path) -> None:
    folder = edited(llama, tmp_path, **{Q0: torch.zeros(64, 32)})
    with pytest.raises(CheckpointMismatch, match=r"q_proj.weight .* the shape \[64, 64\] by the configuration, the "
                                                 r"checkpoint gives \[64, 32\]"):
        import_model(open_checkpoint(folder))


def test_unused_tensors_are_a_warning(llama: Path, tmp_path: Path) -> None:
    folder = edited(llama, tmp_path, **{"model.layers.7.extra": torch.zeros(2)})
    assert import_model(open_checkpoint(folder)).warnings == [
        "1 tensors of the checkpoint are not used: model.layers.7.extra"]


def test_nan_is_found_when_the_weight_is_evaluated(llama: Path, tmp_path: Path) -> None:
    w = torch.zeros(64, 64)
    w[3, 9] = torch.nan
    folder = edited(llama, tmp_path, **{Q0: w})
    with pytest.raises(BadWeights, match=r"q_proj.weight holds nan at \[3, 9\]"):
        logits_of(folder)


def test_checkpoints_of_the_base_model_have_no_prefix(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    save_file({n.removeprefix("model."): t for n, t in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    assert (logits_of(tmp_path) == logits_of(llama)).all()


def test_tied_weights_that_the_checkpoint_holds_both_of(tmp_path: Path) -> None:
    """The configuration says tied, the tensors differ: as transformers does, each is used as it is."""
    save_random(small_config("llama", tie_word_embeddings=False), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert_agrees(tmp_path)


def test_long_rope_is_decided_by_the_longest_sequence(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 64, "factor": 2.0}
    save_random(small_config("phi3", rope_parameters=rope, original_max_position_embeddings=64), tmp_path)
    assert_agrees(tmp_path, max_seq_len=64)
    long = import_model(open_checkpoint(tmp_path))
    assert "max_seq_len = 128" in long.warnings[0]
    assert np.abs(logits_of(tmp_path) - reference(tmp_path)).max() > 1e-3


@pytest.mark.parametrize(("model_type", "overrides", "message"), [
    ("t5", {}, "encoder-decoder"),
    ("vit", {}, "no causal language model"),
    ("bert", {"is_decoder": False}, "attention to later tokens|not causal"),
    ("mamba", {}, r"what it computes depends on their number, at modeling_mamba.py:\d+"),
    ("bloom", {}, r"adds values to the scores .*\n  in transformer.h.0.self_attention \(modeling_bloom.py:\d+\)"),
    ("roberta", {}, r"cumsum: works along the tokens.*\n  in roberta.embeddings \(modeling_roberta.py:\d+\)"),
    ("lfm2", {}, r"T tokens of a step|convolution"),
    ("deepseek_v32", {}, "DeepseekV32Attention: attention with the argument indices is not supported"),
])
def test_refusals(model_type: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ImportRefused, match=message):
        import_config(small_config(model_type, **overrides))
