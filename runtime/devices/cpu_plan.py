"""Binds the launches of a plan to addresses: once, while an engine is loaded.

Nothing in a plan is believed: every name, offset and size is checked before it becomes an address. That a kernel stays
within the buffers it is given is the compiler's part.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine_format import EngineFormatError
from ..program import Float32Array, Limits
from ..step import StepInputs
from .native_code import Launch, NativeCode

DTYPES = {"f32": "float32", "bf16": "uint16", "f16": "float16", "i8": "int8", "u8": "uint8", "i32": "int32",
          "bool": "bool"}
ALIGNMENT = 64


def align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class KvSlot:
    """One KV cache: K [num_blocks, heads, block_size, key_dim], V likewise with value_dim."""

    slot: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: str

    def block_bytes(self, block_size: int) -> tuple[int, int]:
        """Bytes of a block in the K part and in the V part."""
        row = self.heads * block_size * np.dtype(DTYPES[self.dtype]).itemsize
        return row * self.key_dim, row * self.value_dim


@dataclass(frozen=True)
class BoundBucket:
    """What runs for a step of at most `tokens` tokens. `launches` point into `args`, so both live as long as it."""

    tokens: int
    launches: ctypes.Array[Launch]
    args: ctypes.Array[ctypes.c_void_p]
    logits: Float32Array


@dataclass(frozen=True)
class Places:
    """Where things lie. Weights and kv: name or slot and part -> (address, size in bytes)."""

    arena: np.ndarray[tuple[int], np.dtype[np.uint8]]
    weights: Mapping[str, tuple[int, int]]
    kv: Mapping[tuple[int, str], tuple[int, int]]
    inputs: StepInputs


def kv_slots(plan: dict[str, Any]) -> list[KvSlot]:
    """Raises EngineFormatError unless the slots are well formed."""
    slots = []
    for index, entry in enumerate(_field(plan, "kv", list, "plan")):
        where = f"plan.kv[{index}]"
        heads, key_dim, value_dim = (_count(entry, key, where) for key in ("heads", "key_dim", "value_dim"))
        dtype = _field(entry, "dtype", str, where)
        if dtype not in DTYPES:
            raise EngineFormatError(f"{where}: element type {dtype!r} is unknown; expected one of {', '.join(DTYPES)}")
        slots.append(KvSlot(_field(entry, "slot", int, where), heads, key_dim, value_dim, dtype))
    return slots


def arena_bytes(plan: dict[str, Any]) -> int:
    """Of the largest bucket."""
    buckets = _field(plan, "buckets", list, "plan")
    return max((_field(bucket, "arena_bytes", int, "plan.buckets") for bucket in buckets), default=0)


def check_buckets(plan: dict[str, Any], limits: Limits) -> None:
    """Raises EngineFormatError unless the buckets grow up to max_num_tokens."""
    tokens = [_count(bucket, "tokens", "plan.buckets") for bucket in plan["buckets"]]
    if not tokens or tokens != sorted(set(tokens)) or tokens[-1] < limits.max_num_tokens:
        raise EngineFormatError(f"plan.buckets: sizes {tokens}; expected growing ones up to {limits.max_num_tokens}")


def bind_bucket(bucket: dict[str, Any], index: int, places: Places, code: NativeCode) -> BoundBucket:
    """Raises EngineFormatError that names the launch and the argument."""
    where = f"plan.buckets[{index}]"
    entries = _field(bucket, "launches", list, where)
    kernels = [code.kernel(_field(entry, "kernel", str, where)) for entry in entries]
    addresses: list[int | None] = []
    begins = []
    for number, entry in enumerate(entries):
        begins.append(len(addresses))
        for position, arg in enumerate(_field(entry, "args", list, f"{where}.launches[{number}]")):
            try:
                addresses.append(_address(arg, places, bucket["arena_bytes"]))
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise EngineFormatError(
                    f"{where}.launches[{number}] ({entry['kernel']}): argument {position}, {arg!r}, "
                    f"points to nothing that this engine has: {error}"
                ) from None
    args = (ctypes.c_void_p * len(addresses))(*addresses)
    base, size = ctypes.addressof(args), ctypes.sizeof(ctypes.c_void_p)
    launches = (Launch * len(entries))(
        *(Launch(kernel, base + begin * size) for kernel, begin in zip(kernels, begins, strict=True))
    )
    return BoundBucket(bucket["tokens"], launches, args, _logits(bucket, where, places))


def _address(arg: list[Any], places: Places, arena_size: int) -> int | None:
    kind, *rest = arg
    if kind == "arena":
        return int(places.arena.ctypes.data) + _within(rest[0], arena_size)
    if kind == "weight":
        address, size = places.weights[rest[0]]
        return address + _within(rest[1] if len(rest) > 1 else 0, size)
    if kind == "kv":
        address, size = places.kv[rest[0], rest[1]]
        return address + _within(rest[2] if len(rest) > 2 else 0, size)
    if kind == "input":
        if rest[0] not in StepInputs.ARRAYS:
            raise ValueError(f"inputs are {', '.join(StepInputs.ARRAYS)}")
        return int(getattr(places.inputs, rest[0]).ctypes.data)
    if kind == "null":
        return None
    raise ValueError("expected arena, weight, kv, input or null")


def _within(offset: int, size: int) -> int:
    if not 0 <= offset < max(size, 1):
        raise ValueError(f"offset {offset} is outside its {size} bytes")
    return offset


def _logits(bucket: dict[str, Any], where: str, places: Places) -> Float32Array:
    """The rows of logits that a step of this bucket may have, as a view of the arena."""
    output = _field(_field(bucket, "outputs", dict, where), "logits", dict, f"{where}.outputs")
    offset, width = _field(output, "offset", int, where), _count(output, "width", where)
    if output.get("dtype") != "f32":
        raise EngineFormatError(f"{where}.outputs.logits: element type {output.get('dtype')!r}, expected 'f32'")
    rows = min(bucket["tokens"], places.inputs.max_batch_size)
    size = rows * width * 4
    if offset % ALIGNMENT or offset + size > bucket["arena_bytes"]:
        raise EngineFormatError(
            f"{where}.outputs.logits: {rows} rows of {width} at offset {offset} do not fit the arena of "
            f"{bucket['arena_bytes']} bytes, or are not aligned to {ALIGNMENT}"
        )
    return places.arena[offset : offset + size].view(np.float32).reshape(rows, width)


def _field(entry: dict[str, Any], key: str, kind: type, where: str) -> Any:
    value = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(value, kind):
        raise EngineFormatError(f"{where}: {key}: expected {kind.__name__}, got {value!r}")
    return value


def _count(entry: dict[str, Any], key: str, where: str) -> int:
    value = _field(entry, key, int, where)
    if value < 1:
        raise EngineFormatError(f"{where}: {key}: expected at least 1, got {value}")
    return int(value)
