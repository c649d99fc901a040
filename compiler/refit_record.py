"""The member refit.json: what a refit needs to make an engine's weights anew, without torch or an import.

    version           of this record
    packing_sha256    of the sources that evaluate and pack weights: others might lay them out differently
    sides_sha256      of configuration and tokenizer files: equal ones need not be read through transformers again;
                      "" for a GGUF file, which holds them together with the tensors
    config            the configuration in canonical form
    tensors           name in the checkpoint -> [element type as the importer sees it, shape]
    equal             tensors of a quantized checkpoint -> the one with the same values that recipes name in their place
    weights           name in the plan -> expr (a recipe over the tensors), scheme, layout (if not panels), label,
                      parameters
"""
from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ingot.runtime.engine_format import REFIT
from ingot.runtime.errors import RequestError
from ingot.runtime.manifest import canonical_json

from .cache.keys import source_digest
from .cache.packed_weights import PACKING_SOURCES
from .checkpoint.checkpoint import Checkpoint
from .checkpoint.quantized import equal_tensors
from .importer.importer import element_type
from .model_facts import ModelFacts, files_digest
from .weights.expr import WeightExpr
from .weights.packed import PANELS, PackedWeight, Packing

REFIT_VERSION = 2
REFIT_MEMBER = REFIT
_TOKENIZER_FILES = ("added_tokens.json", "config.json", "generation_config.json", "merges.txt",
                    "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt")
_TOKENIZER_SUFFIXES = (".jinja", ".model", ".tiktoken")


@dataclass(frozen=True)
class RefitRecord:
    packing_sha256: str
    sides_sha256: str
    config: dict[str, Any]
    tensors: dict[str, list[Any]]
    equal: dict[str, str]
    weights: list[PackedWeight]


def layout(checkpoint: Checkpoint) -> dict[str, list[Any]]:
    """Name of a tensor -> [element type, shape]. The width of floats does not count: all enter a recipe as f32."""
    return {name: [element_type(checkpoint.dtype(name)).value, list(checkpoint.shape(name))]
            for name in sorted(checkpoint.names())}


def sides_digest(checkpoint: Checkpoint) -> str:
    """SHA-256 over the files that a configuration and a tokenizer are read from. Licences and the like do not count."""
    files = [file for file in checkpoint.side_files()
             if file.name in _TOKENIZER_FILES or file.suffix in _TOKENIZER_SUFFIXES]
    return files_digest(files) if files else ""


def packing_digest() -> str:
    return source_digest(*PACKING_SOURCES)


def refit_record(checkpoint: Checkpoint, facts: ModelFacts, weights: list[PackedWeight] | tuple[PackedWeight, ...],
                 ) -> bytes:
    """refit.json. No byte of it depends on the values of the tensors, but for which of them are equal."""
    return canonical_json({
        "version": REFIT_VERSION, "packing_sha256": packing_digest(), "sides_sha256": sides_digest(checkpoint),
        "config": facts.config, "tensors": layout(checkpoint),
        "equal": equal_tensors(checkpoint),
        "weights": {weight.name: {"expr": weight.expr.to_json(), **_packing_json(weight.packing),
                                  "label": weight.label, "parameters": list(weight.parameters)}
                    for weight in weights}})


def _packing_json(packing: Packing) -> dict[str, str]:
    return {"scheme": packing.scheme} if packing.layout == PANELS else vars(packing)


def _packing(entry: dict[str, Any]) -> Packing:
    return Packing(entry["scheme"], entry.get("layout", PANELS))


def parse_refit_record(data: bytes, order: list[str], where: str) -> RefitRecord:
    """order: the names of the weights as the plan lists them, which is the order that they are written in."""
    entries = json.loads(data)
    if entries.get("version") != REFIT_VERSION:
        raise RequestError(f"{where}: {REFIT_MEMBER} has version {entries.get('version')}, this Ingot reads "
                           f"{REFIT_VERSION}.\n  Build the engine again.")
    weights = entries["weights"]
    return RefitRecord(entries["packing_sha256"], entries["sides_sha256"], entries["config"], entries["tensors"],
                       entries["equal"], [
        PackedWeight(name, WeightExpr.from_json(weights[name]["expr"]), _packing(weights[name]),
                     weights[name]["label"], tuple(weights[name]["parameters"])) for name in order])
