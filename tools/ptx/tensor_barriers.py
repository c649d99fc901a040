"""mbarrier: objects in shared memory that count arrivals and bytes of asynchronous copies, phase after phase.

A phase ends when as many threads have arrived as the object was made for, and as many bytes have come as were expected.
What an object holds is not in shared memory but beside it; its eight bytes there are a mark, so that a program that
writes over them is found out. Also elect.sync, and fences: that between threads and units of their own is looked for,
the others the machine does not need, since it runs one instruction after the other.
Source: PTX ISA, "Parallel synchronization and communication instructions: mbarrier".
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .instruction import Address, Code, Immediate, Instruction, Operand, Pair, PtxError, Run, instruction
from .warp import LANES, Block, Warps

_MARK = np.frombuffer(b"mbarrier", np.uint8)
_KEY = "mbarriers"


@dataclass
class Barrier:
    """count: arrivals that a phase waits for; waiting: those that are still to come; missing_bytes: expected less come;
    phase: number of the phase that runs."""

    count: int
    waiting: int
    missing_bytes: int = 0
    phase: int = 0

    def arrive(self, threads: int = 1) -> None:
        if threads > self.waiting:
            raise PtxError(f"{threads} threads arrive at a barrier that waits for {self.waiting}")
        self.waiting -= threads
        self._end()

    def expect(self, num_bytes: int) -> None:
        self.missing_bytes += num_bytes

    def complete(self, num_bytes: int) -> None:
        """The bytes have come, perhaps before they were expected."""
        self.missing_bytes -= num_bytes
        self._end()

    def is_over(self, parity: int) -> bool:
        """Whether the last phase of that parity has ended."""
        return self.phase & 1 != parity & 1

    def _end(self) -> None:
        if self.waiting == 0 and self.missing_bytes == 0:
            self.phase += 1
            self.waiting = self.count


def barrier_at(block: Block, address: int) -> Barrier:
    """Raises PtxError where there is none."""
    found = block.state.get(_KEY, {}).get(address)
    if found is None:
        raise PtxError(f"there is no barrier at {address} of shared memory")
    if not np.array_equal(block.shared[address : address + 8], _MARK):
        raise PtxError(f"the barrier at {address} of shared memory was written over")
    assert isinstance(found, Barrier)
    return found


def make_barrier(block: Block, address: int, count: int) -> None:
    barriers = block.state.setdefault(_KEY, {})
    if address % 8 or address + 8 > len(block.shared):
        raise PtxError(f"a barrier at {address}; expected a multiple of 8 in the {len(block.shared)} bytes of a block")
    if count < 1:
        raise PtxError(f"a barrier for {count} threads")
    barriers[address] = Barrier(count, count)
    block.shared[address : address + 8] = _MARK


def remove_barrier(block: Block, address: int) -> None:
    barrier_at(block, address)
    del block.state[_KEY][address]


def active_addresses(warps: Warps, operand: Operand | None) -> list[int]:
    """Of an Address in shared memory, for each active lane."""
    return [int(at) for at in warps.address(operand)[warps.active]]


def active_values(warps: Warps, operand: Operand | None) -> list[int]:
    """Of a 32-bit operand, for each active lane."""
    return [int(value) for value in warps.read(operand, np.uint32)[warps.active]]


@instruction("mbarrier.init", each=True)
def init(op: Instruction, code: Code) -> Run:
    target, count = op.operands

    def run(warps: Warps) -> None:
        for at, threads in zip(active_addresses(warps, target), active_values(warps, count), strict=True):
            make_barrier(warps.blocks[0], at, threads)
    return run


@instruction("mbarrier.inval", each=True)
def inval(op: Instruction, code: Code) -> Run:
    def run(warps: Warps) -> None:
        for at in active_addresses(warps, op.operands[0]):
            remove_barrier(warps.blocks[0], at)
    return run


@instruction("mbarrier.arrive", each=True)
def arrive(op: Instruction, code: Code) -> Run:
    """With expect_tx the last operand is a number of bytes, else one of threads; the state that a lane gets is the
    number of the phase that it arrived in."""
    _check_space(op)
    state, target, *rest = op.operands
    number = rest[0] if rest else Immediate(1)
    expects = op.has("expect_tx")

    def run(warps: Warps) -> None:
        phases = np.zeros(warps.lanes, np.uint64)
        addresses, numbers = active_addresses(warps, target), active_values(warps, number)
        for lane, at, many in zip(np.flatnonzero(warps.active), addresses, numbers, strict=True):
            barrier = barrier_at(warps.blocks[0], at)
            phases[lane] = barrier.phase
            if expects:
                barrier.expect(many)
            barrier.arrive(1 if expects else many)
        warps.write(state, phases)
    return run


@instruction("mbarrier.expect_tx", each=True)
def expect_tx(op: Instruction, code: Code) -> Run:
    _check_space(op)
    target, number = op.operands

    def run(warps: Warps) -> None:
        for at, many in zip(active_addresses(warps, target), active_values(warps, number), strict=True):
            barrier_at(warps.blocks[0], at).expect(many)
    return run


@instruction("mbarrier.try_wait", "mbarrier.test_wait", each=True, waits=True)
def wait(op: Instruction, code: Code) -> Run:
    """The answer is never false: a warp goes on when the phase has ended for all its active lanes."""
    _check_space(op)
    result, target, told = op.operands[:3]
    is_parity = op.has("parity")

    def run(warps: Warps) -> bool:
        addresses = active_addresses(warps, target)
        values = warps.read(told, np.uint32 if is_parity else np.uint64)[warps.active]
        for at, value in zip(addresses, values, strict=True):
            barrier = barrier_at(warps.blocks[0], at)
            if not (barrier.is_over(int(value)) if is_parity else barrier.phase > int(value)):
                return True
        warps.write(result, np.ones(warps.lanes, bool))
        return False
    return run


@instruction("fence")
def fence(op: Instruction, code: Code) -> Run:
    return lambda warps: None


@instruction("fence.proxy.async")
def fence_proxy(op: Instruction, code: Code) -> Run:
    """What threads have written to shared memory may now be read by units that copy and multiply."""
    def run(warps: Warps) -> None:
        access = warps.launch.shared_access
        for block, warp, active in zip(warps.blocks, warps.warp_of_block, warps.active.reshape(-1, LANES), strict=True):
            if active.any():
                access.fence(block.number, warp)
    return run


@instruction("elect.sync")
def elect(op: Instruction, code: Code) -> Run:
    """lane|chosen, members: the first of the members is chosen, and all lanes get its number."""
    result, members = op.operands
    assert isinstance(result, Pair)

    def run(warps: Warps) -> None:
        lane = np.arange(LANES, dtype=np.uint32)
        is_member = (warps.read(members, np.uint32).reshape(-1, LANES) >> lane & 1).astype(bool)
        leader = np.repeat(np.argmax(is_member, axis=1), LANES).astype(np.uint32)
        warps.write(result.first, leader)
        warps.write(result.second, leader == np.tile(lane, warps.num_warps))
    return run


def _check_space(op: Instruction) -> None:
    if op.has("cluster") or any(isinstance(operand, Address) and operand.coordinates for operand in op.operands):
        raise PtxError(f"{op.opcode}: barriers of other blocks are not supported")
