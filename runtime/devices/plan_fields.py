"""What the plans of all devices have in common, checked: fields of the right type, the layout of the KV cache, the
sizes of token buckets. Whatever is wrong is an EngineFormatError with the path to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ..engine_file import EngineFile
from ..engine_format import EngineFormatError
from ..manifest import weight_name
from ..program import Limits

DTYPES = {"f32": "float32", "bf16": "uint16", "f16": "float16", "fp8": "uint8", "i8": "int8", "u8": "uint8",
          "i32": "int32", "bool": "bool"}
ALIGNMENT = 64


@dataclass(frozen=True)
class KvLayout:
    """windows      for each block table, in tokens; None: no window
    block_size   tokens of a block
    block_bytes  of a block with all layers of a table
    parts        (slot, "k" or "v") -> where in a block its keys or values begin, and how many bytes they are; likewise
                 "k_scale" and "v_scale", where a row has a scale
    """

    windows: tuple[int | None, ...]
    block_size: int
    block_bytes: int
    parts: Mapping[tuple[int, str], tuple[int, int]]

    def num_blocks(self, tokens: int) -> int:
        """That a sequence of so many tokens takes, of all tables."""
        return -(-tokens // self.block_size) * len(self.windows)


def mapped_weight(engine: EngineFile, blob: str, size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The bytes of a weight, of which there are as many as the plan says."""
    return engine.map(weight_member(engine, blob, size))


def weight_member(engine: EngineFile, blob: str, size: int) -> str:
    """The name of a weight's member, which has as many bytes as the plan says; where it is missing, who reads it tells.
    """
    name = weight_name(blob)
    if (found := engine.sizes.get(name, size)) != size:
        raise EngineFormatError(f"plan.weights: {name} has {found} bytes, expected {size}")
    return name


def field(entry: Any, key: str, kind: type, where: str) -> Any:
    value = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise EngineFormatError(f"{where}: {key}: expected {kind.__name__}, got {value!r}")
    return value


def count(entry: Any, key: str, where: str, least: int = 1, most: int | None = None) -> int:
    value = int(field(entry, key, int, where))
    if value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise EngineFormatError(f"{where}: {key}: expected {bounds}, got {value}")
    return value


def kv_layout(plan: dict[str, Any]) -> KvLayout:
    """Raises EngineFormatError unless it is well formed, with all keys and values inside the block and apart."""
    kv = field(plan, "kv", dict, "plan")
    windows = tuple(field(kv, "windows", list, "plan.kv"))
    if not windows or not all(window is None or (isinstance(window, int) and window > 0) for window in windows):
        raise EngineFormatError(f"plan.kv.windows: {list(windows)}; expected a number of tokens or null for each table")
    block_size, block_bytes = count(kv, "block_size", "plan.kv"), field(kv, "block_bytes", int, "plan.kv")
    parts: dict[tuple[int, str], tuple[int, int]] = {}
    taken: list[tuple[int, int, int]] = []
    for index, entry in enumerate(field(kv, "slots", list, "plan.kv")):
        where = f"plan.kv.slots[{index}]"
        dtype = field(entry, "dtype", str, where)
        if dtype not in DTYPES:
            raise EngineFormatError(f"{where}: element type {dtype!r} is unknown; expected one of {', '.join(DTYPES)}")
        rows = count(entry, "heads", where) * block_size
        table = field(entry, "table", int, where)
        if not 0 <= table < len(windows):
            raise EngineFormatError(f"{where}: table {table}; there are {len(windows)}")
        for part, name, size in _kv_parts(entry, rows, np.dtype(DTYPES[dtype]).itemsize, where):
            begin = field(entry, name, int, where)
            if begin % ALIGNMENT or not 0 <= begin <= block_bytes - size:
                raise EngineFormatError(f"{where}: {size} bytes at {name} {begin} do not fit a block of "
                                        f"{block_bytes}, or are not aligned to {ALIGNMENT}")
            parts[field(entry, "slot", int, where), part] = begin, size
            taken.append((table, begin, begin + size))
    taken.sort()
    for (table, _, end), (next_table, begin, _) in pairwise(taken):
        if table == next_table and begin < end:
            raise EngineFormatError(f"plan.kv.slots: two overlap at byte {begin} of a block of table {table}")
    return KvLayout(windows, block_size, block_bytes, parts)


def _kv_parts(slot: dict[str, Any], rows: int, element_bytes: int, where: str) -> Iterator[tuple[str, str, int]]:
    """(part, the field that says where it begins, its bytes) of a slot of so many rows, one a head and token."""
    for part, name in (("k", "key"), ("v", "value")):
        yield part, f"{name}_offset", rows * element_bytes * count(slot, f"{name}_dim", where)
        if slot.get(f"{name}_scale_offset") is not None:
            yield f"{part}_scale", f"{name}_scale_offset", 4 * rows


def arena_bytes(plan: dict[str, Any]) -> int:
    """Of the largest bucket."""
    buckets = field(plan, "buckets", list, "plan")
    return max((field(bucket, "arena_bytes", int, "plan.buckets") for bucket in buckets), default=0)


def check_buckets(plan: dict[str, Any], limits: Limits) -> None:
    """Raises EngineFormatError unless the buckets grow up to max_num_tokens."""
    tokens = [count(bucket, "tokens", "plan.buckets") for bucket in plan["buckets"]]
    if not tokens or tokens != sorted(set(tokens)) or tokens[-1] < limits.max_num_tokens:
        raise EngineFormatError(f"plan.buckets: sizes {tokens}; expected growing ones up to {limits.max_num_tokens}")


def memory_of(launch: Mapping[str, Any]) -> list[list[Any]]:
    """The arguments of a launch; instead of a tensor map the memory that it is laid over."""
    return [arg[1] if arg[0] == "tensormap" else arg for arg in launch["args"]]


def of_adapters(launch: dict[str, Any], where: str) -> bool:
    """Whether a launch has nothing to do in a step without LoRA adapters, so that it is left out."""
    return bool(field(launch, "adapters", bool, where)) if "adapters" in launch else False


def vocab_size(plan: dict[str, Any]) -> int:
    """The width of the logits. Raises EngineFormatError unless all buckets agree on it."""
    widths = {count(logits_output(bucket, f"plan.buckets[{index}]"), "width", f"plan.buckets[{index}].outputs.logits")
              for index, bucket in enumerate(plan["buckets"])}
    if len(widths) != 1:
        raise EngineFormatError(f"plan.buckets: logits of different widths: {sorted(widths)}")
    return widths.pop()


def logits_output(bucket: dict[str, Any], where: str) -> dict[str, Any]:
    output: dict[str, Any] = field(field(bucket, "outputs", dict, where), "logits", dict, f"{where}.outputs")
    return output
