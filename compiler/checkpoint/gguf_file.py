"""The header of a GGUF file: where its tensors lie.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, counts; metadata as typed
key/value pairs; one entry a tensor (name, dimensions, type, offset); padding; the data. Only the tensors, the
architecture and the alignment are kept: the readers at hand build lists of the whole vocabulary, which takes seconds.
"""
from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CheckpointError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_KEPT = ("general.architecture", "general.alignment")


@dataclass(frozen=True)
class GgufTensor:
    """shape: rows first, as torch has it. kind: the number of its type in gguf.GGMLQuantizationType. begin: offset in
    the file."""

    shape: tuple[int, ...]
    kind: int
    begin: int
    size_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    architecture: str
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Raises CheckpointError for what is no GGUF file, is cut short, or holds a type that the gguf package lacks."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise CheckpointError(f"{path}: no GGUF file: it does not begin with the bytes GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                header = _Reader(path, data).header()
            except (struct.error, UnicodeDecodeError, MemoryError) as error:
                raise CheckpointError(f"{path}: the header is damaged or cut short ({size} bytes in all): {error}. "
                                      "Download it again") from error
    needed = max((t.begin + t.size_bytes for t in header.tensors.values()), default=0)
    if size < needed:
        raise CheckpointError(f"{path}: truncated: expected {needed} bytes, got {size}. Download it again")
    return header


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 4

    def _take(self, layout: str) -> tuple[Any, ...]:
        begin, self.at = self.at, self.at + struct.calcsize(layout)
        if self.at > len(self.data):
            raise struct.error(f"it goes on at byte {begin}, behind the end")
        return struct.unpack_from(layout, self.data, begin)

    def _string(self, kept: bool = True) -> str:
        (length,) = self._take("<Q")
        begin, self.at = self.at, self.at + length
        if self.at > len(self.data):
            raise struct.error(f"a string of {length} bytes at {begin}")
        return self.data[begin:self.at].decode() if kept else ""

    def header(self) -> GgufHeader:
        version, num_tensors, num_entries = self._take("<IQQ")
        if version not in (2, 3):
            raise CheckpointError(f"{self.path}: GGUF version {version}; versions 2 and 3 can be read")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key, (kind,) = self._string(), self._take("<I")
            value = self._value(kind, key in _KEPT)
            if key in _KEPT:
                metadata[key] = value
        if "general.architecture" not in metadata:
            raise CheckpointError(f"{self.path}: the metadata does not name an architecture (general.architecture)")
        entries = []
        for _ in range(num_tensors):
            name, (rank,) = self._string(), self._take("<I")
            dims = self._take(f"<{rank}Q")
            entries.append((name, tuple(reversed(dims)), *self._take("<IQ")))
        alignment = metadata.get("general.alignment", 32)
        begin = -(-self.at // alignment) * alignment
        tensors = {name: GgufTensor(shape, kind, begin + offset, self._size(name, shape, kind))
                   for name, shape, kind, offset in entries}
        return GgufHeader(str(metadata["general.architecture"]), tensors)

    def _value(self, kind: int, kept: bool) -> Any:
        if kind in _SCALARS:
            return self._take(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._string(kept)
        if kind == _ARRAY:
            element, count = self._take("<IQ")
            if element in _SCALARS:
                self.at += count * struct.calcsize(_SCALARS[element])
            else:
                for _ in range(count):
                    self._value(element, False)
            return None
        raise struct.error(f"a value of type {kind} at {self.at}")

    def _size(self, name: str, shape: tuple[int, ...], kind: int) -> int:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        known = {int(k): v for k, v in GGML_QUANT_SIZES.items()}
        if kind not in known:
            raise CheckpointError(f"{self.path}: tensor {name} has the GGML type {kind}, which the gguf package does "
                                  f"not know; known are {', '.join(k.name for k in GGMLQuantizationType)}")
        block, block_bytes = known[kind]
        if shape and shape[-1] % block:
            raise CheckpointError(f"{self.path}: tensor {name} has rows of {shape[-1]}, no multiple of its block of "
                                  f"{block}")
        return math.prod(shape) // block * block_bytes
