"""Finds out how a checkpoint is quantized: by its configuration, never by what model it holds."""
from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .compressed_tensors import read_compressed_tensors
from .fp8 import read_fp8
from .gguf import gguf_types
from .gptq import read_awq, read_gptq
from .modelopt import read_modelopt
from .mxfp4 import read_mxfp4
from .weights import Quantized, Tensors

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

MODELOPT_CONFIG = "hf_quant_config.json"

METHODS: dict[str, Callable[[Tensors, Mapping[str, Any]], Quantized]] = {
    "awq": read_awq, "compressed-tensors": read_compressed_tensors, "fp8": read_fp8, "gptq": read_gptq,
    "modelopt": read_modelopt, "mxfp4": read_mxfp4,
}
"""`quant_method` of a configuration -> the reader of its layouts."""


def read_quantized(checkpoint: Checkpoint) -> Quantized | None:
    """How the weights of a checkpoint come out of its tensors; None if it is not quantized, or a GGUF file, whose
    tensors are dequantized when they are read.

    Reads the configuration and the tensors' shapes alone. Raises CheckpointError for a method that is not known, and
    for tensors that do not fit each other.
    """
    found = _configuration(checkpoint)
    if found is None:
        return None
    method, config = found
    if method not in METHODS:
        raise CheckpointError(f"{checkpoint.path}: its weights are quantized by {method!r}, which is not read. Read "
                              f"are {', '.join(METHODS)} and GGUF files")
    tensors = Tensors(checkpoint)
    quantized = METHODS[method](tensors, config)
    if not quantized.weights:
        quantized.notes.append(f"the configuration names the quantization {method!r}, but no tensor is quantized")
    quantized.consumed = tensors.consumed
    return quantized


def stored_weights(checkpoint: Checkpoint) -> Quantized | None:
    """As read_quantized, for the report: of GGUF files too, whose weights are their tensors then."""
    return gguf_types(checkpoint) or read_quantized(checkpoint)


def stored_schemes(checkpoint: Checkpoint) -> dict[str, str]:
    """Tensor -> the scheme that holds the numbers of its weight as they are."""
    found = stored_weights(checkpoint)
    return {} if found is None else {tensor: weight.scheme for weight in found.weights.values() if weight.scheme
                                     for tensor in weight.expr.tensor_names()}


def stored_groups(checkpoint: Checkpoint) -> dict[str, str]:
    """Tensor -> the format of GPUs' four-bit integers that holds the numbers of its weight as they are."""
    found = stored_weights(checkpoint)
    return {} if found is None else {tensor: weight.groups for weight in found.weights.values() if weight.groups
                                     for tensor in weight.expr.tensor_names()}


def _configuration(checkpoint: Checkpoint) -> tuple[str, Mapping[str, Any]] | None:
    """(method, its configuration)."""
    if checkpoint.path.is_file():
        return None
    if (beside := _json(checkpoint, MODELOPT_CONFIG)) is not None:
        return "modelopt", beside.get("quantization") or {}
    entries = _json(checkpoint, "config.json") or {}
    for holder in (entries, entries.get("text_config") or {}):
        for name in ("quantization_config", "compression_config"):
            if isinstance(config := holder.get(name), dict):
                return str(config.get("quant_method", "(no quant_method)")), config
    return None


def _json(checkpoint: Checkpoint, name: str) -> dict[str, Any] | None:
    file = checkpoint.path / name
    if not file.exists():
        return None
    try:
        entries = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file} holds a {type(entries).__name__}; expected an object")
    return entries
