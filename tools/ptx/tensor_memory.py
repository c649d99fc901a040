"""Tensor memory of sm_100a: 128 lanes × 512 columns of 32 bits in a block; what warps allocate in it, read and write.

An address is lane << 16 | column. A warp reaches the 32 lanes that begin at 32 × (its number % 4). What a warp
writes is there at its wait, or at any time before. What it reads is in its registers at once: the ISA says at the wait,
but Triton's code uses it before, and the assembler makes each use wait for its registers (seen in disassembled code).
Where columns are allocated is chosen by the seed, and what they hold at first is no number. Of the shapes
of tcgen05.ld and .st, 32x32b, 16x32bx2, whose 16 upper lanes reach other columns of the same rows, and 16x256b, which
has the sums of mma.sync as registers hold them, are supported.
Source: PTX ISA, "Tensor memory", "Tensor memory allocation and management instructions", "tcgen05.ld", "tcgen05.st".
"""
from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .instruction import Address, Code, Immediate, Instruction, Operand, PtxError, Run, instruction
from .tensor_barriers import active_addresses
from .tensor_pipeline import Pipeline
from .tensor_registers import check_whole, gather, rows_of
from .warp import LANES, Block, Warps

NUM_LANES, NUM_COLUMNS = 128, 512
_KEY = "tensor memory"
_LEAST_COLUMNS = 32
_SHAPES = ("32x32b", "16x32bx2", "16x256b")


@dataclass
class TensorMemory:
    """words: u32 [lanes, columns]; taken: first column -> number of columns."""

    words: np.ndarray = field(default_factory=lambda: np.full((NUM_LANES, NUM_COLUMNS), 0xFFFFFFFF, np.uint32))
    taken: dict[int, int] = field(default_factory=dict)
    may_allocate: bool = True

    def allocate(self, columns: int, random: np.random.Generator) -> int:
        """Returns the address. Raises PtxError where hardware would wait for another block to end."""
        if columns & (columns - 1) or not _LEAST_COLUMNS <= columns <= NUM_COLUMNS:
            raise PtxError(f"{columns} columns of tensor memory; expected a power of two from 32 to 512")
        if not self.may_allocate:
            raise PtxError("tensor memory is allocated after the permit was given up")
        free = [at for at in range(0, NUM_COLUMNS, columns)
                if all(at + columns <= begin or begin + count <= at for begin, count in self.taken.items())]
        if not free:
            raise PtxError(f"no {columns} columns of tensor memory are left beside {self.taken}")
        begin = free[int(random.integers(len(free)))]
        self.taken[begin] = columns
        self.words[:, begin : begin + columns] = 0xFFFFFFFF
        return begin

    def free(self, address: int, columns: int) -> None:
        if self.taken.get(address) != columns:
            raise PtxError(f"{columns} columns of tensor memory at {address:#x} are given back; there are {self.taken}")
        del self.taken[address]

    def check(self, columns: np.ndarray) -> None:
        """Raises PtxError for columns that are not allocated."""
        for begin, count in self.taken.items():
            if begin <= columns.min() and columns.max() < begin + count:
                return
        raise PtxError(f"columns {columns.min()} to {columns.max()} of tensor memory are not in one piece that was "
                       f"allocated: {self.taken}")


def tensor_memory(block: Block) -> TensorMemory:
    if _KEY not in block.state:
        block.state[_KEY] = TensorMemory()
    found = block.state[_KEY]
    assert isinstance(found, TensorMemory)
    return found


