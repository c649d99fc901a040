"""What the manifest of an engine says of its build, before the weights are read."""
from __future__ import annotations

import hashlib
from typing import Any

from .build_request import BuildRequest, Settings
from .checkpoint.checkpoint import Checkpoint
from .checkpoint.quantized import quantization_report, stored_weights
from .cpu.generate import CpuProgram
from .gpu.generate import GpuProgram
from .ir.dump import dump
from .ir.graph import Graph
from .model_facts import ModelFacts
from .model_shape import model_shape
from .model_source import ModelSource
from .passes.add_lora import LoraRequest
from .targets import Target
from .version import ingot_version, toolchain_versions


def manifest_of(request: BuildRequest, settings: Settings, source: ModelSource, facts: ModelFacts, imported: Graph,
                limits: dict[str, int], program: CpuProgram | GpuProgram) -> dict[str, Any]:
    """recipe: the fields of a BuildRequest that give this engine again."""
    target, precision, kv = settings.target, settings.precision, settings.kv
    return {
        "ingot_version": ingot_version(),
        "model": {"name": source.name, "architecture": facts.architecture, "config_sha256": facts.config_sha256,
                  "vocab_size": program.vocab_size, **model_shape(imported)},
        "target": {"name": target.name, "kind": target.kind, "isa": target.isa,
                   **program.target_facts()},
        "precision": "mixed" if request.layers else precision.name,
        "kv_precision": kv,
        **({"tensor_parallel": request.tensor_parallel} if request.tensor_parallel > 1 else {}),
        "limits": limits,
        "kernels": program.kernel_table(),
        "memory": program.memory(),
        "toolchain": toolchain_versions(request.compiler, target.kind),
        "graph_sha256": hashlib.sha256(dump(imported).encode()).hexdigest(),
        "recipe": {"name": source.name, "target": target.name, "precision": precision.name, "kv_precision": kv,
                   **limits, **({"layers": dict(request.layers)} if request.layers else {}),
                   **{name: value for name in ("group_size", "group_minimums")
                      if (value := getattr(request, name)) is not None},
                   **lora_recipe(settings.lora),
                   "compiler": request.compiler, "calibrate": request.calibrate,
                   **({"tensor_parallel": request.tensor_parallel} if request.tensor_parallel > 1 else {}),
                   "quantization_method": request.quantization_method,
                   "calibration": request.calibration.name if request.calibration else None,
                   "dump": request.dump is not None, "measure_quality": request.measures,
                   **({"self_test": True} if request.self_test else {}),
                   **({"tuning_records": program.tuning.to_json()}
                      if isinstance(program, CpuProgram) and program.tuning is not None else {})},
    } | program.facts()


def lora_recipe(lora: LoraRequest | None) -> dict[str, Any]:
    """The fields of a BuildRequest that ask for this room."""
    if lora is None:
        return {}
    return {"lora_max_rank": lora.max_rank, "lora_max_adapters": lora.max_adapters,
            **({"lora_modules": list(lora.modules)} if lora.modules else {})}


def add_quantization(checkpoint: Checkpoint, program: CpuProgram | GpuProgram, target: Target,
                     manifest: dict[str, Any]) -> list[str]:
    """Adds to the manifest how the checkpoint is quantized, if it is; what the user should know of it."""
    quantized = stored_weights(checkpoint)
    if quantized is None:
        return []
    manifest["model"]["quantization"], lines = quantization_report(quantized, program.weights, target.name,
                                                                   target.gpu is not None)
    return lines
