"""One kernel on several GPUs at a time, which read and write each other's memory: grids side by side, and the loads,
stores and fences by which threads of different GPUs know of each other (PTX ISA, memory consistency model).

A fence before a relaxed store releases what the warp has seen till then to whoever reads what was stored and fences
after that. All blocks of a GPU are there when its launch begins, which the seed says, and each runs for itself.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .access import address_reader
from .code import Code as Program
from .instruction import Code, Instruction, PtxError, Run, instruction
from .machine import Group, Launch, Options, Scheduler
from .memory import GlobalMemory
from .races import GlobalRaces
from .warp import Block, Warps

_MOST_BARRIERS = 5_000
"""Of a launch: who spins that long waits for something that does not come."""
_PAUSES = (0, 0, 20, 100)
"""One of these is chosen for each GPU, and now and then for any of them: turns of groups in which it does nothing."""
_PAUSED_EVERY = 20


class SystemRaces(GlobalRaces):
    """Knows what fences order beside what atomic operations do."""

    def __init__(self, num_bytes: int, num_blocks: int, num_warps: int) -> None:
        super().__init__(num_bytes, num_blocks, num_warps)
        self._fenced: dict[int, np.ndarray] = {}
        self._seen: dict[int, np.ndarray] = {}

    def fence(self, warp: int, acquires: bool, releases: bool) -> None:
        if acquires and warp in self._seen:
            np.maximum(self._known[warp], self._seen.pop(warp), out=self._known[warp])
        if releases:
            self._fenced[warp] = self._known[warp].copy()
            self._fenced[warp][warp] = self._time[warp // self._num_warps] + 1

    def relaxed_store(self, warp: int, at: int) -> None:
        if warp in self._fenced:
            self._released[at] = self._fenced[warp]
        else:
            self._released.pop(at, None)

    def relaxed_load(self, warp: int, at: int) -> None:
        if at in self._released:
            self._seen[warp] = np.maximum(self._seen.get(warp, 0), self._released[at])


@instruction("ld.relaxed.sys")
def load(op: Instruction, code: Code) -> Run:
    _check(op)
    d, address = code.target(op.operands[0], 32), address_reader(op.operands[1], code)

    def run(warps: Warps) -> None:
        memory, races = warps.launch.memory, warps.launch.global_races
        at = memory.offsets(address(warps), 4, warps.mask).astype(np.int64)
        np.copyto(warps.bits[32][d], memory.view("u4", 1)[at // 4, 0], where=warps.mask)
        if isinstance(races, SystemRaces):
            for lane in np.flatnonzero(warps.active):
                races.relaxed_load(int(warps.warp_of_launch[lane]), int(at[lane]))
    return run


@instruction("st.relaxed.sys")
def store(op: Instruction, code: Code) -> Run:
    _check(op)
    address, value = address_reader(op.operands[0], code), code.row(op.operands[1], 32)

    def run(warps: Warps) -> None:
        memory, races = warps.launch.memory, warps.launch.global_races
        at = memory.offsets(address(warps), 4, warps.mask).astype(np.int64)
        for lane in np.flatnonzero(warps.active):
            memory.view("u4", 1)[at[lane] // 4, 0] = warps.bits[32][value][lane]
            if isinstance(races, SystemRaces):
                races.relaxed_store(int(warps.warp_of_launch[lane]), int(at[lane]))
    return run


@instruction("fence.acquire.sys", "fence.release.sys", "fence.acq_rel.sys")
def fence(op: Instruction, code: Code) -> Run:
    acquires, releases = not op.has("release"), not op.has("acquire")

    def run(warps: Warps) -> None:
        races = warps.launch.global_races
        if isinstance(races, SystemRaces):
            for warp in np.unique(warps.warp_of_launch[warps.active]):
                races.fence(int(warp), acquires, releases)
    return run


def _check(op: Instruction) -> None:
    if op.parts[3] != "global" or op.parts[-1] not in ("b32", "u32", "s32") or len(op.parts) != 5:
        raise PtxError(f"{op.opcode} is not supported")


class RanksLaunch(Launch):
    """A kernel on each of several GPUs. params: of each of them, as Launch takes them. num_blocks: of each.

    begin, end: are told a rank before its launch begins, and when it has ended: the launches before and behind it.
    Raises PtxError also where they wait for each other and nobody comes.
    """

    def __init__(self, code: Program, memory: GlobalMemory, params: Sequence[Mapping[str, Any]], num_blocks: int,
                 num_threads: int, shared_bytes: int, options: Options,
                 begin: Callable[[int], None] = lambda rank: None,
                 end: Callable[[int], None] = lambda rank: None) -> None:
        super().__init__(code, memory, params[0], (num_blocks, 1, len(params)), num_threads, shared_bytes, options)
        self.params_by_rank, self.begin, self.end = params, begin, end
        self._barriers = 0
        if self.races:
            self.global_races = SystemRaces(len(memory.bytes), num_blocks * len(params), self.num_warps)

    def run(self) -> None:
        """The blocks of all GPUs side by side."""
        num_blocks, ranks = self.grid[0], self.grid[2]
        order = [int(number) for number in self.random.permutation(num_blocks * ranks)]
        blocks = [Block((number % num_blocks, 0, number // num_blocks), self.num_warps, np.zeros(0, np.uint8), number)
                  for number in order]
        with np.errstate(all="ignore"):
            _Turns(self, self.groups(blocks, 1), blocks).run()

    def barrier(self, block: Block) -> None:
        super().barrier(block)
        self._barriers += 1
        if self._barriers > _MOST_BARRIERS:
            raise PtxError(f"no end in sight: block {block.index} still waits after {_MOST_BARRIERS} barriers")

    def _special(self, name: str, thread: np.ndarray, index: np.ndarray) -> Any:
        if name.startswith("param:"):
            values = [params[name.partition(":")[2]] for params in self.params_by_rank]
            return np.array(values, np.uint64)[index[:, 2]]
        if name in ("%ctaid.z", "%nctaid.z"):
            return 0 if name == "%ctaid.z" else 1
        return super()._special(name, thread, index)


class _Turns(Scheduler):
    """Lets GPUs begin, and pause, one or the other, and tells when each has begun and ended."""

    def __init__(self, launch: RanksLaunch, groups: list[Group], blocks: list[Block]) -> None:
        super().__init__(launch, groups, blocks)
        self._ranks = launch
        self._pauses = [int(launch.random.choice(_PAUSES)) for _ in range(launch.grid[2])]
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    def _run(self, group: Group) -> bool:
        random, rank = self._launch.random, group.members[0][0].index[2]
        self._pauses = [max(0, left - 1) for left in self._pauses]
        if random.integers(_PAUSED_EVERY) == 0:
            self._pauses[int(random.integers(len(self._pauses)))] = int(random.choice(_PAUSES))
        if self._pauses[rank]:
            return True
        if rank not in self._begun:
            self._begun.add(rank)
            self._ranks.begin(rank)
        went_on = super()._run(group)
        if rank not in self._ended and not any(one.alive.any() for one in self._groups
                                               if one.members[0][0].index[2] == rank):
            self._ended.add(rank)
            self._ranks.end(rank)
        return went_on
