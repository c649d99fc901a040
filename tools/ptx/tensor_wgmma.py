"""wgmma: products of the four warps of a warpgroup, of matrices in shared memory (A also in registers), on sm_90a.

Each warp computes its own 16 of the 64 rows. The products of a group are begun when it is committed, and done at any
time until a warp waits for the group: registers and shared memory are read then, so that what is overwritten too early
shows. Sums are in float32; those of fp8 have about 14 bits on hardware, which is not imitated. Source: PTX ISA,
"Asynchronous warpgroup level matrix multiply-accumulate operation using wgmma.mma_async instruction".
"""
from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .instruction import Code, Immediate, Instruction, Operand, PtxError, Run, Vector, instruction
from .tensor_descriptors import check_fenced, of_wgmma, read_matrix
from .tensor_elements import BITS, unpack
from .tensor_fragments import order_of_a, order_of_c
from .tensor_mma import Kind, multiply_add
from .tensor_pipeline import Pipeline, Work
from .tensor_registers import check_whole, gather, rows_of
from .warp import Block, Warps

_SHAPE = re.compile(r"m64n(\d+)k(\d+)")
_SUMS = {"f32": np.float32, "s32": np.int32}
_ROWS = 16
"""Of a warp."""


@dataclass(frozen=True)
class Form:
    """n: columns of B; a_is_k_major, b_is_k_major: of matrices in shared memory; a_sign, b_sign: 1 or -1."""

    n: int
    kind: Kind
    a_is_k_major: bool = True
    b_is_k_major: bool = True
    a_sign: int = 1
    b_sign: int = 1


@dataclass
class Queue:
    """Of one warp. open: begun since the last commit; groups: the number of the last piece of each group."""

    pipeline: Pipeline
    open: list[Work]
    groups: list[int]


def product(shared: np.ndarray, form: Form, a: np.ndarray, b_descriptor: int, sums: np.ndarray) -> np.ndarray:
    """a: bits [16, K]; sums: registers, u32 [registers, 32]. Returns registers of the result."""
    b = read_matrix(shared, of_wgmma(b_descriptor), form.n, form.kind.k, form.kind.b, form.b_is_k_major)
    order = order_of_c(form.n)
    before = sums.view(_SUMS[form.kind.sum]).reshape(-1)
    sign = form.a_sign * form.b_sign
    found = np.empty_like(before)
    found[order.reshape(-1)] = sign * multiply_add(a, b.T, sign * before[order], form.kind).reshape(-1)
    return found.view(np.uint32).reshape(sums.shape)


def shared_rows_of_a(shared: np.ndarray, form: Form, descriptor: int, warp: int) -> np.ndarray:
    """Bits of a warp's rows, [16, K]."""
    whole = read_matrix(shared, of_wgmma(descriptor), 4 * _ROWS, form.kind.k, form.kind.a, form.a_is_k_major)
    return whole[_ROWS * warp : _ROWS * (warp + 1)]


