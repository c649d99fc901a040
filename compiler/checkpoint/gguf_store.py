"""The tensors of a GGUF file as a source of weights: dequantized one by one, or a range of rows at a time."""
from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

import numpy as np

from .errors import CheckpointError
from .gguf_file import read_gguf_header


class GgufStore:
    """Names are those of the file (blk.0.attn_q.weight); the importer knows which parameters they make."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_gguf_header(path)
        self.architecture = header.architecture
        self._tensors = header.tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        from gguf import GGMLQuantizationType
        return GGMLQuantizationType(self._tensors[name].kind).name

    @cached_property
    def _data(self) -> np.ndarray:
        return np.memmap(self.path, np.uint8, "r")

    def read(self, name: str, begin: int, end: int | None) -> np.ndarray:
        """Rows of the first axis as f32, or as stored where that is an integer. Quantized blocks lie within the last
        axis, so that rows can be read apart."""
        from gguf import GGMLQuantizationType, dequantize
        tensor = self._tensors[name]
        kind = GGMLQuantizationType(tensor.kind)
        raw = self.raw(name)
        plain = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I8": np.int8, "I16": np.int16,
                 "I32": np.int32, "I64": np.int64}.get(kind.name)
        if plain is not None:
            return raw.view(plain).reshape(tensor.shape)[begin:end]
        rank = len(tensor.shape)
        rows = raw.reshape(*tensor.shape[:-1], -1)
        try:
            # A vector is one row of blocks: it is unpacked whole.
            values = dequantize(rows[begin:end] if rank > 1 else rows, kind)
        except NotImplementedError as error:
            raise CheckpointError(f"{self.path}: tensor {name} has the type {kind.name}, which the gguf package cannot "
                                  "unpack") from error
        return values.reshape(-1, *tensor.shape[1:]) if rank > 1 else values[begin:end]

    def raw(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        data: np.ndarray = self._data[tensor.begin:tensor.begin + tensor.size_bytes]
        return data

    def layout(self) -> bytes:
        rows = sorted((name, self.dtype(name), self.shape(name)) for name in self._tensors)
        return json.dumps(rows, separators=(",", ":")).encode()

    def files(self) -> dict[Path, list[str]]:
        return {self.path: list(self._tensors)}
