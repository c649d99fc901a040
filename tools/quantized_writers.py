"""The writers of tools.quantized_checkpoints: one a library and format, each giving the logits of the library's own
dequantized weights."""
from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

IDS = list(range(3, 43, 2))
GROUP = 128
Writer = Callable[[Path], list[list[float]]]
"""Writes a checkpoint; the logits of IDS, or nothing where the library has none of its own."""


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


def _modelopt(name: str, kv: bool = False) -> Writer:
    def write(folder: Path) -> list[list[float]]:
        """The logits of the simulation, its inputs not rounded. Before AWQ is exported, layers that read the same get
        the same scales, and weights are rounded anew: done first here, so that the simulation is of what is written.
        W4A8 rounds the weights of its simulation to fp8 as well: not what its tensors stand for, and left out."""
        import modelopt.torch.quantization as mtq
        import torch
        from modelopt.torch.export import export_hf_checkpoint
        from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers
        model = _model()
        ids = torch.randint(0, 256, (4, 64))
        config = copy.deepcopy(getattr(mtq, name))
        if kv:
            from modelopt.torch.quantization.utils.core_utils import update_quant_cfg_with_kv_cache_quant
            config = update_quant_cfg_with_kv_cache_quant(config, copy.deepcopy(mtq.FP8_KV_CFG)["quant_cfg"])
        mtq.quantize(model, config, lambda m: m(ids))
        if "AWQ" in name:
            requantize_resmooth_fused_llm_layers(model)
        logits = _logits_of_weights(model)
        export_hf_checkpoint(model, dtype=torch.float32, export_dir=str(folder))
        return logits
    return write


def _modelopt_nvfp4(make: Callable[[], Any]) -> Writer:
    def write(folder: Path) -> list[list[float]]:
        """Without CUDA ModelOpt calibrates and exports NVFP4, but does not simulate it: its quantizers only look on,
        and the logits are those of its own unpacking of what it has written."""
        import modelopt.torch.quantization as mtq
        import torch
        from modelopt.torch.export import export_hf_checkpoint
        from modelopt.torch.quantization.qtensor import NVFP4QTensor
        from safetensors.torch import load_file
        model, plain = make(), make()
        ids = torch.randint(0, 256, (4, 64))
        mtq.quantize(model, copy.deepcopy(mtq.NVFP4_DEFAULT_CFG), lambda m: m(ids))
        for name, module in model.named_modules():
            if name.endswith(("input_quantizer", "weight_quantizer")):
                module._if_quant = False
        export_hf_checkpoint(model, dtype=torch.float32, export_dir=str(folder))
        tensors = load_file(folder / "model.safetensors")
        for name, parameter in plain.named_parameters():
            scale = f"{name}_scale" if name.endswith(".weight") else f"{name}_weight_scale"
            if scale not in tensors:
                continue
            turns = parameter.dim() == 3  # experts [E, K, N]: blocks lie along K
            packed, scales, value = (t.transpose(-1, -2).contiguous() if turns else t
                                     for t in (tensors[name], tensors[scale], parameter.detach()))
            restored = NVFP4QTensor(value.shape, torch.float32, packed).dequantize(
                torch.float32, scale=scales, double_scale=tensors[f"{scale}_2"], block_sizes={-1: 16})
            parameter.data = restored.transpose(-1, -2).contiguous() if turns else restored
        return _logits(plain)
    return write


def _modelopt_experts(folder: Path) -> list[list[float]]:
    """gpt-oss, whose experts ModelOpt keeps in one tensor, in FP8; inputs of the simulation are not rounded."""
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    model = _gpt_oss()
    ids = torch.randint(0, 256, (4, 64))
    mtq.quantize(model, copy.deepcopy(mtq.FP8_DEFAULT_CFG), lambda m: m(ids))
    logits = _logits_of_weights(model)
    export_hf_checkpoint(model, dtype=torch.float32, export_dir=str(folder))
    return logits


def _logits_of_weights(model: Any) -> list[list[float]]:
    """The logits of a model whose weights ModelOpt quantizes, and nothing else of it."""
    quantizers = [module for path, module in model.named_modules()
                  if path.endswith(("input_quantizer", "_bmm_quantizer", "weight_quantizer.1"))]
    for quantizer in quantizers:
        quantizer._if_quant = False
    logits = _logits(model)
    for quantizer in quantizers:
        quantizer._if_quant = True
    return logits