def register_rows_of_a(registers: np.ndarray, form: Form) -> np.ndarray:
    """registers: u32 [4, 32] -> bits [16, K]."""
    order = order_of_a(form.kind.k, 32 // BITS[form.kind.a])
    return unpack(registers, form.kind.a).reshape(-1)[order]


@instruction("wgmma.mma_async", each=True)
def mma_async(op: Instruction, code: Code) -> Run:
    d_operand, a_operand, b_operand, *_ = op.operands
    form, d = parse_form(op), rows_of(code, d_operand, op)
    if len(d) != form.n // 2:
        raise PtxError(f"{op.opcode}: {len(d)} registers of the sum, expected {form.n // 2}")
    adds = _condition(op.operands[3])
    a = rows_of(code, a_operand, op) if isinstance(a_operand, Vector) else None
    code.proxies = True

    def run(warps: Warps) -> None:
        check_whole(warps, op)
        block, warp = warps.blocks[0], warps.warp_of_block[0] % 4
        b_descriptor, keeps = _uniform(warps, b_operand), adds(warps)
        a_descriptor = _uniform(warps, a_operand) if a is None else 0
        access, kind = warps.launch.shared_access, form.kind
        read = [check_fenced(access, block, of_wgmma(b_descriptor), form.n, kind.k, kind.b, form.b_is_k_major)]
        if a is None:
            whole = check_fenced(access, block, of_wgmma(a_descriptor), 4 * _ROWS, kind.k, kind.a, form.a_is_k_major)
            read.append(whole[_ROWS * warp : _ROWS * (warp + 1)] if form.a_is_k_major else whole)
        for address in read:
            access.note_unit_read(block.number, warps.warp_of_block[0], address)

        def work() -> None:
            left = (shared_rows_of_a(block.shared, form, a_descriptor, warp) if a is None else
                    register_rows_of_a(gather(warps, a)[0], form))
            sums = gather(warps, d)[0] if keeps else np.zeros((len(d), 32), np.uint32)
            warps.file[32][d] = product(block.shared, form, left, b_descriptor, sums)
        _queue(warps).open.append(work)
    return run


@instruction("wgmma.commit_group", each=True)
def commit_group(op: Instruction, code: Code) -> Run:
    def run(warps: Warps) -> None:
        queue = _queue(warps)
        for work in queue.open:
            queue.pipeline.begin(work)
        queue.open = []
        queue.groups.append(queue.pipeline.begun)
    return run


@instruction("wgmma.wait_group", each=True)
def wait_group(op: Instruction, code: Code) -> Run:
    allowed = op.operands[0]
    assert isinstance(allowed, Immediate)

    def run(warps: Warps) -> None:
        queue = _queue(warps)
        while len(queue.groups) > int(allowed.value):
            queue.pipeline.finish(queue.groups.pop(0))
    return run


@instruction("wgmma.fence")
def fence(op: Instruction, code: Code) -> Run:
    return lambda warps: None


@instruction("setmaxnreg", "griddepcontrol")
def nothing(op: Instruction, code: Code) -> Run:
    """How many registers a warp may have, and when the next grid may begin, changes no result here: a launch begins
    when the one before has ended."""
    return lambda warps: None


def parse_form(op: Instruction) -> Form:
    """d, a, b, scale-d, then signs of a and b (floats) and transpositions (16 bits; of a only in shared memory).
    Raises PtxError for what is not supported."""
    shape = next(filter(None, map(_SHAPE.fullmatch, op.parts)), None)
    types = [part for part in op.parts if part in BITS]
    if shape is None or len(types) != 3 or types[0] not in _SUMS or op.has("sp"):
        raise PtxError(f"{op.opcode}: this combination of types is not supported")
    if BITS[types[1]] * int(shape[2]) != 256:
        raise PtxError(f"{op.opcode}: {shape[2]} channels of {types[1]}")
    numbers = [int(item.value) for item in op.operands[4:] if isinstance(item, Immediate)]
    a_sign, b_sign = numbers[:2] if len(numbers) >= 2 else (1, 1)
    transposed = numbers[2:]
    in_registers = isinstance(op.operands[1], Vector)
    b_transposed = transposed[-1] if transposed else 0
    a_transposed = transposed[0] if transposed and not in_registers else 0
    kind = Kind(int(shape[2]), types[1], types[2], types[0], op.has("satfinite"))
    return Form(int(shape[1]), kind, not a_transposed, not b_transposed, a_sign, b_sign)


def _condition(operand: Operand | None) -> Callable[[Warps], bool]:
    if isinstance(operand, Immediate):
        value = bool(operand.value)
        return lambda warps: value
    return lambda warps: bool(_same(warps.read(operand, np.bool_)))


def _uniform(warps: Warps, operand: Operand | None) -> int:
    return int(_same(warps.read(operand, np.uint64)))


def _same(values: np.ndarray) -> np.generic:
    """The value of all lanes. Raises PtxError where they differ."""
    if (values != values[0]).any():
        raise PtxError("the lanes of a warp give different values where one is expected")
    return values[0]


def _queue(warps: Warps) -> Queue:
    block: Block = warps.blocks[0]
    key = "wgmma", warps.warp_of_block[0]
    if key not in block.state:
        block.state[key] = Queue(Pipeline(block), [], [])
    found = block.state[key]
    assert isinstance(found, Queue)
    return found