def places(address: int, registers: int, shape: str, split: int) -> tuple[np.ndarray, np.ndarray]:
    """Lanes and columns of what the lanes of a warp hold, [registers, 32] each. split: columns that the upper half of
    the lanes is ahead, in 16x32bx2."""
    lane, column = address >> 16, address & 0xFFFF
    thread, register = np.arange(LANES)[None, :], np.arange(registers)[:, None]
    if shape == "32x32b":
        return lane + thread + 0 * register, column + register + 0 * thread
    if shape == "16x256b":
        return lane + thread // 4 + register // 2 % 2 * 8, column + thread % 4 * 2 + register % 2 + register // 4 * 8
    return lane + thread % 16 + 0 * register, column + register + split * (thread // 16)


@instruction("tcgen05.alloc", each=True)
def alloc(op: Instruction, code: Code) -> Run:
    _check_group(op)
    target, count = op.operands

    def run(warps: Warps) -> None:
        check_whole(warps, op)
        block = warps.blocks[0]
        columns = int(warps.read(count, np.uint32)[0])
        address = tensor_memory(block).allocate(columns, warps.launch.random)
        at = active_addresses(warps, target)[0]
        block.shared[at : at + 4] = np.array([address], "<u4").view(np.uint8)
    return run


@instruction("tcgen05.dealloc", each=True)
def dealloc(op: Instruction, code: Code) -> Run:
    _check_group(op)
    address, count = op.operands

    def run(warps: Warps) -> None:
        check_whole(warps, op)
        tensor_memory(warps.blocks[0]).free(_same(warps, address), _same(warps, count))
    return run


@instruction("tcgen05.relinquish_alloc_permit", each=True)
def relinquish(op: Instruction, code: Code) -> Run:
    def run(warps: Warps) -> None:
        tensor_memory(warps.blocks[0]).may_allocate = False
    return run


@instruction("tcgen05.ld", each=True)
def load(op: Instruction, code: Code) -> Run:
    """{registers}, [address], and of 16x32bx2 the distance of the halves."""
    shape, split = _form(op)
    d, source = rows_of(code, op.operands[0], op), op.operands[1]

    def run(warps: Warps) -> None:
        check_whole(warps, op)
        memory = tensor_memory(warps.blocks[0])
        warps.file[32][d] = memory.words[_reached(warps, memory, source, len(d), shape, split)]
    return run


@instruction("tcgen05.st", each=True)
def store(op: Instruction, code: Code) -> Run:
    """[address], of 16x32bx2 the distance of the halves, {registers}"""
    shape, split = _form(op)
    target, d = op.operands[0], rows_of(code, op.operands[-1], op)

    def run(warps: Warps) -> None:
        check_whole(warps, op)
        memory = tensor_memory(warps.blocks[0])
        lanes, columns = _reached(warps, memory, target, len(d), shape, split)
        data = gather(warps, d)[0]

        def work() -> None:
            memory.words[lanes, columns] = data
        _pipeline(warps).begin(work)
    return run


@instruction("tcgen05.wait::st", each=True)
def wait(op: Instruction, code: Code) -> Run:
    def run(warps: Warps) -> None:
        pipeline = _pipeline(warps)
        pipeline.finish(pipeline.begun)
    return run


@instruction("tcgen05.wait::ld", "tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def fence(op: Instruction, code: Code) -> Run:
    return lambda warps: None


def _form(op: Instruction) -> tuple[str, int]:
    if op.has("pack::16b") or op.has("unpack::16b") or op.has("red"):
        raise PtxError(f"{op.opcode}: only words as they are are supported")
    shape = op.part(*_SHAPES)
    if shape != "16x32bx2":
        return shape, 0
    split = next((item for item in op.operands if isinstance(item, Immediate)), None)
    if split is None:
        raise PtxError(f"{op.opcode}: the distance of the halves is missing")
    return shape, int(split.value)


def _reached(warps: Warps, memory: TensorMemory, operand: Operand | None, registers: int, shape: str,
             split: int) -> tuple[np.ndarray, np.ndarray]:
    assert isinstance(operand, Address)
    addresses = warps.address(operand)
    if (addresses != addresses[0]).any():
        raise PtxError("the lanes of a warp give different addresses of tensor memory")
    lanes, columns = places(int(addresses[0]), registers, shape, split)
    first = LANES * (warps.warp_of_block[0] % 4)
    if lanes.min() < first or lanes.max() >= first + LANES:
        raise PtxError(f"warp {warps.warp_of_block[0]} reaches for lanes {lanes.min()} to {lanes.max()} of tensor "
                       f"memory, its own are {first} to {first + LANES - 1}")
    memory.check(columns)
    return lanes, columns


def _pipeline(warps: Warps) -> Pipeline:
    """Of what a warp writes."""
    block = warps.blocks[0]
    key = _KEY, warps.warp_of_block[0]
    if key not in block.state:
        block.state[key] = Pipeline(block)
    found = block.state[key]
    assert isinstance(found, Pipeline)
    return found


def _same(warps: Warps, operand: Operand | None) -> int:
    values = warps.read(operand, np.uint32)
    if (values != values[0]).any():
        raise PtxError("the lanes of a warp give different values where one is expected")
    return int(values[0])


def _check_group(op: Instruction) -> None:
    if not op.has("cta_group::1"):
        raise PtxError(f"{op.opcode}: only cta_group::1 is supported")
