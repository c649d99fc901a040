"""Where a build's model comes from: a checkpoint, or for a dry run its configuration alone."""
from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .cache.build_cache import BuildCache
from .cache.graphs import configured_graph, imported_graph
from .checkpoint.checkpoint import Checkpoint
from .checkpoint.config import read_folder_config
from .checkpoint.open import open_checkpoint
from .ir.graph import Graph
from .model_facts import ModelFacts, facts_of_config, model_facts

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class ModelSource(Protocol):
    """name: what the engine will call the model. place: where it lies, for people."""

    name: str
    place: str

    def facts(self, cache: BuildCache | None) -> ModelFacts: ...

    def graph(self, facts: ModelFacts, max_seq_len: int, cache: BuildCache | None) -> tuple[Graph, tuple[str, ...]]:
        """(the imported graph, warnings)"""
        ...


class CheckpointSource:
    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self.checkpoint, self.name, self.place = checkpoint, name, str(checkpoint.path)

    def facts(self, cache: BuildCache | None) -> ModelFacts:
        return model_facts(self.checkpoint, cache)

    def graph(self, facts: ModelFacts, max_seq_len: int, cache: BuildCache | None) -> tuple[Graph, tuple[str, ...]]:
        return imported_graph(self.checkpoint, facts.config_sha256, max_seq_len, cache)


class ConfigSource:
    """A configuration as config.json holds it. Each parameter is a tensor of its own name; nothing can be written."""

    def __init__(self, entries: Mapping[str, Any], name: str) -> None:
        self._entries, self.name, self.place = entries, name, f"the configuration of {name}, without its weights"

    @cached_property
    def _config(self) -> PretrainedConfig:
        with tempfile.TemporaryDirectory(prefix="ingot-config-") as folder:
            Path(folder, "config.json").write_text(json.dumps(dict(self._entries)))
            return read_folder_config(Path(folder))

    def facts(self, cache: BuildCache | None) -> ModelFacts:
        return facts_of_config(self._entries, lambda: self._config, cache)

    def graph(self, facts: ModelFacts, max_seq_len: int, cache: BuildCache | None) -> tuple[Graph, tuple[str, ...]]:
        return configured_graph(lambda: self._config, facts.config_sha256, max_seq_len, cache)


def open_checkpoint_source(model: str, name: str | None = None) -> CheckpointSource:
    """Raises as open_checkpoint does."""
    checkpoint = open_checkpoint(model)
    # A model of the hub lies in a folder that is named for its revision.
    own = checkpoint.path.stem if checkpoint.path.is_file() else Path(model).resolve().name
    return CheckpointSource(checkpoint, name or own)
