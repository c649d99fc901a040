"""Small quantized checkpoints, each written by its format's own library, with the logits that the library's own
dequantized weights give: what the readers are held against.

    python -m tools.quantized_checkpoints write FOLDER [FORMAT…]      where the libraries are installed
    python -m tools.quantized_checkpoints check FOLDER                where Ingot is

`write` needs nvidia-modelopt, compressed-tensors, gptqmodel or autoawq, each for its own formats; a format whose
library is missing is told and left out. The model has two layers of random weights. `check` builds an fp32 engine of
every checkpoint below FOLDER and compares its logits.
"""
from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

IDS = list(range(3, 43, 2))
GROUP = 128
LOGITS = "logits.json"
BOUND = 1e-3


def _model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(vocab_size=256, hidden_size=256, intermediate_size=384, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=128,
                         tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def _linears(model: Any) -> dict[str, Any]:
    import torch
    return {name: module for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and name != "lm_head"}


def _logits(model: Any) -> list[list[float]]:
    import torch
    with torch.inference_mode():
        rows: list[list[float]] = model(torch.tensor([IDS]), use_cache=False).logits[0].float().tolist()
    return rows


def _modelopt(name: str) -> Callable[[Path], list[list[float]]]:
    def write(folder: Path) -> list[list[float]]:
        """The logits of the simulation, its activations not rounded. AWQ's export changes scales and rounds weights
        again, so that its tensors stand for other weights than the simulation's: no logits then."""
        import modelopt.torch.quantization as mtq
        import torch
        from modelopt.torch.export import export_hf_checkpoint
        model = _model()
        ids = torch.randint(0, 256, (4, 64))
        mtq.quantize(model, copy.deepcopy(getattr(mtq, name)), lambda m: m(ids))
        quantizers = [m.input_quantizer for m in model.modules() if hasattr(m, "input_quantizer")]
        for quantizer in quantizers:
            quantizer._if_quant = False
        logits = _logits(model)
        for quantizer in quantizers:
            quantizer._if_quant = True
        export_hf_checkpoint(model, dtype=torch.float32, export_dir=str(folder))
        return [] if "AWQ" in name else logits
    return write


def _compressed(form: str, **weights: Any) -> Callable[[Path], list[list[float]]]:
    def write(folder: Path) -> list[list[float]]:
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import (
            QuantizationArgs,
            QuantizationConfig,
            QuantizationScheme,
            QuantizationStatus,
            apply_quantization_config,
        )
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
        model = _model()
        arguments = QuantizationArgs(**weights)
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
        config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format=form,
                                    quantization_status=QuantizationStatus.FROZEN)
        apply_quantization_config(model, config)
        for module in _linears(model).values():
            w = module.weight.detach()
            size = weights.get("group_size", w.shape[1])
            groups = w.reshape(len(w), -1, size)
            low, high = groups.amin(2), groups.amax(2)
            if weights["strategy"] == "tensor":
                low, high = low.min().reshape(1), high.max().reshape(1)
            outer = generate_gparam(low.min(), high.max()) if weights["strategy"] == "tensor_group" else None
            scale, zero = calculate_qparams(low, high, arguments, global_scale=outer)
            if outer is not None:
                module.weight_global_scale.data = outer
            module.weight_scale.data = scale.to(module.weight_scale.dtype)
            if getattr(module, "weight_zero_point", None) is not None:
                module.weight_zero_point.data = zero.to(module.weight_zero_point.dtype)
        compressor = ModelCompressor.from_pretrained_model(model, quantization_format=form)
        compressor.compress_model(model)
        model.save_pretrained(folder)
        compressor.update_config(str(folder))
        compressor.decompress_model(model)
        return _logits(model.float())
    return write


def _gptq(bits: int, ordered: bool) -> Callable[[Path], list[list[float]]]:
    def write(folder: Path) -> list[list[float]]:
        """Scales, zeros and the order are ours; the library packs them and computes with the packed weights."""
        import torch
        from gptqmodel.nn_modules.qlinear.torch import TorchLinear
        from safetensors.torch import save_file
        model = _model()
        tensors: dict[str, Any] = {}
        for name, linear in _linears(model).items():
            n, k = linear.weight.shape
            order = torch.randperm(k) if ordered else torch.arange(k)
            index = order.argsort() // GROUP
            scale, zero, _ = _levels(linear.weight.detach()[:, order], bits)
            packed = TorchLinear(bits=bits, group_size=GROUP, sym=False, desc_act=ordered, in_features=k,
                                 out_features=n, bias=False, pack_dtype=torch.int32, register_buffers=True)
            packed.pack(linear, scale, zero, index.to(torch.int32))
            tensors |= {f"{name}.{part}": value for part, value in packed.state_dict().items()}
            linear.weight.data = packed.dequantize_weight().T.float().contiguous()
        _save(model, folder, tensors, {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": ordered,
                                       "sym": False, "checkpoint_format": "gptq_v2"}, save_file)
        return _logits(model)
    return write


