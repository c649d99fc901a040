"""What a build wants to know of a checkpoint beside its tensors and its graph; found again without transformers."""
from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cache.build_cache import BuildCache
from .cache.keys import key, library_versions, source_digest
from .checkpoint.checkpoint import Checkpoint, config_text

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_VERSIONS = ("gguf", "tokenizers", "transformers")
_SOURCES = ("compiler/checkpoint", "compiler/model_facts.py", "compiler/tokenizer.py", "compiler/vocabulary.py",
            "runtime/text_stream.py", "runtime/vocabulary.py")


@dataclass(frozen=True)
class ModelFacts:
    """config          the configuration in canonical form, without what is no part of the model
    architecture    the model's class
    max_positions   the longest sequence that the model was made for; None where the configuration names no limit
    tokenizer       files below tokenizer/ of the engine
    warnings        such as that the checkpoint has no tokenizer
    """

    config: dict[str, Any]
    config_sha256: str
    architecture: str
    max_positions: int | None
    tokenizer: dict[str, bytes]
    warnings: tuple[str, ...]


def model_facts(checkpoint: Checkpoint, cache: BuildCache | None) -> ModelFacts:
    """Raises CheckpointError for a configuration that is malformed or missing."""
    def read() -> ModelFacts:
        from .tokenizer import tokenizer_members

        return _facts(checkpoint.config, *tokenizer_members(checkpoint))

    return read() if cache is None else _cached(_sides(checkpoint), read, cache)


def facts_of_config(entries: Mapping[str, Any], config: Callable[[], PretrainedConfig], cache: BuildCache | None,
                    ) -> ModelFacts:
    """entries: what config.json holds. config: reads it, through transformers."""
    def read() -> ModelFacts:
        return _facts(config(), {}, [])

    return read() if cache is None else _cached(key(config=entries), read, cache)


def files_digest(files: Sequence[Path]) -> str:
    """SHA-256 over names and bytes of small files."""
    total = hashlib.sha256()
    for file in files:
        total.update(f"{file.name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def _sides(checkpoint: Checkpoint) -> str:
    """Over everything but the tensors; of a GGUF file, which holds both, over it all."""
    if not checkpoint.path.is_file():
        return files_digest(checkpoint.side_files())
    with open(checkpoint.path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def max_positions(config: PretrainedConfig) -> int | None:
    """The longest sequence that the model was made for, as its configuration says; some models name no limit."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
    text = config.get_text_config()
    found = [value for name in names if isinstance(value := getattr(text, name, None), int) and value > 0]
    return found[0] if found else None


def _facts(config: PretrainedConfig, tokenizer: dict[str, bytes], warnings: list[str]) -> ModelFacts:
    text = config_text(config)
    return ModelFacts(json.loads(text), hashlib.sha256(text.encode()).hexdigest(),
                      (config.architectures or [config.model_type])[0], max_positions(config), tokenizer,
                      tuple(warnings))


def _cached(made_from: str, read: Callable[[], ModelFacts], cache: BuildCache) -> ModelFacts:
    name = key(made_from=made_from, versions=library_versions(*_VERSIONS), sources=source_digest(*_SOURCES))
    if (data := cache.get("model", name)) is not None:
        return _from_json(data)
    facts = read()
    cache.put("model", name, _to_json(facts))
    return facts


def _to_json(facts: ModelFacts) -> bytes:
    tokenizer = {name: base64.b64encode(data).decode() for name, data in facts.tokenizer.items()}
    return json.dumps(vars(facts) | {"tokenizer": tokenizer}).encode()


def _from_json(data: bytes) -> ModelFacts:
    entries = json.loads(data)
    tokenizer = {name: base64.b64decode(text) for name, text in entries["tokenizer"].items()}
    return ModelFacts(**entries | {"tokenizer": tokenizer, "warnings": tuple(entries["warnings"])})
