"""tcgen05.mma: products that one thread begins, of matrices in shared memory (A also in tensor memory), with sums in
tensor memory, on sm_100a and sm_103a; with scales of blocks, which lie in tensor memory too.

What a thread has begun is done in its order, at any time until a warp waits for the barrier of the thread's commit: the
matrices are read and the sums written then. Row r of sums is in lane r, or with 64 rows in lane 32 × (r / 16) + r % 16;
the scales of row r are in lane r % 32, column r / 32, and again in each group of 32 lanes. Sums are in float32. Source:
PTX ISA, "TensorCore 5th generation matrix multiply and accumulate operations": instruction descriptor, data path layout
organization (D and F), block scaling.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .instruction import Address, Code, Immediate, Instruction, Operand, PtxError, Run, Vector, instruction
from .tensor_barriers import active_addresses, barrier_at
from .tensor_descriptors import check_fenced, of_tcgen05, read_matrix
from .tensor_elements import BITS, decode_scale, unpack
from .tensor_memory import NUM_LANES, TensorMemory, tensor_memory
from .tensor_mma import Kind, Scales, multiply_add
from .tensor_pipeline import Pipeline, Work
from .warp import Block, Warps

_KEY = "tcgen05"
_CHANNELS = {"kind::f16": 16, "kind::tf32": 8, "kind::f8f6f4": 32, "kind::i8": 32, "kind::mxf8f6f4": 32,
             "kind::mxf4": 64, "kind::mxf4nvf4": 64}
_TYPES = {"kind::f16": {0: "f16", 1: "bf16"}, "kind::tf32": {2: "tf32"}, "kind::f8f6f4": {0: "e4m3", 1: "e5m2"},
          "kind::i8": {0: "u8", 1: "s8"}, "kind::mxf8f6f4": {0: "e4m3", 1: "e5m2"}, "kind::mxf4": {1: "e2m1"},
          "kind::mxf4nvf4": {1: "e2m1"}}
_SUMS = {1: "f32", 2: "s32"}
_SCALES = {("kind::mxf8f6f4", "block32"): 1, ("kind::mxf8f6f4", "scale_vec::1X"): 1, ("kind::mxf4", "block32"): 2,
           ("kind::mxf4", "scale_vec::2X"): 2, ("kind::mxf4nvf4", "block32"): 2, ("kind::mxf4nvf4", "scale_vec::2X"): 2,
           ("kind::mxf4nvf4", "block16"): 4, ("kind::mxf4nvf4", "scale_vec::4X"): 4}


@dataclass(frozen=True)
class Form:
    """m, n: rows and columns of the sums; a_is_k_major, b_is_k_major: of matrices in shared memory; sign: of the
    products; scales: of blocks; a_byte, b_byte: where they begin in their words."""

    m: int
    n: int
    kind: Kind
    a_is_k_major: bool
    b_is_k_major: bool
    sign: int = 1
    scales: Scales | None = None
    a_byte: int = 0
    b_byte: int = 0


def parse_descriptor(descriptor: int, kind: str, num_scales: int = 0) -> Form:
    """The instruction descriptor, 32 bits. num_scales: of a row, 0 without. Raises PtxError for what is not
    supported."""
    types = _TYPES[kind]
    a, b = types.get(descriptor >> 7 & 7), types.get(descriptor >> 10 & (3 if kind.startswith("kind::mxf4") else 7))
    if a is None or b is None or descriptor >> 2 & 1:
        raise PtxError(f"instruction descriptor {descriptor:#x}: these types of {kind}, or sparsity, are not supported")
    form = Form(0, (descriptor >> 17 & 63) << 3, Kind(_CHANNELS[kind], a, b, "f32"), not descriptor >> 15 & 1,
                not descriptor >> 16 & 1, -1 if (descriptor >> 13 ^ descriptor >> 14) & 1 else 1)
    if num_scales:
        if kind.startswith("kind::mxf4") and descriptor >> 31:
            raise PtxError(f"instruction descriptor {descriptor:#x}: products of 96 channels are not supported")
        form = replace(form, m=(descriptor >> 27 & 3) << 7, a_byte=descriptor >> 29 & 3, b_byte=descriptor >> 4 & 3,
                       scales=Scales("ue8m0" if descriptor >> 23 & 1 else "ue4m3", num_scales))
    else:
        total = _SUMS.get(descriptor >> 4 & 3)
        if total is None or (total == "s32") != (kind == "kind::i8"):
            raise PtxError(f"instruction descriptor {descriptor:#x}: sums of this type are not supported")
        form = replace(form, m=(descriptor >> 24 & 31) << 4,
                       kind=replace(form.kind, sum=total, saturates=bool(descriptor >> 3 & 1)))
    if form.m not in (64, 128) or (num_scales and form.m != 128):
        raise PtxError(f"instruction descriptor {descriptor:#x}: {form.m} rows are not supported")
    return form


def lanes_of_rows(m: int, first: int) -> np.ndarray:
    """Where rows of A and of the sums lie; first: the lane of row 0, 0 or, with 64 rows, 16."""
    row = np.arange(m)
    if m == NUM_LANES:
        if first:
            raise PtxError(f"128 rows begin at lane {first}, expected 0")
        return row
    if first not in (0, 16):
        raise PtxError(f"64 rows begin at lane {first}, expected 0 or 16")
    return first + 32 * (row // 16) + row % 16


@dataclass(frozen=True)
class Operands:
    """What a product is of. sums, a_scales, b_scales: addresses in tensor memory; a: one too, or a descriptor of shared
    memory; adds: to what the sums are."""

    sums: int
    a: int
    a_is_in_tensor_memory: bool
    b: int
    adds: bool
    a_scales: int = 0
    b_scales: int = 0


def multiply(shared: np.ndarray, memory: TensorMemory, form: Form, operands: Operands) -> None:
    """Reads the matrices and changes the sums."""
    a, b = _read_a(shared, memory, form, operands), read_matrix(
        shared, of_tcgen05(operands.b), form.n, form.kind.k, form.kind.b, form.b_is_k_major)
    lanes = lanes_of_rows(form.m, operands.sums >> 16)[:, None]
    columns = (operands.sums & 0xFFFF) + np.arange(form.n)[None, :]
    memory.check(columns)
    dtype = np.int32 if form.kind.sum == "s32" else np.float32
    before = memory.words[lanes, columns].view(dtype) if operands.adds else np.zeros((form.m, form.n), dtype)
    a_scales = b_scales = None
    if form.scales is not None:
        a_scales = read_scales(memory, operands.a_scales, form.m, form.a_byte, form.scales)
        b_scales = read_scales(memory, operands.b_scales, form.n, form.b_byte, form.scales).T
    found = form.sign * multiply_add(a, b.T, form.sign * before, form.kind, a_scales, b_scales)
    memory.words[lanes, columns] = found.view(np.uint32)


def read_scales(memory: TensorMemory, address: int, rows: int, byte: int, scales: Scales) -> np.ndarray:
    """float32 [rows, n]. Raises PtxError where the groups of 32 lanes differ, each of which feeds a quarter of the
    products."""
    row = np.arange(rows)
    columns = (address & 0xFFFF) + row // 32
    memory.check(columns)
    words = memory.words.reshape(4, 32, -1)[:, row % 32, columns]
    parts = np.ascontiguousarray(words).view(np.uint8).reshape(4, rows, 4)[..., byte : byte + scales.count]
    if (parts != parts[0]).any():
        raise PtxError(f"scales at {address:#x} of tensor memory are not the same in all groups of 32 lanes")
    return decode_scale(parts[0], scales.kind)


def _read_a(shared: np.ndarray, memory: TensorMemory, form: Form, operands: Operands) -> np.ndarray:
    kind = form.kind
    if not operands.a_is_in_tensor_memory:
        return read_matrix(shared, of_tcgen05(operands.a), form.m, kind.k, kind.a, form.a_is_k_major)
    lanes = lanes_of_rows(form.m, operands.a >> 16)[:, None]
    columns = (operands.a & 0xFFFF) + np.arange(kind.k * BITS[kind.a] // 32)[None, :]
    memory.check(columns)
    return unpack(memory.words[lanes, columns], kind.a)


@instruction("tcgen05.mma", each=True)
def mma(op: Instruction, code: Code) -> Run:
    """[sums], a, b, descriptor, then with scales [those of a], [those of b], then whether to add."""
    name = op.part(*_CHANNELS)
    if not op.has("cta_group::1") or op.has("ws") or op.has("sp"):
        raise PtxError(f"{op.opcode}: only cta_group::1, dense and not .ws, is supported")
    num_scales = _SCALES[name, op.part(*(size for kind, size in _SCALES if kind == name))] if op.has(
        "block_scale") else 0
    sums, a, b, descriptor, *rest = op.operands
    a_scales, b_scales = rest[:2] if num_scales else (None, None)
    adds, *more = rest[2:] if num_scales else rest
    if isinstance(adds, Vector) or more:
        raise PtxError(f"{op.opcode}: lanes that are left out and scaled sums are not supported")
    code.proxies = True

    def run(warps: Warps) -> None:
        block = warps.blocks[0]
        for lane in map(int, np.flatnonzero(warps.active)):
            form = parse_descriptor(_value(warps, descriptor, lane, np.uint32), name, num_scales)
            operands = Operands(
                _value(warps, sums, lane, np.uint32), _value(warps, a, lane, np.uint64), isinstance(a, Address),
                _value(warps, b, lane, np.uint64), bool(_value(warps, adds, lane, np.bool_)),
                _value(warps, a_scales, lane, np.uint32) if num_scales else 0,
                _value(warps, b_scales, lane, np.uint32) if num_scales else 0)
            _check_fenced(warps, block, form, operands)
            _pipeline(warps, lane).begin(_product(block, form, operands))
    return run


def _check_fenced(warps: Warps, block: Block, form: Form, operands: Operands) -> None:
    access, kind = warps.launch.shared_access, form.kind
    check_fenced(access, block, of_tcgen05(operands.b), form.n, kind.k, kind.b, form.b_is_k_major)
    if not operands.a_is_in_tensor_memory:
        check_fenced(access, block, of_tcgen05(operands.a), form.m, kind.k, kind.a, form.a_is_k_major)


def _product(block: Block, form: Form, operands: Operands) -> Work:
    return lambda: multiply(block.shared, tensor_memory(block), form, operands)


@instruction("tcgen05.commit", each=True)
def commit(op: Instruction, code: Code) -> Run:
    """The barrier gets one arrival when all that the thread has begun is done."""
    if not op.has("cta_group::1") or op.has("multicast::cluster"):
        raise PtxError(f"{op.opcode}: only barriers of the same block are supported")

    def run(warps: Warps) -> None:
        block = warps.blocks[0]
        for lane, at in zip(np.flatnonzero(warps.active), active_addresses(warps, op.operands[0]), strict=True):
            barrier_at(block, at)
            _pipeline(warps, int(lane)).begin(_arrival(block, at))
    return run


def _arrival(block: Block, at: int) -> Work:
    return lambda: barrier_at(block, at).arrive()


def _value(warps: Warps, operand: Operand | None, lane: int, dtype: type) -> int:
    if isinstance(operand, Address):
        return int(warps.address(operand)[lane])
    if isinstance(operand, Immediate) and dtype is np.bool_:
        return int(operand.value)
    return int(warps.read(operand, dtype)[lane])


def _pipeline(warps: Warps, lane: int) -> Pipeline:
    """Of one thread."""
    block = warps.blocks[0]
    key = _KEY, warps.warp_of_block[0], lane
    if key not in block.state:
        block.state[key] = Pipeline(block)
    found = block.state[key]
    assert isinstance(found, Pipeline)
    return found
