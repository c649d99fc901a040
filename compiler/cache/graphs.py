"""Import through the cache: a graph depends on the configuration and on names, types and shapes of tensors alone."""
from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..checkpoint.checkpoint import Checkpoint
from ..importer.importer import ImportedModel, import_config, import_model
from ..ir.graph import Graph
from ..ir.serialize import graph_from_json, graph_to_json
from .build_cache import BuildCache
from .keys import key, library_versions, source_digest

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SOURCES = ("compiler/checkpoint", "compiler/importer", "compiler/ir", "compiler/weights", "compiler/cache/graphs.py")


def imported_graph(checkpoint: Checkpoint, config_sha256: str, max_seq_len: int, cache: BuildCache | None,
                   ) -> tuple[Graph, tuple[str, ...]]:
    """(the graph, warnings), from the cache without torch. Raises as import_model does."""
    def run() -> ImportedModel:
        return import_model(checkpoint, max_seq_len)

    return _cached([config_sha256, checkpoint.layout_digest, checkpoint.gguf_architecture], max_seq_len, run, cache)


def configured_graph(config: Callable[[], PretrainedConfig], config_sha256: str, max_seq_len: int,
                     cache: BuildCache | None) -> tuple[Graph, tuple[str, ...]]:
    """The same of a configuration alone: each parameter is a tensor of its own name."""
    return _cached([config_sha256], max_seq_len, lambda: import_config(config(), max_seq_len), cache)


def _cached(made_from: list[str | None], max_seq_len: int, run: Callable[[], ImportedModel], cache: BuildCache | None,
            ) -> tuple[Graph, tuple[str, ...]]:
    name = key(made_from=made_from, max_seq_len=max_seq_len, versions=library_versions("torch", "transformers"),
               sources=source_digest(*_SOURCES))
    if cache is not None and (data := cache.get("graph", name)) is not None:
        warnings, _, graph = data.partition(b"\n")
        return graph_from_json(graph), tuple(json.loads(warnings))
    imported = run()
    if cache is not None:
        cache.put("graph", name, json.dumps(imported.warnings).encode() + b"\n" + graph_to_json(imported.graph))
    return imported.graph, tuple(imported.warnings)
