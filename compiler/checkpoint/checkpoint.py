"""A checkpoint: tensors by name, the configuration, where the tokenizer is."""
from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..weights.bf16 import bf16_to_f32
from ..weights.float8 import FLOAT8_VALUES
from .errors import BadWeights, CheckpointError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


_NO_PART_OF_THE_MODEL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
_SIDE_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken")


def config_text(config: PretrainedConfig) -> str:
    """A configuration in canonical form: JSON, without what is no part of the model."""
    entries = {k: v for k, v in config.to_dict().items() if k not in _NO_PART_OF_THE_MODEL}
    return json.dumps(entries, sort_keys=True, separators=(",", ":"), default=str)


class TensorStore(Protocol):
    """Where the tensors lie: safetensors files or a GGUF file."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """As the file calls it: "BF16", "Q4_K", …"""
        ...

    def read(self, name: str, begin: int, end: int | None) -> np.ndarray:
        """Rows [begin, end) as stored (bf16 as u16 bits, float8 as u8 bits) or, of a quantized type, as f32."""
        ...

    def raw(self, name: str) -> np.ndarray:
        """The tensor's bytes as they lie in the file, u8."""
        ...

    def layout(self) -> bytes:
        """Names, types and shapes of all tensors in one canonical form."""
        ...

    def files(self) -> dict[Path, list[str]]:
        """Every file that holds tensors, and the names of these."""
        ...


class Checkpoint:
    """path: the folder, or the GGUF file. Tensors are read lazily and in parts: nothing is kept."""

    def __init__(self, path: Path, store: TensorStore) -> None:
        self.path = path
        self.store = store
        self._names = frozenset(store.names())

    @property
    def name(self) -> str:
        return self.path.stem if self.path.is_file() else self.path.name

    @property
    def gguf_architecture(self) -> str | None:
        """What a GGUF file calls its architecture; None for other checkpoints. Its tensors have GGUF's names."""
        return getattr(self.store, "architecture", None)

    def names(self) -> list[str]:
        return self.store.names()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        self._require(name)
        return self.store.shape(name)

    def dtype(self, name: str) -> str:
        self._require(name)
        return self.store.dtype(name)

    def get(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Rows [begin, end) of a tensor: floats of any type as f32, integers as i32, booleans as they are.

        Raises BadWeights for NaN or Inf, CheckpointError for a name or a type that is not there.
        """
        self._require(name)
        stored = self.store.read(name, begin, end)
        if stored.dtype == np.bool_:
            return stored
        kind = self.store.dtype(name)
        if stored.dtype.kind in "iu" and kind != "BF16" and kind not in FLOAT8_VALUES:
            least, most = np.iinfo(np.int32).min, np.iinfo(np.int32).max
            if stored.dtype.itemsize > 4 and stored.size and not least <= stored.min() <= stored.max() <= most:
                raise CheckpointError(f"{self.path}: tensor {name} holds integers that do not fit 32 bits")
            return stored.astype(np.int32)
        if kind in FLOAT8_VALUES:
            values = FLOAT8_VALUES[kind][stored]
        else:
            values = bf16_to_f32(stored) if stored.dtype == np.uint16 else stored.astype(np.float32, copy=False)
        self._require_finite(name, values, begin)
        return values

    def _require(self, name: str) -> None:
        if name not in self._names:
            raise CheckpointError(f"{self.path}: there is no tensor {name}")

    def _require_finite(self, name: str, values: np.ndarray, begin: int) -> None:
        """One pass in the good case: a sum is finite unless an element is not, or it overflows."""
        with np.errstate(all="ignore"):
            if np.isfinite(values.sum()):
                return
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            position = [int(i) for i in np.unravel_index(bad[0], values.shape)]
            value = float(values.reshape(-1)[bad[0]])
            if position:
                position[0] += begin
            raise BadWeights(f"{self.path}: tensor {name} holds {value} at {position}"
                             + (f" and {len(bad) - 1} more values that are not finite" if len(bad) > 1 else "")
                             + ". The checkpoint is damaged; download or save it again")

    @cached_property
    def config(self) -> PretrainedConfig:
        from .config import read_config
        return read_config(self.path)

    def side_files(self) -> list[Path]:
        """What lies beside the tensors and is small: configuration, tokenizer, chat template. Of a GGUF file none."""
        if self.path.is_file():
            return []
        return sorted(file for file in self.path.iterdir() if file.suffix in _SIDE_SUFFIXES and file.is_file())

    @cached_property
    def layout_digest(self) -> str:
        """SHA-256 of the names, types and shapes of the tensors; cheap, says nothing about their values."""
        return hashlib.sha256(self.store.layout()).hexdigest()

    def tensor_digest(self, name: str) -> str:
        """SHA-256 of a tensor's type, shape and stored bytes: about half a second a gigabyte."""
        self._require(name)
        total = hashlib.sha256(f"{self.store.dtype(name)} {list(self.store.shape(name))}\n".encode())
        total.update(np.ascontiguousarray(self.store.raw(name)).data)
        return total.hexdigest()
