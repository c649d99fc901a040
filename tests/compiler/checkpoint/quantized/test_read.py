"""Every layout of quantized checkpoints: exactly the weights that were written, in the importer and in an engine."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ingot.compiler.build import BuildRequest, build
from ingot.compiler.checkpoint.errors import CheckpointError
from ingot.compiler.checkpoint.open import open_checkpoint
from ingot.compiler.checkpoint.quantized import quantization_report, read_quantized
from ingot.compiler.reference_model import ReferenceModel
from ingot.compiler.weights.evaluate import evaluate
from ingot.compiler.weights.expr import permute
from ingot.compiler.weights.packed import ROWS, PackedWeight, Packing
from ingot.runtime.engine import Engine
from tests.compiler.checkpoint.quantized.layouts import EXPERTS, LAYOUTS, write_checkpoint, write_experts
from tools.small_models import small_config

IDS = list(range(3, 43, 2))


def small_model(model_type: str = "llama", **sizes: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = small_config(model_type, **{"hidden_size": 256, "intermediate_size": 384, "head_dim": 32,
                                         "tie_word_embeddings": False, **sizes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


def logits(model: PreTrainedModel) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([IDS]), use_cache=False).logits[0].numpy()


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_weights_are_those_that_were_written(name: str, tmp_path: Path) -> None:
    model = small_model()
    values = write_checkpoint(tmp_path, model, LAYOUTS[name])
    checkpoint = open_checkpoint(tmp_path)
    found = read_quantized(checkpoint)
    assert found is not None and found.weights.keys() == values.keys()
    for weight, value in values.items():
        got = found.weights[weight]
        assert got.scheme == LAYOUTS[name].scheme
        if "up_proj" in weight:  # smaller ones may be a single block
            assert got.format == LAYOUTS[name].shown
        whole = evaluate(got.expr, checkpoint)
        np.testing.assert_allclose(whole, value.numpy(), rtol=1e-6, atol=0)
        np.testing.assert_array_equal(evaluate(got.expr, checkpoint, (5, 61)), whole[5:61])
    np.testing.assert_allclose(ReferenceModel(str(tmp_path)).logits(IDS), logits(model), atol=1e-5)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name == "modelopt awq" else pytest.mark.slow) for name in LAYOUTS])
def test_an_engine_computes_with_them(name: str, tmp_path: Path) -> None:
    model = small_model()
    write_checkpoint(tmp_path / "model", model, LAYOUTS[name])
    np.testing.assert_allclose(engine_logits(tmp_path, "fp32"), logits(model), atol=1e-3)


def engine_logits(folder: Path, precision: str) -> np.ndarray:
    output = folder / "x.engine"
    build(BuildRequest(str(folder / "model"), "cpu", precision, output, max_batch_size=1, max_num_tokens=32))
    with Engine.load(str(output), kv_cache_tokens=64) as engine:
        return engine.logits(IDS)


@pytest.mark.parametrize("layout", EXPERTS)
def test_experts_in_one_tensor(layout: str, tmp_path: Path) -> None:
    """Read as written, and kept to the bit by GPU engines in fp8 and nvfp4."""
    model = small_model("gpt_oss", num_local_experts=4)
    values = write_experts(tmp_path / "model", model, layout)
    checkpoint = open_checkpoint(tmp_path / "model")
    found = read_quantized(checkpoint)
    assert found is not None and found.weights.keys() == values.keys() and len(values) == 4
    for name, value in values.items():
        weight = found.weights[name]
        assert weight.format == EXPERTS[layout][1]
        np.testing.assert_allclose(evaluate(weight.expr, checkpoint), value.numpy(), rtol=1e-6, atol=0)
        scheme = "fp8" if "fp8" in layout else "nvfp4"
        packed = PackedWeight("w0", permute(weight.expr, (0, 2, 1)), Packing(scheme, ROWS), "")
        assert packed.is_carried
        offset, size = packed.parts["w"]
        codes = packed.make(checkpoint)[offset:offset + size]
        stored = checkpoint.store.raw(f"{name}_blocks" if layout == "mxfp4" else name)
        if layout != "mxfp4":
            stored = np.ascontiguousarray(stored.reshape(checkpoint.shape(name)).transpose(0, 2, 1))
        assert codes.tobytes() == stored.tobytes()


@pytest.mark.parametrize("layout", [pytest.param(name, marks=[] if name == "mxfp4" else pytest.mark.slow)
                                    for name in EXPERTS])
def test_an_engine_computes_with_experts(layout: str, tmp_path: Path) -> None:
    model = small_model("gpt_oss", num_local_experts=4)
    write_experts(tmp_path / "model", model, layout)
    np.testing.assert_allclose(engine_logits(tmp_path, "fp32"), logits(model), atol=1e-3)


def test_experts_of_a_fused_parameter_are_put_together(tmp_path: Path) -> None:
    """Blocks of fp8 in each expert's own matrices, which the model keeps as one."""
    model = small_model("deepseek_v3")
    model.save_pretrained(tmp_path / "plain")
    plain = open_checkpoint(tmp_path / "plain")
    names = [name for name in plain.names() if ".experts." in name]
    assert len(names) > 8
    folder = tmp_path / "model"
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32, attn_implementation="eager")
    tensors = {name: torch.tensor(plain.get(name)) for name in plain.names()}
    saved.state_dict = lambda: tensors
    saved.load_state_dict = lambda *a, **k: None
    values = write_checkpoint(folder, saved, LAYOUTS["deepseek"])
    reference = ReferenceModel(str(folder)).model.state_dict()
    expert = next(name for name in names if name.endswith("down_proj.weight"))
    fused = reference[expert.split(".experts.")[0] + ".experts.down_proj"]
    number = int(expert.split(".experts.")[1].split(".")[0])
    torch.testing.assert_close(fused[number], values[expert])


