"""Binds the launches of a plan to addresses: once, while an engine is loaded.

Nothing in a plan is believed: every name, offset and size is checked before it becomes an address. That a kernel stays
within the buffers it is given is the compiler's part.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..engine_format import EngineFormatError
from ..sampling_inputs import Float32Array
from ..step import StepInputs
from .native_code import NativeCode
from .plan_fields import ALIGNMENT, count, field, logits_output, of_adapters

Addresses = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]


@dataclass(frozen=True)
class BoundBucket:
    """What runs for a step of at most `tokens` tokens.

    launches  u64 [n, 2], ingot_launch, for each of the two inputs; they point into `args`, u64, which live as long
    plain     likewise, of steps without LoRA adapters: the launches that are for adapters alone are left out
    begins    the number of each launch's first argument in `args`
    logits    f32 [rows, vocab_size], of the step that ran last
    """

    tokens: int
    launches: tuple[Addresses, Addresses]
    plain: tuple[Addresses, Addresses]
    args: tuple[Addresses, Addresses]
    begins: list[int]
    logits: Float32Array


@dataclass(frozen=True)
class Places:
    """Where things lie: name, or slot and part of the first block -> (address, size in bytes). lora: of the first slot
    for adapters, of no bytes without room."""

    arena: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
    weights: Mapping[str, tuple[int, int]]
    kv: Mapping[tuple[int, str], tuple[int, int]]
    lora: tuple[int, int]
    inputs: tuple[StepInputs, StepInputs]

    @cached_property
    def arena_address(self) -> int:
        """Asked for once: numpy takes a microsecond to tell it, and a plan has thousands of arguments."""
        return int(self.arena.ctypes.data)


def bind_bucket(bucket: dict[str, Any], index: int, places: Places, code: NativeCode) -> BoundBucket:
    """Raises EngineFormatError that names the launch and the argument."""
    where = f"plan.buckets[{index}]"
    entries = field(bucket, "launches", list, where)
    kernels = [code.kernel(field(entry, "kernel", str, where)) for entry in entries]
    addresses: list[int] = []
    begins: list[int] = []
    from_inputs: list[tuple[int, str, int]] = []
    for number, entry in enumerate(entries):
        begins.append(len(addresses))
        for position, arg in enumerate(field(entry, "args", list, f"{where}.launches[{number}]")):
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
    kept = [number for number, entry in enumerate(entries) if not of_adapters(entry, f"{where}.launches[{number}]")]
    plain = launches if len(kept) == len(entries) else (launches[0][kept], launches[1][kept])
    return BoundBucket(bucket["tokens"], launches, plain, (first, second), begins, _logits(bucket, where, places))


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
    return name, _within(rest, 0, getattr(places.inputs[0], name).nbytes)


def _address(arg: list[Any], places: Places, arena_size: int) -> int:
    kind, *rest = arg
    if kind == "arena":
        return places.arena_address + _within(rest, 0, arena_size)
    if kind == "weight":
        address, size = places.weights[rest[0]]
        return address + _within(rest, 1, size)
    if kind == "kv":
        address, size = places.kv[rest[0], rest[1]]
        return address + _within(rest, 2, size)
    if kind == "lora":
        address, size = places.lora
        if not size:
            raise ValueError("the engine has no room for adapters")
        return address + _within(rest, 0, size)
    if kind == "null":
        return 0
    raise ValueError("expected arena, weight, kv, input, lora or null")


def _within(rest: list[Any], at: int, size: int) -> int:
    """rest[at] is the offset; 0 if it is missing."""
    offset = rest[at] if len(rest) > at else 0
    if type(offset) is not int or not 0 <= offset < max(size, 1):
        raise ValueError(f"offset {offset!r} is outside its {size} bytes")
    return offset


def _logits(bucket: dict[str, Any], where: str, places: Places) -> Float32Array:
    """The rows of logits that a step of this bucket may have, as a view of the arena."""
    output = logits_output(bucket, where)
    offset, width = field(output, "offset", int, where), count(output, "width", where)
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
