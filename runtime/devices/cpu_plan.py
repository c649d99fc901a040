"""Binds the launches of a plan to addresses: once, while an engine is loaded.

Nothing in a plan is believed: every name, offset and size is checked before it becomes an address. That a kernel stays
within the buffers it is given is the compiler's part.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from ..engine_format import EngineFormatError
from ..program import Limits
from ..sampling_inputs import Float32Array
from ..step import StepInputs
from .native_code import NativeCode

DTYPES = {"f32": "float32", "bf16": "uint16", "f16": "float16", "fp8": "uint8", "i8": "int8", "u8": "uint8",
          "i32": "int32", "bool": "bool"}
ALIGNMENT = 64

Addresses = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]


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


@dataclass(frozen=True)
class BoundBucket:
    """What runs for a step of at most `tokens` tokens.

    launches  u64 [n, 2], ingot_launch, for each of the two inputs; they point into `args`, u64, which live as long
    begins    the number of each launch's first argument in `args`
    logits    f32 [rows, vocab_size], of the step that ran last
    """

    tokens: int
    launches: tuple[Addresses, Addresses]
    args: tuple[Addresses, Addresses]
    begins: list[int]
    logits: Float32Array


@dataclass(frozen=True)
class Places:
    """Where things lie: name, or slot and part of the first block -> (address, size in bytes)."""

    arena: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
    weights: Mapping[str, tuple[int, int]]
    kv: Mapping[tuple[int, str], tuple[int, int]]
    inputs: tuple[StepInputs, StepInputs]

    @cached_property
    def arena_address(self) -> int:
        """Asked for once: numpy takes a microsecond to tell it, and a plan has thousands of arguments."""
        return int(self.arena.ctypes.data)


def kv_layout(plan: dict[str, Any]) -> KvLayout:
    """Raises EngineFormatError unless it is well formed, with all keys and values inside the block and apart."""
    kv = _field(plan, "kv", dict, "plan")
    windows = tuple(_field(kv, "windows", list, "plan.kv"))
    if not windows or not all(window is None or (isinstance(window, int) and window > 0) for window in windows):
        raise EngineFormatError(f"plan.kv.windows: {list(windows)}; expected a number of tokens or null for each table")
    block_size, block_bytes = _count(kv, "block_size", "plan.kv"), _field(kv, "block_bytes", int, "plan.kv")
    parts: dict[tuple[int, str], tuple[int, int]] = {}
    taken: list[tuple[int, int, int]] = []
    for index, entry in enumerate(_field(kv, "slots", list, "plan.kv")):
        where = f"plan.kv.slots[{index}]"
        dtype = _field(entry, "dtype", str, where)
        if dtype not in DTYPES:
            raise EngineFormatError(f"{where}: element type {dtype!r} is unknown; expected one of {', '.join(DTYPES)}")
        rows = _count(entry, "heads", where) * block_size
        table = _field(entry, "table", int, where)
        if not 0 <= table < len(windows):
            raise EngineFormatError(f"{where}: table {table}; there are {len(windows)}")
        for part, name, size in _kv_parts(entry, rows, np.dtype(DTYPES[dtype]).itemsize, where):
            begin = _field(entry, name, int, where)
            if begin % ALIGNMENT or not 0 <= begin <= block_bytes - size:
                raise EngineFormatError(f"{where}: {size} bytes at {name} {begin} do not fit a block of "
                                        f"{block_bytes}, or are not aligned to {ALIGNMENT}")
            parts[_field(entry, "slot", int, where), part] = begin, size
            taken.append((table, begin, begin + size))
    taken.sort()
    for (table, _, end), (next_table, begin, _) in pairwise(taken):
        if table == next_table and begin < end:
            raise EngineFormatError(f"plan.kv.slots: two overlap at byte {begin} of a block of table {table}")
    return KvLayout(windows, block_size, block_bytes, parts)


def _kv_parts(slot: dict[str, Any], rows: int, element_bytes: int, where: str) -> Iterator[tuple[str, str, int]]:
    """(part, the field that says where it begins, its bytes) of a slot of so many rows, one a head and token."""
    for part, name in (("k", "key"), ("v", "value")):
        yield part, f"{name}_offset", rows * element_bytes * _count(slot, f"{name}_dim", where)
        if slot.get(f"{name}_scale_offset") is not None:
            yield f"{part}_scale", f"{name}_scale_offset", 4 * rows


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
    addresses: list[int] = []
    begins: list[int] = []
    from_inputs: list[tuple[int, str, int]] = []
    for number, entry in enumerate(entries):
        begins.append(len(addresses))
        for position, arg in enumerate(_field(entry, "args", list, f"{where}.launches[{number}]")):
            try:
                if arg[0] == "input":
                    from_inputs.append((len(addresses), *_input(arg, places)))
                    addresses.append(0)
                else:
                    addresses.append(_address(arg, places, bucket["arena_bytes"]))
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise EngineFormatError(
                    f"{where}.launches[{number}] ({entry['kernel']}): argument {position}, {arg!r}, "
                    f"points to nothing that this engine has: {error}"
                ) from None
    first, second = (_arguments(addresses, from_inputs, inputs) for inputs in places.inputs)
    launches = _launches(kernels, begins, first), _launches(kernels, begins, second)
    return BoundBucket(bucket["tokens"], launches, (first, second), begins, _logits(bucket, where, places))


def _arguments(addresses: list[int], from_inputs: list[tuple[int, str, int]], inputs: StepInputs) -> Addresses:
    """The pointers of all launches. from_inputs: (index, array of the step, offset in bytes)."""
    args = np.array(addresses, np.uint64)
    for index, name, offset in from_inputs:
        args[index] = getattr(inputs, name).ctypes.data + offset
    return args


def _launches(kernels: list[int], begins: list[int], args: Addresses) -> Addresses:
    launches = np.empty((len(kernels), 2), np.uint64)
    launches[:, 0] = kernels
    launches[:, 1] = args.ctypes.data + np.array(begins, np.uint64) * args.itemsize
    return launches


def _input(arg: list[Any], places: Places) -> tuple[str, int]:
    """The array of the step that an argument points into, and how many bytes into it."""
    name, *rest = arg[1:]
    if name not in StepInputs.ARRAYS:
        raise ValueError(f"inputs are {', '.join(StepInputs.ARRAYS)}")
    return name, _within(rest[0] if rest else 0, getattr(places.inputs[0], name).nbytes)


def _address(arg: list[Any], places: Places, arena_size: int) -> int:
    kind, *rest = arg
    if kind == "arena":
        return places.arena_address + _within(rest[0], arena_size)
    if kind == "weight":
        address, size = places.weights[rest[0]]
        return address + _within(rest[1] if len(rest) > 1 else 0, size)
    if kind == "kv":
        address, size = places.kv[rest[0], rest[1]]
        return address + _within(rest[2] if len(rest) > 2 else 0, size)
    if kind == "null":
        return 0
    raise ValueError("expected arena, weight, kv, input or null")


def _within(offset: int, size: int) -> int:
    if not 0 <= offset < max(size, 1):
        raise ValueError(f"offset {offset} is outside its {size} bytes")
    return offset


def vocab_size(plan: dict[str, Any]) -> int:
    """The width of the logits. Raises EngineFormatError unless all buckets agree on it."""
    widths = {_count(_logits_output(bucket, f"plan.buckets[{index}]"), "width", f"plan.buckets[{index}].outputs.logits")
              for index, bucket in enumerate(plan["buckets"])}
    if len(widths) != 1:
        raise EngineFormatError(f"plan.buckets: logits of different widths: {sorted(widths)}")
    return widths.pop()


def _logits_output(bucket: dict[str, Any], where: str) -> dict[str, Any]:
    output: dict[str, Any] = _field(_field(bucket, "outputs", dict, where), "logits", dict, f"{where}.outputs")
    return output


def _logits(bucket: dict[str, Any], where: str, places: Places) -> Float32Array:
    """The rows of logits that a step of this bucket may have, as a view of the arena."""
    output = _logits_output(bucket, where)
    offset, width = _field(output, "offset", int, where), _count(output, "width", where)
    if output.get("dtype") != "f32":
        raise EngineFormatError(f"{where}.outputs.logits: element type {output.get('dtype')!r}, expected 'f32'")
    rows = min(bucket["tokens"], places.inputs[0].max_batch_size)
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