def test_the_last_block_may_be_smaller(tmp_path: Path) -> None:
    values = write_checkpoint(tmp_path, small_model(intermediate_size=320), LAYOUTS["deepseek"])
    checkpoint = open_checkpoint(tmp_path)
    found = read_quantized(checkpoint)
    assert found is not None
    for weight, value in values.items():
        whole = evaluate(found.weights[weight].expr, checkpoint)
        np.testing.assert_allclose(whole, value.numpy(), rtol=1e-6, atol=0)
        np.testing.assert_array_equal(evaluate(found.weights[weight].expr, checkpoint, (100, 128)), whole[100:128])


def quantized_by(folder: Path, config: Any) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))


def test_what_is_not_read_is_told(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, small_model(), LAYOUTS["awq"])
    checkpoint = open_checkpoint(tmp_path)
    for config, message in [
        ({"quant_method": "bitsandbytes"}, "quantized by 'bitsandbytes', which is not read. Read are awq, compressed"),
        ({"quant_method": "awq", "version": "gemv"}, "packed for GEMV; read are 4 bits packed for GEMM"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ with 3 bits; read are 2, 4 and 8"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "in the format 'marlin'; read are gptq, gptq_v2"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "'marlin-24' is not read; read are float-"),
        ({"quant_method": "modelopt", "quant_algo": "W2"}, "ModelOpt's 'W2' is not read; read are FP8, "),
        ({"quant_method": "awq", "group_size": 32}, r"expected groups of 32"),
    ]:
        quantized_by(tmp_path, config)
        with pytest.raises(CheckpointError, match=message):
            read_quantized(checkpoint)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    layout = LAYOUTS["awq"]
    broken = type(layout)(lambda w: ({k: v for k, v in layout.write(w)[0].items() if k != "scales"}, w),
                          layout.quantization, "")
    write_checkpoint(tmp_path, small_model(), broken)
    with pytest.raises(CheckpointError, match=r"there is no tensor model\.layers\.0\.mlp\.down_proj\.scales"):
        read_quantized(open_checkpoint(tmp_path))


def test_what_an_engine_does_not_use_is_noted(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, small_model(), LAYOUTS["modelopt fp8"])
    found = read_quantized(open_checkpoint(tmp_path))
    assert found is not None
    for for_gpu, of_inputs in ((False, "CPU engines quantize them anew in every step, 32 channels at a time"),
                               (True, "GPU engines quantize them anew in every step, by token or finer")):
        manifest, lines = quantization_report(found, [], "the target", for_gpu)
        assert manifest["notes"][0] == f"static scales of activations are not used: {of_inputs}"
        assert manifest["notes"][1].startswith("scales of the KV cache are not used: a ")
        assert lines == [f"ModelOpt FP8 checkpoint: {note}" for note in manifest["notes"]]