def _gpt_oss() -> Any:
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM
    config = GptOssConfig(vocab_size=256, hidden_size=256, intermediate_size=256, num_hidden_layers=2,
                          num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=128,
                          num_local_experts=4, num_experts_per_tok=2, sliding_window=64, pad_token_id=None,
                          architectures=["GptOssForCausalLM"], attn_implementation="eager",
                          rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    torch.manual_seed(0)
    model = GptOssForCausalLM(config).eval()
    for parameter in model.parameters():  # some of its parameters are made empty
        torch.nn.init.normal_(parameter, std=0.1)
    return model.float()


def _transformers_fp8(scale_format: str) -> Writer:
    def write(folder: Path) -> list[list[float]]:
        """transformers quantizes on a GPU alone, but the operation that makes the tensors runs anywhere; reading them
        back is its own way without a GPU."""
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM, FineGrainedFP8Config
        from transformers.integrations.finegrained_fp8 import Fp8Quantize
        model = _model()
        config = FineGrainedFP8Config(weight_block_size=(128, 128), scale_fmt=scale_format)
        quantize = Fp8Quantize(SimpleNamespace(quantization_config=config))
        tensors: dict[str, Any] = {}
        for name, linear in _linears(model).items():
            tensors |= quantize.convert({f"{name}.weight": linear.weight.detach()})
        _save(model, folder, tensors, {"quant_method": "fp8", "weight_block_size": [128, 128],
                                       "activation_scheme": "dynamic", "scale_fmt": scale_format,
                                       "modules_to_not_convert": ["lm_head"]}, save_file)
        read = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", quantization_config=FineGrainedFP8Config(
            dequantize=True, scale_fmt=scale_format, modules_to_not_convert=["lm_head"]))
        return _logits(read.float().eval())
    return write


def _gpt_oss_mxfp4(folder: Path) -> list[list[float]]:
    """transformers writes MXFP4 with kernels of the hub alone. ModelOpt's own rounding makes the blocks here, and
    transformers reads them back."""
    from modelopt.torch.quantization.qtensor import MXFP4QTensor
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, Mxfp4Config
    model = _gpt_oss()
    tensors: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = value
            continue
        turned = value.transpose(1, 2).contiguous()
        packed, scales = MXFP4QTensor.quantize(turned, 32)
        experts, n, k = turned.shape
        tensors[f"{name}_blocks"] = packed._quantized_data.reshape(experts, n, k // 32, 16)
        tensors[f"{name}_scales"] = scales.reshape(experts, n, k // 32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors",
              {"format": "pt"})
    entries = json.loads(model.config.to_json_string(use_diff=False)) | {
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (folder / "config.json").write_text(json.dumps(entries))
    read = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager",
                                                quantization_config=Mxfp4Config(dequantize=True))
    return _logits(read.float().eval())


def _compressed(form: str, **weights: Any) -> Writer:
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
        if outer is not None:
            _unpack_nvfp4(model, folder, arguments)
        return _logits(model.float())
    return write


def _unpack_nvfp4(model: Any, folder: Path, arguments: Any) -> None:
    """As the library does, but in float32: it rounds to bfloat16 on the way."""
    import torch
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from safetensors.torch import load_file
    tensors = load_file(folder / "model.safetensors")
    for name, linear in _linears(model).items():
        packed = tensors[f"{name}.weight_packed"]
        numbers = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], torch.float32)
        linear.weight.data = dequantize(x_q=numbers, scale=tensors[f"{name}.weight_scale"].float(), args=arguments,
                                        global_scale=tensors[f"{name}.weight_global_scale"], dtype=torch.float32)


def _gptq(bits: int, ordered: bool, form: str = "gptq_v2") -> Writer:
    def write(folder: Path) -> list[list[float]]:
        """Scales, zeros and the order are ours; the library packs them, computes with the packed weights, and makes
        its first form of its second."""
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
            linear.weight.data = packed.dequantize_weight().T.float().contiguous()
            if form == "gptq":
                from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module
                convert_gptq_v2_to_v1_format_module(packed, SimpleNamespace(bits=bits, pack_dtype=torch.int32))
            tensors |= {f"{name}.{part}": value.clone() for part, value in packed.state_dict().items()}
        _save(model, folder, tensors, {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": ordered,
                                       "sym": False, "checkpoint_format": form}, save_file)
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
    save_file({name: value.contiguous() for name, value in (kept | quantized).items()}, folder / "model.safetensors",
              {"format": "pt"})
    entries = json.loads(model.config.to_json_string(use_diff=False)) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(entries))


FORMATS: dict[str, Writer] = {
    "modelopt-fp8": _modelopt("FP8_DEFAULT_CFG"),
    "modelopt-fp8-kv": _modelopt("FP8_DEFAULT_CFG", kv=True),
    "modelopt-fp8-per-channel": _modelopt("FP8_PER_CHANNEL_PER_TOKEN_CFG"),
    "modelopt-fp8-blocks": _modelopt("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"),
    "modelopt-smoothquant": _modelopt("INT8_SMOOTHQUANT_CFG"),
    "modelopt-int4-awq": _modelopt("INT4_AWQ_CFG"),
    "modelopt-w4a8": _modelopt("W4A8_AWQ_BETA_CFG"),
    "modelopt-nvfp4": _modelopt_nvfp4(_model),
    "modelopt-experts": _modelopt_experts,
    "modelopt-experts-nvfp4": _modelopt_nvfp4(_gpt_oss),
    "transformers-fp8": _transformers_fp8("float"),
    "transformers-fp8-powers": _transformers_fp8("ue8m0"),
    "gpt-oss-mxfp4": _gpt_oss_mxfp4,
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
    "gptq-v1": _gptq(4, False, "gptq"),
    "gptq-act-order": _gptq(4, True),
    "gptq-8-bits": _gptq(8, False),
    "awq": _awq,
}
