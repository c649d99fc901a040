"""What passes make of quantized checkpoints: which schemes layers get, what is merged, and what the report says."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from ingot.compiler.cache.calibration import Calibration
from ingot.compiler.checkpoint.checkpoint import Checkpoint
from ingot.compiler.checkpoint.open import open_checkpoint
from ingot.compiler.checkpoint.quantized import (
    equal_tensors,
    quantization_report,
    read_quantized,
    with_equal_tensors_shared,
)
from ingot.compiler.importer.importer import import_model
from ingot.compiler.ir.graph import Graph
from ingot.compiler.passes.pipeline import cpu_pipeline, gpu_pipeline, run_passes
from ingot.compiler.precision import find_precision, with_layers
from ingot.compiler.quality_graph import QuantizedGraph
from ingot.compiler.refit import CannotRefit, RefitRequest, refit
from ingot.compiler.targets import find_target
from tests.compiler.checkpoint.quantized.layouts import LAYOUTS, fp8_tensor, write_checkpoint
from tests.compiler.checkpoint.quantized.test_read import IDS, engine_logits, logits, small_model


def for_gpu(folder: Path, target: str, precision: str) -> tuple[Checkpoint, Graph]:
    checkpoint = open_checkpoint(folder)
    graph = with_equal_tensors_shared(import_model(checkpoint, 64).graph, equal_tensors(checkpoint))
    chosen = find_precision(precision, find_target(target).gpu)
    return checkpoint, run_passes(graph, gpu_pipeline(chosen, chosen.kv))


@pytest.mark.parametrize(("name", "target", "precision", "scheme"), [
    ("modelopt fp8", "h200", "fp8", "fp8"), ("deepseek", "h200", "fp8", "fp8_block"),
    ("modelopt smoothquant", "a100", "int8", "int8_token"), ("compressed nvfp4", "b200", "nvfp4", "nvfp4")])
def test_gpu_engines_keep_all_weights(name: str, target: str, precision: str, scheme: str, tmp_path: Path) -> None:
    """In each layer q, k and v are one matrix and gate and up are, where nothing is in the way."""
    model = small_model(num_hidden_layers=1)
    write_checkpoint(tmp_path, model, LAYOUTS[name])
    checkpoint, graph = for_gpu(tmp_path, target, precision)
    quantized = QuantizedGraph(graph, True)
    # Blocks as wide as the matrix are one scale a row.
    kept = [weight for weight in quantized.weights if weight.packing.scheme in (scheme, scheme.removesuffix("_block"))]
    # Factors of nvfp4 that differ keep matrices apart.
    assert all(weight.is_carried for weight in kept) and len(kept) == (7 if scheme == "nvfp4" else 4)
    assert sum(node.attrs.get("gated") == "silu" for node in graph.nodes) == (scheme != "nvfp4")
    found = read_quantized(checkpoint)
    assert found is not None
    manifest, lines = quantization_report(found, quantized.weights, target, True)
    assert all(row["kept"] for row in manifest["weights"]) and sum(row["count"] for row in manifest["weights"]) == 7
    assert not any("become" in line for line in lines)
    got = np.concatenate(list(quantized.scorer(checkpoint, Calibration())(IDS)))
    want = logits(model)
    # Inputs are rounded, to four bits in nvfp4; weights are not.
    assert np.abs(got - want).max() < {"nvfp4": 0.3}.get(scheme, 0.06) * np.abs(want).max()


def test_what_the_checkpoint_leaves_alone_is_left_alone(tmp_path: Path) -> None:
    """Floats stay floats and FP8 stays FP8 in an engine that keeps NVFP4; what the user names is as named."""
    floats, fp8 = "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"
    layout = LAYOUTS["modelopt nvfp4"]
    model = small_model(num_hidden_layers=1)
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    write_checkpoint(tmp_path, model, layout)
    file = tmp_path / "model.safetensors"
    tensors = {name: value for name, value in load_file(file).items() if not name.startswith((floats, fp8))}
    tensors |= {f"{fp8}.{part}": value for part, value in fp8_tensor(plain[f"{fp8}.weight"])[0].items()}
    save_file(tensors | {f"{floats}.weight": plain[f"{floats}.weight"]}, file)

    def schemes(precision: str, **layers: str) -> dict[str, str]:
        gpu = find_target("b200").gpu
        named = {name.replace("__", "."): to for name, to in layers.items()}
        chosen = with_layers(find_precision(precision, gpu), named, gpu)
        graph = run_passes(import_model(open_checkpoint(tmp_path), 64).graph, gpu_pipeline(chosen, chosen.kv))
        return {node.values[1].removesuffix(".weight"): node.attrs["scheme"] for node in graph.nodes
                if node.op == "linear"}

    kept = schemes("nvfp4")
    assert (kept[floats], kept[fp8]) == ("bf16", "fp8")
    assert all(scheme == "nvfp4" for name, scheme in kept.items() if name not in (floats, fp8, "lm_head"))
    assert schemes("nvfp4", model__layers__0__self_attn__o_proj="nvfp4")[floats] == "nvfp4"
    assert schemes("int8")[floats] == "int8_token"  # which keeps nothing of this checkpoint


def test_equal_scales_of_inputs_are_applied_once(tmp_path: Path) -> None:
    """Layers that read the same are merged, and the norm before them takes the scales in."""
    write_checkpoint(tmp_path, small_model(num_hidden_layers=1), LAYOUTS["modelopt smoothquant"])
    checkpoint = open_checkpoint(tmp_path)
    imported, precision = import_model(checkpoint, 64).graph, find_precision("int8")
    stored = {"model.layers.0." + name: "int8" for name in ("self_attn.q_proj.weight",)}
    apart = run_passes(imported, cpu_pipeline(precision, "bf16", stored))
    equal = equal_tensors(checkpoint)
    assert equal["model.layers.0.self_attn.v_proj.pre_quant_scale"] == equal[
        "model.layers.0.self_attn.q_proj.pre_quant_scale"] == "model.layers.0.mlp.gate_proj.pre_quant_scale"
    shared = run_passes(with_equal_tensors_shared(imported, equal), cpu_pipeline(precision, "bf16", {}))

    def count(graph: Graph, op: str) -> int:
        return sum(node.op == op for node in graph.nodes)

    assert count(shared, "linear") == 5 and count(apart, "linear") > 5
    values = [node.values[0] for node in shared.nodes if node.op == "quantize"]
    made = {value: node.op for node in shared.nodes for value in node.outputs}
    assert len(values) == len(set(values)) and "add_rms_norm" in {made[value] for value in values}


def test_scales_that_differ_stay_apart(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, small_model(num_hidden_layers=1), LAYOUTS["modelopt smoothquant"])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    key = "model.layers.0.self_attn.k_proj.pre_quant_scale"
    tensors[key] = tensors[key] * 2
    save_file(tensors, file)
    equal = equal_tensors(open_checkpoint(tmp_path))
    assert key not in equal and len(equal) == 3  # up, q and v are as gate; those of down and o have other widths


def test_a_refit_asks_for_the_same_equal_scales(tmp_path: Path) -> None:
    """An engine whose q, k and v share the scales of their inputs is not for a checkpoint where they differ."""
    model = small_model(num_hidden_layers=1)
    write_checkpoint(tmp_path / "model", model, LAYOUTS["modelopt smoothquant"])
    got = engine_logits(tmp_path, "int8")
    want = logits(model)
    assert np.abs(got - want).max() < 0.03 * np.abs(want).max()
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    key = "model.layers.0.self_attn.k_proj.pre_quant_scale"
    save_file(tensors | {key: tensors[key] * 2}, file)
    with pytest.raises(CannotRefit, match=r"whose scales are equal.*others. The first is .*k_proj.pre_quant_scale"):
        refit(RefitRequest(tmp_path / "x.engine", str(tmp_path / "model"), tmp_path / "y.engine"))
