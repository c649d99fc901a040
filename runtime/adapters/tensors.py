"""The tensors of a safetensors file, read with numpy alone.

The format (https://huggingface.co/docs/safetensors): u64 length of the header, the header as JSON (name -> dtype,
shape, data_offsets), the data. Files come from outside: every byte is accounted for before a tensor is looked at.
"""

from __future__ import annotations

import json
import math
from typing import Any, TypeGuard

import numpy as np

from ..bf16 import widen
from .errors import AdapterError

_MAX_HEADER_BYTES = 16 << 20
_MAX_AXES = 8
_TYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def read_tensors(data: bytes, what: str) -> dict[str, np.ndarray]:
    """Name -> values, read-only: f32 and f16 as they are, bf16 as f32. what: the file's name in errors.

    Raises AdapterError for a file that is malformed, truncated or longer than it says, and for other types.
    """
    header, begin = _header(data, what)
    tensors: dict[str, np.ndarray] = {}
    spans = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        kind, shape, (first, last) = _entry(entry, f"{what}: tensor {name[:200]}")
        if begin + last > len(data):
            raise AdapterError(f"{what}: truncated: tensor {name[:200]} ends at byte {begin + last}, the file has "
                               f"{len(data)}.\n  Copy it again.")
        values = np.frombuffer(data, _TYPES[kind], math.prod(shape), begin + first).reshape(shape)
        tensors[name] = widen(values) if kind == "BF16" else values
        spans.append((first, last, name))
    end = 0
    for first, last, name in sorted(spans):
        if first != end:
            raise AdapterError(f"{what}: tensor {name[:200]} begins at byte {first} of the data, expected {end}")
        end = last
    if begin + end != len(data):
        raise AdapterError(f"{what}: {len(data) - begin - end} bytes follow the last tensor")
    return tensors


def _header(data: bytes, what: str) -> tuple[dict[str, Any], int]:
    """(entries, where the tensors' data begin)"""
    if len(data) < 8:
        raise AdapterError(f"{what}: {len(data)} bytes are no safetensors file; the length of its header alone has 8")
    length = int.from_bytes(data[:8], "little")
    if length > min(_MAX_HEADER_BYTES, len(data) - 8):
        raise AdapterError(f"{what}: the header claims {length} bytes, the file has {len(data)}: it is truncated, or "
                           "no safetensors file.\n  Copy it again.")
    try:
        header = json.loads(data[8 : 8 + length], object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError too
        raise AdapterError(f"{what}: the header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise AdapterError(f"{what}: the header is no JSON object")
    return header, 8 + length


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _entry(entry: Any, where: str) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """(type, shape, span of the data) of a tensor."""
    if not isinstance(entry, dict):
        raise AdapterError(f"{where}: malformed entry {entry!r:.100}")
    kind, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise AdapterError(f"{where}: has the type {kind!r:.40}; expected {', '.join(_TYPES)}")
    # A matrix without elements would be none, and numpy has no more axes than 64.
    if not _counts(shape) or not all(shape) or len(shape) > _MAX_AXES or not _counts(span) or len(span) != 2:
        raise AdapterError(f"{where}: malformed shape {shape!r:.60} or data_offsets {span!r:.60}")
    size = math.prod(shape) * np.dtype(_TYPES[kind]).itemsize
    if span[1] - span[0] != size:
        raise AdapterError(f"{where}: {kind} {shape!r:.60} takes {size} bytes, its entry says {span}")
    return kind, tuple(shape), (span[0], span[1])


def _counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(each) is int and 0 <= each < 1 << 48 for each in value)