def _awq(folder: Path) -> list[list[float]]:
    """Scales and zeros are ours; the library packs them, and its own unpacking gives the weights."""
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm
    from safetensors.torch import save_file
    model = _model()
    tensors: dict[str, Any] = {}
    for name, linear in _linears(model).items():
        scale, zero, value = _levels(linear.weight.detach(), 4)
        linear.weight.data = value
        packed = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scale.T.contiguous(), zeros=zero.T.contiguous())
        tensors |= {f"{name}.{part}": value for part, value in packed.state_dict().items()}
        restored = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, GROUP)
        linear.weight.data = restored.T.float().contiguous()
    _save(model, folder, tensors, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm",
                                   "zero_point": True}, save_file)
    return _logits(model)


def _levels(w: Any, bits: int) -> tuple[Any, Any, Any]:
    """scale f16 [N, G], zero [N, G], the weights on that grid."""
    groups = w.reshape(len(w), -1, GROUP)
    low, high = groups.amin(2), groups.amax(2)
    scale = ((high - low) / (2**bits - 1)).half().float()
    zero = (-low / scale).round().clamp(0, 2**bits - 1)
    q = (groups / scale[..., None] + zero[..., None]).round().clamp(0, 2**bits - 1)
    return scale.half(), zero, ((q - zero[..., None]) * scale[..., None]).reshape(w.shape)


def _save(model: Any, folder: Path, quantized: dict[str, Any], config: dict[str, Any], save_file: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = {f"{name}.weight" for name in _linears(model)}
    kept = {name: value for name, value in model.state_dict().items() if name not in names}
    save_file({name: value.contiguous() for name, value in (kept | quantized).items()}, folder / "model.safetensors")
    entries = json.loads(model.config.to_json_string(use_diff=False)) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(entries))


FORMATS: dict[str, Callable[[Path], list[list[float]]]] = {
    "modelopt-fp8": _modelopt("FP8_DEFAULT_CFG"),
    "modelopt-fp8-per-channel": _modelopt("FP8_PER_CHANNEL_PER_TOKEN_CFG"),
    "modelopt-fp8-blocks": _modelopt("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"),
    "modelopt-smoothquant": _modelopt("INT8_SMOOTHQUANT_CFG"),
    "modelopt-int4-awq": _modelopt("INT4_AWQ_CFG"),
    "modelopt-w4a8": _modelopt("W4A8_AWQ_BETA_CFG"),
    "compressed-fp8": _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "compressed-fp8-tensor": _compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "compressed-int8": _compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "compressed-w4a16": _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP),
    "compressed-w4a16-zeros": _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP,
                                          symmetric=False),
    "compressed-nvfp4": _compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group",
                                    group_size=16, scale_dtype="torch.float8_e4m3fn", zp_dtype="torch.float8_e4m3fn"),
    "compressed-mxfp4": _compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32,
                                    scale_dtype="torch.uint8", zp_dtype="torch.uint8"),
    "compressed-mxfp8": _compressed("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32,
                                    scale_dtype="torch.uint8", zp_dtype="torch.uint8"),
    "gptq": _gptq(4, False),
    "gptq-act-order": _gptq(4, True),
    "gptq-8-bits": _gptq(8, False),
    "awq": _awq,
}


def write(folder: Path, formats: list[str]) -> int:
    failed = 0
    for name in formats or FORMATS:
        try:
            logits = FORMATS[name](folder / name)
        except Exception as error:
            print(f"{name}: not written: {type(error).__name__}: {str(error)[:200]}")
            failed += 1
            continue
        if logits:
            (folder / name / LOGITS).write_text(json.dumps(logits))
        print(f"{name}: written")
    return int(failed > 0)


def check(folder: Path) -> int:
    import tempfile

    import numpy as np

    from ingot.compiler.build import BuildRequest, build
    from ingot.compiler.reference_model import ReferenceModel
    from ingot.runtime.engine import Engine
    failed = 0
    for path in sorted(p.parent for p in folder.glob("*/config.json")):
        with tempfile.TemporaryDirectory() as scratch:
            output = Path(scratch, "x.engine")
            result = build(BuildRequest(str(path), "cpu", "fp32", output, max_batch_size=1, max_num_tokens=32))
            with Engine.load(output, kv_cache_tokens=64) as engine:
                got = engine.logits(IDS)
        known = (path / LOGITS).exists()
        expected = np.array(json.loads((path / LOGITS).read_text()) if known else ReferenceModel(str(path)).logits(IDS))
        error = float(np.abs(got - expected).max())
        failed += not error <= BOUND
        formats = ", ".join(f"{row['count']} x {row['format']}"
                            for row in result.manifest["model"]["quantization"]["weights"])
        print(f"{path.name}: {formats}: largest difference {error:.2e} from "
              f"{'the library' if known else 'our own dequantized model alone'}")
    return int(failed > 0)


def main() -> int:
    parser = argparse.ArgumentParser("quantized_checkpoints", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("action", choices=("write", "check"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=f"of {', '.join(FORMATS)}; default: all")
    arguments = parser.parse_args()
    if unknown := set(arguments.formats) - set(FORMATS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(FORMATS)}")
    return write(arguments.folder, arguments.formats) if arguments.action == "write" else check(arguments.folder)


if __name__ == "__main__":
    sys.exit(main())
