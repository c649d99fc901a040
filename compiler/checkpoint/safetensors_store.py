"""The tensors of a folder of safetensors files, one or sharded."""
from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

import numpy as np

from .errors import CheckpointError
from .safetensors_file import SafetensorsFile

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class SafetensorsStore:
    """Opens `model.safetensors`, or the shards that `model.safetensors.index.json` lists.

    Raises CheckpointError for a missing or damaged file, and for an index that names a tensor its shard lacks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / INDEX
        shards = self._read_index(index) if index.exists() else {}
        names = sorted(set(shards.values())) if shards else [SINGLE]
        self._files = {name: self._open(name, shards) for name in names}
        self._where = {tensor: file for file in self._files.values() for tensor in file.tensors}
        for tensor, shard in shards.items():
            if tensor not in self._files[shard].tensors:
                raise CheckpointError(f"{index}: tensor {tensor} should be in {shard}, which does not hold it")

    def _read_index(self, index: Path) -> dict[str, str]:
        try:
            entries = json.loads(index.read_text())["weight_map"]
            if not isinstance(entries, dict):
                raise TypeError(f"weight_map is a {type(entries).__name__}")
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{index}: malformed index, expected an object with a weight_map: {error}") from error
        return {str(tensor): str(shard) for tensor, shard in entries.items()}

    def _open(self, name: str, shards: dict[str, str]) -> SafetensorsFile:
        path = self.folder / name
        if not path.exists():
            held = [tensor for tensor, shard in shards.items() if shard == name]
            raise CheckpointError(f"{path} is missing; {INDEX} expects {len(held)} tensors in it, {held[0]} for one. "
                                  "Download the whole checkpoint")
        return SafetensorsFile(path)

    def names(self) -> list[str]:
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._where[name].tensors[name].shape

    def dtype(self, name: str) -> str:
        return self._where[name].tensors[name].dtype

    def read(self, name: str, begin: int, end: int | None) -> np.ndarray:
        return self._where[name].read(name, begin, end)

    def raw(self, name: str) -> np.ndarray:
        return self._where[name].raw(name)

    @cached_property
    def _layout(self) -> bytes:
        rows = sorted((name, self.dtype(name), self.shape(name)) for name in self._where)
        return json.dumps(rows, separators=(",", ":")).encode()

    def layout(self) -> bytes:
        return self._layout

    def files(self) -> dict[Path, list[str]]:
        return {file.path: [name for name in file.tensors if self._where[name] is file]
                for file in self._files.values()}
