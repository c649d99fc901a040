"""cp.async.bulk.tensor: boxes of a tensor in global memory, copied to and from shared memory by a unit of its own, TMA.

What lies outside of the tensor is zero when it is read and is not written. In shared memory a box is dense, the
innermost dimension first, its 16-byte pieces permuted by the swizzle of its map. A read is done at any time up to the
one when the last warp waits; its barrier then gets the bytes of the whole box. A write is done at the wait for its
group, if not before. Source: PTX ISA, "Tensors", "cp.async.bulk.tensor"; CUDA Driver API, cuTensorMapEncodeTiled.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ingot.runtime.devices.gpu_plan import BoundTensorMap

from .instruction import Address, Code, Immediate, Instruction, PtxError, Run, instruction
from .memory import GlobalMemory
from .tensor_barriers import active_addresses, barrier_at
from .tensor_descriptors import swizzled
from .warp import Block, Warps

_SWIZZLE_WIDTHS = {0: 16, 1: 32, 2: 64, 3: 128}
_ALIGNMENT = 128


@dataclass(frozen=True)
class TensorMap:
    """What a descriptor of 128 bytes tells. extents, box: elements, the innermost dimension first; strides: bytes, of
    the dimensions but the innermost; width: bytes of the swizzle's pattern, 16 for none."""

    address: int
    element_bytes: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    width: int

    @property
    def box_bytes(self) -> int:
        return math.prod(self.box) * self.element_bytes


def tensor_map(argument: BoundTensorMap) -> TensorMap:
    """As the driver encodes it from what a launch passes (runtime/devices/cuda_kernels.py)."""
    kind = argument.type
    if kind.is_padded:
        raise PtxError("tensor maps of four-bit elements in padded bytes are not supported")
    rows, columns = argument.shape
    return TensorMap(argument.address, kind.element_size, (columns, rows), (argument.stride * kind.element_size,),
                     tuple(reversed(kind.box)), _SWIZZLE_WIDTHS[kind.swizzle])


@dataclass(frozen=True)
class Pieces:
    """A box in pieces of equal size: where each lies in global and in shared memory, whether it is in the tensor."""

    size: int
    source: np.ndarray
    inside: np.ndarray
    target: np.ndarray


def pieces_of(tensor: TensorMap, coordinates: tuple[int, ...], shared: int) -> Pieces:
    """coordinates: elements, the innermost first; they may be negative. shared: where the box begins. Raises PtxError
    for what the unit does not take."""
    row_bytes = tensor.box[0] * tensor.element_bytes
    if shared % _ALIGNMENT:
        raise PtxError(f"a box at {shared} of shared memory, expected a multiple of {_ALIGNMENT}")
    if len(coordinates) != len(tensor.box):
        raise PtxError(f"{len(coordinates)} coordinates for a tensor of {len(tensor.box)} dimensions")
    if tensor.width > 16 and row_bytes != tensor.width:
        raise PtxError(f"rows of {row_bytes} bytes with a swizzle of {tensor.width} are not supported")
    inner = tensor.extents[0] - coordinates[0]  # elements to the end of a row of the tensor
    size = math.gcd(16, row_bytes, coordinates[0] * tensor.element_bytes, inner * tensor.element_bytes)
    per_row = row_bytes // size
    along = coordinates[0] * tensor.element_bytes + size * np.arange(per_row)
    source = tensor.address + along
    inside = (along >= 0) & (along < tensor.extents[0] * tensor.element_bytes)
    for dimension in range(1, len(tensor.box)):
        at = coordinates[dimension] + np.arange(tensor.box[dimension])
        shape = (-1,) + (1,) * source.ndim
        inside = inside & ((at >= 0) & (at < tensor.extents[dimension])).reshape(shape)
        source = source + (at * tensor.strides[dimension - 1]).reshape(shape)
    target = swizzled(shared + size * np.arange(source.size), tensor.width)
    return Pieces(size, source.reshape(-1), inside.reshape(-1), target)


def read_box(memory: GlobalMemory, tensor: TensorMap, coordinates: tuple[int, ...], block: Block, shared: int) -> None:
    """Global to shared memory."""
    pieces = pieces_of(tensor, coordinates, shared)
    _check_end(pieces, block)
    address = np.where(pieces.inside, pieces.source, 0).astype(np.uint64)
    data = memory.load(address, pieces.size, pieces.inside)
    block.shared[pieces.target[:, None] + np.arange(pieces.size)] = data


def write_box(memory: GlobalMemory, tensor: TensorMap, coordinates: tuple[int, ...], block: Block, shared: int) -> None:
    """Shared to global memory."""
    pieces = pieces_of(tensor, coordinates, shared)
    _check_end(pieces, block)
    data = block.shared[pieces.target[:, None] + np.arange(pieces.size)]
    address = np.where(pieces.inside, pieces.source, 0).astype(np.uint64)
    memory.store(address, data, pieces.inside)


