"""Warps in lockstep, as an instruction's function sees them.

    warps.read(operand, np.float32)   [lanes] of that type: a view of a register's bits; not to be written to
    warps.write(register, values)     in the active lanes; values [lanes] or a scalar, of a type of the register's width
    warps.active                      bool [lanes]
    warps.address(operand)            u64 [lanes] of an Address: base + offset
    warps.load_shared(address, n)     u8 [lanes, n]; lanes that are not active have zeros
    warps.store_shared(address, data) data u8 [lanes, n]
    warps.load_global, store_global   the same; outside of the launch's arrays they raise PtxError
    warps.blocks[i]                   the block of warp i
    warps.launch                      memory, tensor maps, the program

Memory is little-endian, so `.view` turns bytes to elements. Shared addresses begin at 0 in every block.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .copies import Copies
from .instruction import Address, Immediate, Operand, PtxError, Register, Special, Symbol
from .memory import LocalMemory

if TYPE_CHECKING:
    from .machine import Launch

LANES = 32


@dataclass
class Block:
    """A block (CTA) that runs.

    index         %ctaid: x, y, z
    shared        its shared memory, u8
    state         what modules of instructions keep for the block: mbarriers, tensor memory, …; key: module's choice
    pending       asynchronous work, in the order of its beginning; the machine does each at a time that the seed
                  chooses, at the latest when all warps wait. A module appends functions; what must have happened
                  before something else must be one function, or be run by `finish`.

    of_launch     its number in the launch
    number        among the blocks that run side by side; alive: threads that have not ended
    """

    index: tuple[int, int, int]
    num_warps: int
    shared: np.ndarray
    of_launch: int = 0
    number: int = 0
    alive: int = 0
    state: dict[Any, Any] = field(default_factory=dict)
    pending: list[Callable[[], None]] = field(default_factory=list)

    def finish(self, work: Callable[[], None]) -> None:
        """Does a pending piece of work now, if it was not done before."""
        if work in self.pending:
            self.pending.remove(work)
            work()


class Warps:
    """See above. mask is True where all lanes are active, else bool [lanes]: what numpy takes as `where`.

    bits[width]   list of all registers of that width: u8 to u64 [lanes], or bool for width 1
    views[dtype]  the same as another type of that width: views["f4"], "i4", "u4", "f2", "i2", "u2", "f8", "i8", "u8"
    warp_of_block which warp of its block each warp is; warp_of_launch: i32 [lanes], the same of the whole launch
    """

    def __init__(self, launch: Launch, file: dict[int, np.ndarray], blocks: list[Block], warp_of_block: list[int],
                 shared: np.ndarray, shared_base: np.ndarray) -> None:
        """file: width -> [registers, lanes]. shared: memory of all blocks of these warps; shared_base: i64 [lanes],
        where each lane's block begins in it."""
        self.launch, self.blocks, self.warp_of_block = launch, blocks, warp_of_block
        self.num_warps = len(blocks)
        self.lanes = LANES * self.num_warps
        self.file, self.shared, self.shared_base = file, shared, shared_base
        self.mask: Any = True
        self.bits = {width: list(rows) for width, rows in file.items()}
        self.views: dict[str, list[np.ndarray]] = {}
        for kind in ("u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8"):
            self.views[kind] = list(file[8 * int(kind[1])].view(f"<{kind}"))
        self.views["b1"] = self.bits[1]
        warp = np.repeat(np.array(warp_of_block, np.uint64) + np.uint64(1), LANES)
        self.marks = {f"u{size}": (warp * np.uint64(0x0101010101010101)).astype(f"<u{size}") for size in (1, 2, 4, 8)}
        """In each byte the warp's number in its block, plus one: how the race checker knows it."""
        self.warp_of_launch = np.repeat(np.array([block.of_launch * block.num_warps + warp for block, warp in
                                                  zip(blocks, warp_of_block, strict=True)], np.int32), LANES)
        self.copies = Copies(self.lanes)
        self.local = LocalMemory(self.lanes, launch.code.program.local_bytes)
        self._alone: list[Warps] = []

    @property
    def active(self) -> np.ndarray:
        return np.ones(self.lanes, bool) if self.mask is True else self.mask

    @property
    def alone(self) -> list[Warps]:
        """Each warp by itself, on the same registers; the masks are its own."""
        if self.num_warps == 1:
            return [self]
        if not self._alone:
            for i in range(self.num_warps):
                part = slice(LANES * i, LANES * i + LANES)
                self._alone.append(Warps(self.launch, {w: rows[:, part] for w, rows in self.file.items()},
                                         self.blocks[i : i + 1], self.warp_of_block[i : i + 1], self.shared,
                                         self.shared_base[part]))
        return self._alone

    def read(self, operand: Operand | None, dtype: Any) -> np.ndarray:
        kind = np.dtype(dtype)
        if isinstance(operand, Register):
            row = self.bits[operand.width][operand.index]
            if kind == np.dtype(bool) or row.itemsize == kind.itemsize:
                return row.view(kind)
            raise PtxError(f"{operand.name} has {operand.width} bits, not those of {kind}")
        if isinstance(operand, Immediate):
            value = np.array(operand.bits(8 * kind.itemsize), f"<u{kind.itemsize}").view(kind)
            return np.broadcast_to(value, self.lanes)
        if isinstance(operand, (Special, Symbol)):
            width = 64 if kind.itemsize == 8 else 32
            return self.bits[width][self.launch.code.row(operand, width)].view(kind)
        raise PtxError(f"{operand} is no value")

    def write(self, register: Operand | None, values: Any) -> None:
        """Nothing if the register is None, that is `_`."""
        if register is None:
            return
        assert isinstance(register, Register), register
        row = self.bits[register.width][register.index]
        bits = np.asarray(values)
        if bits.dtype.itemsize != row.dtype.itemsize:
            raise PtxError(f"{register.name} has {register.width} bits; it was given {bits.dtype}")
        np.copyto(row, bits.view(row.dtype), where=self.mask)

    def address(self, operand: Operand | None) -> np.ndarray:
        assert isinstance(operand, Address), operand
        base = operand.base
        narrow = (isinstance(base, Register) and base.width == 32) or isinstance(base, Symbol)
        found = self.read(base, np.uint32 if narrow else np.uint64).astype(np.uint64)
        return found + np.uint64(operand.offset & ((1 << 64) - 1)) if operand.offset else found

    def load_shared(self, address: np.ndarray, num_bytes: int) -> np.ndarray:
        return self.launch.shared_access.load(self, address, num_bytes)

    def store_shared(self, address: np.ndarray, data: np.ndarray) -> None:
        self.launch.shared_access.store(self, address, data)

    def load_global(self, address: np.ndarray, num_bytes: int) -> np.ndarray:
        return self.launch.memory.load(address, num_bytes, self.active)

    def store_global(self, address: np.ndarray, data: np.ndarray) -> None:
        self.launch.memory.store(address, data, self.active)
