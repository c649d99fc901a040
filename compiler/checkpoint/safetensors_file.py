"""One .safetensors file, mapped into memory.

The format (https://huggingface.co/docs/safetensors): u64 length of the header, the header as JSON (name -> dtype,
shape, data_offsets), the data. Read here rather than with the safetensors package, which answers a malformed file
without numbers and hands out bfloat16 only through torch.
"""
from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .errors import CheckpointError

_MAX_HEADER_BYTES = 100 << 20

STORAGE = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
    "F8_E4M3": np.uint8, "F8_E5M2": np.uint8, "F8_E8M0": np.uint8,
}
"""What a checkpoint may store, and the numpy type that it is mapped as; bf16 and float8 as their bits."""


@dataclass(frozen=True)
class TensorInfo:
    """dtype: the format's name for it, a key of STORAGE. begin: offset in the file's data part."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """Reads the header when it is made; the data is mapped when it is first asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size_bytes = path.stat().st_size
        self.header_bytes, self.tensors = self._read_header()

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}")

    def _read_header(self) -> tuple[bytes, dict[str, TensorInfo]]:
        with open(self.path, "rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise self._error(f"no safetensors file: {self._size_bytes} bytes, the header's length alone has 8")
            length = int.from_bytes(prefix, "little")
            if length > min(_MAX_HEADER_BYTES, self._size_bytes - 8):
                raise self._error(f"the header claims {length} bytes, the file has {self._size_bytes}; it is truncated "
                                  "or no safetensors file")
            header = file.read(length)
        try:
            entries = json.loads(header)
            assert isinstance(entries, dict)
        except (ValueError, AssertionError) as error:
            raise self._error(f"the header is not a JSON object: {error}") from error
        self._data_begin = 8 + length
        tensors = {name: self._entry(name, entry) for name, entry in entries.items() if name != "__metadata__"}
        needed = max((t.end for t in tensors.values()), default=0)
        if self._data_begin + needed != self._size_bytes:
            relation = "truncated" if self._data_begin + needed > self._size_bytes else "followed by other bytes"
            raise self._error(f"{relation}: expected {self._data_begin + needed} bytes, got {self._size_bytes}. "
                              "Download it again")
        return header, tensors

    def _entry(self, name: str, entry: Any) -> TensorInfo:
        try:
            dtype, shape, (begin, end) = str(entry["dtype"]), tuple(map(int, entry["shape"])), entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise self._error(f"tensor {name}: malformed header entry {str(entry)[:200]}") from error
        if dtype in STORAGE:
            size = math.prod(shape) * np.dtype(STORAGE[dtype]).itemsize
            if not (isinstance(begin, int) and isinstance(end, int) and begin >= 0 and end - begin == size):
                raise self._error(f"tensor {name}: {dtype} {list(shape)} takes {size} bytes, its entry says "
                                  f"[{begin}, {end})")
        return TensorInfo(dtype, shape, begin, end)

    @cached_property
    def _data(self) -> np.ndarray:
        return np.memmap(self.path, np.uint8, "r")

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Rows [begin, end) of a tensor as stored, a view of the file. A scalar has no rows."""
        info = self.tensors[name]
        if info.dtype not in STORAGE:
            raise self._error(f"tensor {name} has the type {info.dtype}; supported are {', '.join(STORAGE)}")
        array: np.ndarray = self.raw(name).view(STORAGE[info.dtype]).reshape(info.shape)
        return array[begin:end] if info.shape else array

    def raw(self, name: str) -> np.ndarray:
        """The bytes of a tensor, u8, a view of the file."""
        info = self.tensors[name]
        data: np.ndarray = self._data[self._data_begin + info.begin:self._data_begin + info.end]
        return data
