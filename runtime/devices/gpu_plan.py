"""A GPU engine's plan: checked as a whole while the engine is loaded, then bound to addresses.

    plan = GpuPlan.read(engine.plan, limits, layout)      every name, type, offset and size
    buckets = plan.bind(places)                           the launches of each token bucket, with addresses

Nothing in a plan is believed: what is not inside of memory that the engine has never becomes an address. That a kernel
stays within the buffers it is given is the compiler's part. Both devices that run GPU engines read plans through this.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..engine_format import EngineFormatError
from ..lora import LoraRoom
from ..program import Limits
from ..step import StepLayout
from .gpu_kernels import ELEMENT_BYTES, Kernel, TensorMapType, read_kernels
from .plan_fields import (
    DTYPES,
    KvLayout,
    arena_bytes,
    check_buckets,
    count,
    field,
    kv_layout,
    logits_output,
    of_adapters,
    vocab_size,
)

POINTER_ALIGNMENT = 16
"""Of every pointer that a kernel is given: the code was compiled for it."""

MAX_GRID = (2**31 - 1, 65535, 65535)
_SYMBOL = re.compile(r"(?:[1-9][0-9]*\*)?[TL]")
_KV_ELEMENTS = {"f32": "*fp32", "bf16": "*bf16", "f16": "*fp16", "fp8": "*fp8e4nv", "i8": "*i8"}
_INPUT_ELEMENTS = {"int32": ("*i32", "*u32"), "uint32": ("*i32", "*u32"), "float32": ("*fp32",)}


def peers_bytes(num_ranks: int) -> int:
    """Of the table by which kernels find other ranks' memory."""
    return 8 * (1 + 2 * num_ranks)


@dataclass(frozen=True)
class Place:
    """A byte of the device's memory.

    space   "arena", "workspace", "weight", "kv", "input", "lora" (the first slot for adapters), "peers" (where each
            rank's memory is: gpu_collective.py), or "null"
    key     which weight, part of the KV cache, or array of the step
    left    bytes of that memory from here on
    """

    space: str
    key: Any = None
    offset: int = 0
    left: int = 0


@dataclass(frozen=True)
class TensorMapPlace:
    """Rows and columns of `type` from `base` on, rows `stride` elements apart."""

    base: Place
    type: TensorMapType
    shape: tuple[int, int]
    stride: int