def _check_end(pieces: Pieces, block: Block) -> None:
    end = int(pieces.target.max()) + pieces.size
    if end > len(block.shared):
        raise PtxError(f"a box ends at {end}, behind the {len(block.shared)} bytes of shared memory")


@instruction("cp.async.bulk.tensor", each=True)
def bulk_tensor(op: Instruction, code: Code) -> Run:
    if not op.has("shared::cta") and not op.has("shared::cluster"):
        raise PtxError(f"{op.opcode}: one side must be in shared memory")
    if any(op.has(part) for part in ("multicast::cluster", "im2col", "gather4", "scatter4", "L2::cache_hint")):
        raise PtxError(f"{op.opcode}: only tiles of one block are supported")
    return _write(op, code) if op.parts[5] == "global" else _read(op)


def _read(op: Instruction) -> Run:
    """[target], [map, {coordinates}], [barrier]"""
    target, source, barrier = op.operands[:3]

    def run(warps: Warps) -> None:
        block, memory = warps.blocks[0], warps.launch.memory
        for at, (tensor, coordinates), to in zip(active_addresses(warps, target), _boxes(warps, source),
                                                 active_addresses(warps, barrier), strict=True):
            barrier_at(block, to)
            target_bytes = np.minimum(at + np.arange(tensor.box_bytes), len(block.shared) - 1)
            warps.launch.shared_access.note_unit_write(block.number, warps.warp_of_block[0], target_bytes)

            def copy(at: int = at, tensor: TensorMap = tensor, coordinates: tuple[int, ...] = coordinates,
                     to: int = to) -> None:
                read_box(memory, tensor, coordinates, block, at)
                barrier_at(block, to).complete(tensor.box_bytes)
            block.pending.append(copy)
    return run


def _write(op: Instruction, code: Code) -> Run:
    """[map, {coordinates}], [source]"""
    target, source = op.operands[:2]
    code.proxies = True

    def run(warps: Warps) -> None:
        block, memory = warps.blocks[0], warps.launch.memory
        lanes = np.flatnonzero(warps.active)
        for lane, (tensor, coordinates), at in zip(lanes, _boxes(warps, target), active_addresses(warps, source),
                                                   strict=True):
            def copy(at: int = at, tensor: TensorMap = tensor, coordinates: tuple[int, ...] = coordinates) -> None:
                write_box(memory, tensor, coordinates, block, at)
            warps.launch.shared_access.check_fenced(block.number, at + np.arange(tensor.box_bytes))
            block.pending.append(copy)
            _groups(warps, int(lane))[-1].append(copy)
    return run


def _boxes(warps: Warps, operand: object) -> list[tuple[TensorMap, tuple[int, ...]]]:
    """Map and coordinates, for each active lane."""
    if not isinstance(operand, Address) or not operand.coordinates:
        raise PtxError(f"{operand} is no address in a tensor")
    places = warps.address(operand)[warps.active]
    columns = [warps.read(item, np.int32)[warps.active] for item in operand.coordinates]
    found = []
    for number, place in enumerate(places):
        told = warps.launch.tensor_map(int(place))
        if not isinstance(told, BoundTensorMap):
            raise PtxError(f"what is at {int(place):#x} is no tensor map")
        tensor = tensor_map(told)
        found.append((tensor, tuple(int(column[number]) for column in columns)))
    return found


Group = list[Callable[[], None]]


def _groups(warps: Warps, lane: int) -> list[Group]:
    """Of copies to global memory, of one thread: those that it has committed, and at the end the open one."""
    key = "bulk groups", warps.warp_of_block[0], lane
    groups: list[Group] = warps.blocks[0].state.setdefault(key, [[]])
    return groups


@instruction("cp.async.bulk.commit_group", each=True)
def commit_group(op: Instruction, code: Code) -> Run:
    def run(warps: Warps) -> None:
        for lane in np.flatnonzero(warps.active):
            _groups(warps, int(lane)).append([])
    return run


@instruction("cp.async.bulk.wait_group", each=True)
def wait_group(op: Instruction, code: Code) -> Run:
    """With .read too the groups are written: that their source may be used again is all that a program may know."""
    allowed = op.operands[0]
    assert isinstance(allowed, Immediate)

    def run(warps: Warps) -> None:
        block = warps.blocks[0]
        for lane in np.flatnonzero(warps.active):
            groups = _groups(warps, int(lane))
            while len(groups) - 1 > int(allowed.value):
                for copy in groups.pop(0):
                    block.finish(copy)
    return run
