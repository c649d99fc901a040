"""What Ingot's calibration and ModelOpt's find for the same small model and the same tokens.

    python -m tools.modelopt_calibration          where nvidia-modelopt is installed beside Ingot

The model has two layers of random weights and inputs with a few large channels. Compared are the largest inputs of each
layer, from which static scales of FP8 are made, and the error of the logits (relative, against float32) of SmoothQuant
and of AWQ: ModelOpt's own simulation, and the graph of an Ingot engine (tools/quality_table.py).
"""
from __future__ import annotations

import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ingot.compiler.cache.calibration import InputsOfModel, calibrated
from ingot.compiler.cache.tensor_digests import tensor_digests
from ingot.compiler.calibration.text import default_text
from ingot.compiler.checkpoint.open import open_checkpoint
from ingot.compiler.importer.importer import import_model
from ingot.compiler.passes.pipeline import gpu_pipeline, run_passes
from ingot.compiler.precision import find_precision
from ingot.compiler.quality_graph import QuantizedGraph
from ingot.compiler.targets import find_target
from ingot.runtime.cli.output import table
from tools.large_calibration import byte_tokenizer

HELD_OUT = [(7919 * i + 11) % 256 for i in range(128)]


def model() -> Any:
    """A llama whose norms let one channel in fifty through many times as large."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=512,
                         tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
    torch.manual_seed(0)
    made = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * (1 if "embed" in name else 0.06))
            elif "layernorm" in name:
                parameter[::50] *= 20
    return made


def ours(folder: Path, precision: str, method: str, inputs: InputsOfModel) -> np.ndarray:
    """Logits of the GPU form."""
    checkpoint, gpu = open_checkpoint(str(folder)), find_target("h200").gpu
    chosen = find_precision(precision, gpu)
    graph = run_passes(import_model(checkpoint).graph, gpu_pipeline(chosen, chosen.kv))
    quantized = QuantizedGraph(graph, True)
    found = calibrated(checkpoint, quantized.weights, inputs, method)
    return np.concatenate(list(quantized.scorer(checkpoint, found)(HELD_OUT)))


def theirs(made: Any, config: str, windows: Any) -> tuple[Any, np.ndarray]:
    """(the quantized model, its logits)."""
    import modelopt.torch.quantization as mtq
    import torch
    quantized = copy.deepcopy(made)

    def read(module: Any) -> None:
        for window in windows:
            module(torch.tensor([list(window)]))

    with torch.no_grad():
        mtq.quantize(quantized, copy.deepcopy(getattr(mtq, config)), read)
        return quantized, quantized(torch.tensor([HELD_OUT])).logits[0].float().numpy()


def main() -> int:
    import torch
    made = model()
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        folder = Path(scratch, "model")
        made.save_pretrained(folder)
        checkpoint = open_checkpoint(str(folder))
        inputs = InputsOfModel(checkpoint, tensor_digests(checkpoint, None), byte_tokenizer(), default_text(), None,
                               lambda detail: None)
        assert inputs.read is not None
        windows = inputs.read.windows
        exact = made(torch.tensor([HELD_OUT])).logits[0].numpy()
        quantized, fp8 = theirs(made, "FP8_DEFAULT_CFG", windows)
        largest = 0.0
        for name, module in quantized.named_modules():
            if "layers" in name and hasattr(module, "input_quantizer"):
                found = inputs.statistics(f"{name}.weight")
                assert found is not None
                amax = float(module.input_quantizer.amax)
                largest = max(largest, abs(float(found.amax.max()) - amax) / amax)
        rows = [("FP8", "largest inputs, relative difference", f"{largest:.1e}", "")]

        def error(logits: np.ndarray) -> str:
            return f"{np.linalg.norm(logits - exact) / np.linalg.norm(exact):.4f}"

        rows.append(("FP8", "error of the logits", error(ours(folder, "fp8", "best", inputs)), error(fp8)))
        for label, config, precision in (("INT8", "INT8_SMOOTHQUANT_CFG", "int8"), ("INT4", "INT4_AWQ_CFG", "int4")):
            logits = theirs(made, config, windows)[1]
            for method in ("rtn", "awq", "best"):
                rows.append((label, f"error of the logits, {method}",
                             error(ours(folder, precision, method, inputs)), error(logits)))
    print(table(rows, ("", "", "Ingot", "ModelOpt")))
    print(json.dumps({"tokens": inputs.num_tokens}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