@dataclass(frozen=True)
class Launch:
    """One kernel over the whole step. arguments: one for each of its parameters.

    writes: value -> (number of the argument that it is left in, shape, element type); for traces
    adapters: it has nothing to do in a step without LoRA adapters
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    arguments: tuple[Place | TensorMapPlace | int | float, ...]
    op: str
    origin: str
    writes: Mapping[str, tuple[int, tuple[int | str, ...], str]]
    adapters: bool = False


@dataclass(frozen=True)
class Bucket:
    """What runs for a step of at most `tokens` tokens; logits f32 [logits_rows, vocab_size] lie at logits_offset."""

    tokens: int
    launches: tuple[Launch, ...]
    logits_offset: int
    logits_rows: int


@dataclass(frozen=True)
class Weight:
    """blobs: SHA-256 of the data, one for all ranks or one for each."""

    blobs: tuple[str, ...]
    size: int

    def blob_of(self, rank: int) -> str:
        return self.blobs[rank % len(self.blobs)]


@dataclass(frozen=True)
class Places:
    """Addresses in device memory. kv: of block 0. inputs: of each array of a step's layout. lora: of the first slot.
    peers: of the table of all ranks."""

    arena: int
    workspace: int
    weights: Mapping[str, int]
    kv: int
    inputs: Mapping[str, int]
    lora: int = 0
    peers: int = 0


@dataclass(frozen=True)
class BoundTensorMap:
    """shape and stride in elements."""

    address: int
    type: TensorMapType
    shape: tuple[int, int]
    stride: int


Argument = int | float | BoundTensorMap


@dataclass(frozen=True)
class BoundLaunch:
    """A launch with an address, a number or a tensor map for each parameter of its kernel."""

    kernel: Kernel
    grid: tuple[int, int, int]
    arguments: tuple[Argument, ...]
    op: str
    origin: str
    writes: Mapping[str, tuple[int, tuple[int | str, ...], str]]
    adapters: bool = False


@dataclass(frozen=True)
class BoundBucket:
    """logits: the address of f32 [logits_rows, vocab_size]."""

    tokens: int
    launches: tuple[BoundLaunch, ...]
    logits: int
    logits_rows: int


@dataclass(frozen=True)
class GpuPlan:
    """arena_bytes      of the largest bucket
    workspace_bytes  that all launches share; the first zeroed_bytes are zero before the first launch, and after each
    signal_bytes     by which ranks wait for each other: zero before the first launch
    """

    kernels: Mapping[str, Kernel]
    kv: KvLayout
    weights: Mapping[str, Weight]
    arena_bytes: int
    workspace_bytes: int
    zeroed_bytes: int
    signal_bytes: int
    vocab_size: int
    buckets: tuple[Bucket, ...]

    @classmethod
    def read(cls, plan: dict[str, Any], limits: Limits, lora: LoraRoom | None = None, num_ranks: int = 1) -> GpuPlan:
        """lora: room of the engine for adapters. num_ranks: GPUs that it is divided among.

        Raises EngineFormatError with the path to what is wrong."""
        kernels = read_kernels(plan)
        kv = kv_layout(plan)
        workspace = field(plan, "workspace", dict, "plan")
        workspace_bytes = count(workspace, "bytes", "plan.workspace", 0)
        zeroed_bytes = count(workspace, "zeroed_bytes", "plan.workspace", 0, workspace_bytes)
        signal_bytes = count(workspace, "signal_bytes", "plan.workspace", 0)
        weights = {name: _weight(entry, f"plan.weights.{name}")
                   for name, entry in field(plan, "weights", dict, "plan").items()}
        arena = arena_bytes(plan)
        check_buckets(plan, limits)
        width = vocab_size(plan)
        layout = StepLayout(limits, width, kv.block_size, len(kv.windows))
        slots = {slot["slot"]: slot["dtype"] for slot in plan["kv"]["slots"]}
        memory = _Memory(kv, slots, weights, workspace_bytes, layout, lora.bytes_per_adapter if lora else 0,
                         num_ranks)
        buckets = tuple(_bucket(entry, f"plan.buckets[{index}]", kernels, memory, limits, width)
                        for index, entry in enumerate(plan["buckets"]))
        return cls(kernels, kv, weights, arena, workspace_bytes, zeroed_bytes, signal_bytes, width, buckets)

    def bind(self, places: Places) -> tuple[BoundBucket, ...]:
        """Every launch with its addresses. `places` has the address of all that the plan names, aligned to 256."""
        bases: dict[str, Callable[[Any], int]] = {
            "arena": lambda _: places.arena, "workspace": lambda _: places.workspace,
            "weight": places.weights.__getitem__, "input": places.inputs.__getitem__,
            "lora": lambda _: places.lora, "peers": lambda _: places.peers,
            "kv": lambda key: places.kv + self.kv.parts[key][0]}

        def address(place: Place) -> int:
            return 0 if place.space == "null" else bases[place.space](place.key) + place.offset

        def bound(argument: Place | TensorMapPlace | int | float) -> Argument:
            if isinstance(argument, Place):
                return address(argument)
            if isinstance(argument, TensorMapPlace):
                return BoundTensorMap(address(argument.base), argument.type, argument.shape, argument.stride)
            return argument

        return tuple(BoundBucket(
            bucket.tokens,
            tuple(BoundLaunch(launch.kernel, launch.grid, tuple(map(bound, launch.arguments)), launch.op,
                              launch.origin, launch.writes, launch.adapters) for launch in bucket.launches),
            places.arena + bucket.logits_offset, bucket.logits_rows) for bucket in self.buckets)


def _weight(entry: Any, where: str) -> Weight:
    blobs = entry.get("blobs") if isinstance(entry, dict) else None
    if blobs is None:
        blobs = [field(entry, "blob", str, where)]
    if not isinstance(blobs, list) or not blobs or not all(isinstance(blob, str) for blob in blobs):
        raise EngineFormatError(f"{where}: blobs: expected a blob for each rank, got {blobs!r}")
    return Weight(tuple(blobs), count(entry, "size", where))


def _bucket(entry: dict[str, Any], where: str, kernels: Mapping[str, Kernel], memory: _Memory, limits: Limits,
            width: int) -> Bucket:
    tokens, arena = count(entry, "tokens", where), count(entry, "arena_bytes", where, 0)
    launches = tuple(_launch(one, f"{where}.launches[{number}]", kernels, memory, arena)
                     for number, one in enumerate(field(entry, "launches", list, where)))
    output, where = logits_output(entry, where), f"{where}.outputs.logits"
    rows, offset = min(tokens, limits.max_batch_size), count(output, "offset", where, 0)
    if output.get("dtype") != "f32":
        raise EngineFormatError(f"{where}: element type {output.get('dtype')!r}, expected 'f32'")
    if offset % POINTER_ALIGNMENT or offset + 4 * rows * width > arena:
        raise EngineFormatError(f"{where}: {rows} rows of {width} at offset {offset} do not fit the arena of {arena} "
                                f"bytes, or are not aligned to {POINTER_ALIGNMENT}")
    return Bucket(tokens, launches, offset, rows)


def _launch(entry: Any, where: str, kernels: Mapping[str, Kernel], memory: _Memory, arena: int) -> Launch:
    symbol = field(entry, "kernel", str, where)
    if symbol not in kernels:
        raise EngineFormatError(f"{where}: kernel {symbol!r} is not among plan.kernels")
    kernel, where = kernels[symbol], f"{where} ({symbol})"
    grid = field(entry, "grid", list, where)
    if len(grid) != 3 or not all(type(n) is int and 1 <= n <= most for n, most in zip(grid, MAX_GRID, strict=True)):
        raise EngineFormatError(f"{where}: grid: expected three counts of at most {MAX_GRID}, got {grid!r}")
    args = field(entry, "args", list, where)
    if len(args) != len(kernel.parameters):
        raise EngineFormatError(f"{where}: {len(args)} arguments; the kernel takes {len(kernel.parameters)}: "
                                f"{', '.join(name for name, _ in kernel.parameters)}")
    arguments = []
    for (name, kind), arg in zip(kernel.parameters, args, strict=True):
        try:
            arguments.append(memory.argument(arg, kind, arena))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            told = f"there is no {error}" if isinstance(error, KeyError) else str(error)
            raise EngineFormatError(f"{where}: argument {name}, {arg!r}, is wrong: {told}") from None
    return Launch(kernel, (grid[0], grid[1], grid[2]), tuple(arguments), str(entry.get("op", "")),
                  str(entry.get("origin", "")), _writes(entry, where, len(arguments)), of_adapters(entry, where))


def _writes(entry: dict[str, Any], where: str, num_arguments: int) -> dict[str, tuple[int, tuple[int | str, ...], str]]:
    found = {}
    for name, write in (field(entry, "writes", dict, where) if "writes" in entry else {}).items():
        here = f"{where}: writes.{name}"
        shape, dtype = field(write, "shape", list, here), field(write, "dtype", str, here)
        if dtype not in DTYPES or not all(map(_is_extent, shape)):
            raise EngineFormatError(f"{here}: {dtype!r} of shape {shape!r} is no value")
        found[name] = count(write, "arg", here, 0, num_arguments - 1), tuple(shape), dtype
    return found


def _is_extent(extent: Any) -> bool:
    """A number, or one of tokens or rows of logits, of which there may be several: 64, "T", "9*L"."""
    return type(extent) is int or (isinstance(extent, str) and _SYMBOL.fullmatch(extent) is not None)


@dataclass(frozen=True)
class _Memory:
    """What arguments may point into. Its methods raise ValueError and its like, told by `_launch`."""

    kv: KvLayout
    kv_types: Mapping[int, str]
    weights: Mapping[str, Weight]
    workspace_bytes: int
    layout: StepLayout
    adapter_bytes: int
    num_ranks: int

    def argument(self, arg: Any, kind: str | TensorMapType, arena: int) -> Place | TensorMapPlace | int | float:
        if isinstance(kind, TensorMapType):
            return self._tensor_map(arg, kind, arena)
        if kind[0] == "*":
            return self._place(arg, kind, arena)
        if arg[0] != "scalar" or len(arg) != 2:
            raise ValueError(f"expected [\"scalar\", a number], since it is {kind}")
        value = arg[1]
        if kind == "fp32":
            if type(value) not in (int, float) or not math.isfinite(value):
                raise ValueError(f"expected a number, got {value!r}")
            return float(value)
        bits = 31 if kind == "i32" else 63
        if type(value) is not int or not -(1 << bits) <= value < 1 << bits:
            raise ValueError(f"expected an integer of {bits + 1} bits, got {value!r}")
        return int(value)

    def _tensor_map(self, arg: Any, kind: TensorMapType, arena: int) -> TensorMapPlace:
        if arg[0] != "tensormap" or len(arg) != 4:
            raise ValueError("expected [\"tensormap\", an argument, [rows, columns], stride]")
        base = self._place(arg[1], f"*{kind.dtype}", arena)
        (rows, columns), stride = arg[2], arg[3]
        element = ELEMENT_BYTES[kind.dtype]
        if not all(type(n) is int and 1 <= n < 1 << 31 for n in (rows, columns, stride)) or columns > stride:
            raise ValueError(f"{rows!r} x {columns!r} elements with rows {stride!r} apart are no rectangle")
        if stride * element % 16:
            raise ValueError(f"rows of {stride * element} bytes are not aligned to 16")
        if base.space == "null" or ((rows - 1) * stride + columns) * element > base.left:
            raise ValueError(f"{rows} rows of {stride * element} bytes reach beyond its {base.left}")
        return TensorMapPlace(base, kind, (rows, columns), stride)

    def _place(self, arg: Any, kind: str, arena: int) -> Place:
        space, *rest = arg
        if space == "arena":
            return _placed(space, None, rest, 0, arena)
        if space == "workspace":
            return _placed(space, None, rest, 0, self.workspace_bytes)
        if space == "weight":
            return _placed(space, rest[0], rest, 1, self.weights[rest[0]].size)
        if space == "kv":
            key = rest[0], rest[1]
            _fits(kind, ("*fp32",) if key[1].endswith("_scale") else (_KV_ELEMENTS.get(self.kv_types[key[0]], "none"),))
            return _placed(space, key, rest, 2, self.kv.parts[key][1])
        if space == "input":
            _, shape, dtype = self.layout.places[rest[0]]
            if dtype.fields is None:  # a record has fields of several types
                _fits(kind, _INPUT_ELEMENTS[dtype.name])
            return _placed(space, rest[0], rest, 1, math.prod(shape) * dtype.itemsize)
        if space == "lora":
            if not self.adapter_bytes:
                raise ValueError("the engine has no room for adapters")
            _fits(kind, ("*bf16",))
            return _placed(space, None, rest, 0, self.adapter_bytes)
        if space == "peers":
            if self.num_ranks == 1:
                raise ValueError("the engine is for one GPU")
            _fits(kind, ("*i64",))
            return Place(space, None, 0, peers_bytes(self.num_ranks))
        if space == "null":
            return Place("null")
        raise ValueError("expected arena, workspace, weight, kv, input, lora, peers or null, since it is a pointer")


def _placed(space: str, key: Any, rest: list[Any], at: int, size: int) -> Place:
    """rest[at] is the offset; 0 if it is missing."""
    offset = rest[at] if len(rest) > at else 0
    if type(offset) is not int or not 0 <= offset < max(size, 1):
        raise ValueError(f"offset {offset!r} is outside its {size} bytes")
    if offset % POINTER_ALIGNMENT:
        raise ValueError(f"offset {offset} is not aligned to {POINTER_ALIGNMENT}")
    return Place(space, key, offset, size - offset)


def _fits(kind: str, allowed: tuple[str, ...]) -> None:
    if kind not in allowed:
        raise ValueError(f"the kernel takes {kind}, this is {' or '.join(allowed)}")
