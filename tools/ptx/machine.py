"""Runs a launch: blocks and warps in an order that a seed chooses.

Warps run in groups, in lockstep: a group is one warp, the warps of one block or of several, and runs until it meets a
barrier, has to wait, or has done an atomic operation; then the seed chooses who goes on. Lanes that part at a branch
are masked, and those furthest behind in the text run first, which brings them together again. A program whose warps
wait for each other otherwise than at barriers (mbarrier) runs each warp alone.

What the order of warps within a stretch between barriers would show, the race checker of shared memory shows too, so
lockstep hides nothing there; the same is looked for in global memory (races.py), in launches that are not too large.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .code import Code, Stretch, is_atomic
from .instruction import Instruction, PtxError
from .memory import PARAM_BASE, POISON, GlobalMemory, SharedAccess
from .races import MOST_WARPS, GlobalRaces
from .warp import LANES, Block, Warps

MOST_LANES = 2048
"""Of a group of several blocks: wider arrays no longer cost less for a lane."""
RESIDENT_BLOCKS = 16
"""That run side by side."""
_BUDGET = 4096
"""Stretches after which a group that meets nothing gives way: it may be waiting for another block's memory."""
_MOST_IDLE = 200_000
_PATIENCE = (2, 8, 64)
"""One of these is chosen for a launch: after how many turns of groups, on the average, a piece of asynchronous work
that nobody waits for is done."""


@dataclass(frozen=True)
class Options:
    """seed: of the order; lockstep: "warp", "block" or "grid", how large groups may be."""

    seed: int = 0
    lockstep: str = "grid"


class Launch:
    """One execution of a kernel. params: parameter -> value: an integer's or float's bits, or what a tensor map is; and
    the addresses of the program's tables."""

    def __init__(self, code: Code, memory: GlobalMemory, params: Mapping[str, Any], grid: tuple[int, int, int],
                 num_threads: int, shared_bytes: int, options: Options) -> None:
        self.code, self.memory, self.params, self.grid, self.options = code, memory, params, grid, options
        self.num_threads = num_threads
        if code.program.num_threads not in (0, num_threads):
            raise PtxError(f"blocks of {num_threads} threads are launched; the code is for {code.program.num_threads}")
        self.shared_bytes = max(shared_bytes, code.program.shared_bytes)
        self.random = np.random.default_rng(options.seed)
        self.num_warps = -(-num_threads // LANES)
        self.races = not any(_is_partial(op, num_threads) or _lets_others_go_on(op)
                             for op in code.program.instructions)
        self.alone = options.lockstep == "warp" or code.waits
        self.shared_access = SharedAccess(0, 0, False)
        self.global_races: GlobalRaces | None = None
        num_blocks = grid[0] * grid[1] * grid[2]
        if self.races and num_blocks * self.num_warps <= MOST_WARPS:
            self.global_races = GlobalRaces(len(memory.bytes), num_blocks, self.num_warps)

    def tensor_map(self, address: int) -> Any:
        """What the parameter at that address is. Raises PtxError if there is no tensor map."""
        for name, offset in self.code.param_offsets.items():
            if PARAM_BASE + offset == address:
                return self.params[name]
        raise PtxError(f"there is no tensor map at {address:#x}")

    def run(self) -> None:
        """Every block."""
        indices = [(x, y, z) for z in range(self.grid[2]) for y in range(self.grid[1]) for x in range(self.grid[0])]
        order = [indices[i] for i in self.random.permutation(len(indices))]
        together = 1
        if self.options.lockstep == "grid" and not self.alone:
            together = max(1, MOST_LANES // (self.num_warps * LANES))
        resident = max(RESIDENT_BLOCKS, together)
        with np.errstate(all="ignore"):
            for begin in range(0, len(order), resident):
                self._wave([Block(index, self.num_warps, np.zeros(0, np.uint8), indices.index(index))
                            for index in order[begin : begin + resident]], together)

    def barrier(self, block: Block) -> None:
        """All threads of the block have met: what they did before is done."""
        self.shared_access.barrier(block.number)
        if self.global_races is not None:
            self.global_races.barrier(block.of_launch)

    def _wave(self, blocks: list[Block], together: int) -> None:
        Scheduler(self, self.groups(blocks, together), blocks).run()

    def groups(self, blocks: list[Block], together: int) -> list[Group]:
        """Of blocks that run side by side, so many of them to a group."""
        self.shared_access = SharedAccess(len(blocks), self.shared_bytes, self.races)
        for number, block in enumerate(blocks):
            block.number, block.shared, block.alive = number, self.shared_access.block(number), self.num_threads
        groups = []
        for begin in range(0, len(blocks), together):
            chosen = [(block, warp) for block in blocks[begin : begin + together] for warp in range(self.num_warps)]
            for part in [[one] for one in chosen] if self.alone else [chosen]:
                groups.append(Group(self, part))
        return groups

    def register_file(self, blocks: list[Block], warps: list[int]) -> dict[int, np.ndarray]:
        """All registers of these warps; those that the program writes hold poison, the others what they stand for."""
        lanes = LANES * len(blocks)
        file = {1: np.ones((self.code.rows[1], lanes), bool)}
        for width in (8, 16, 32, 64):
            file[width] = np.full((self.code.rows[width], lanes), (1 << width) // 255 * POISON, f"<u{width // 8}")
        for (width, row), bits in self.code.constants.items():
            file[width][row] = bits
        thread = (np.array(warps)[:, None] * LANES + np.arange(LANES)).reshape(-1)
        index = np.repeat(np.array([block.index for block in blocks]), LANES, axis=0)
        for name, places in self.code.specials.items():
            values = self._special(name, thread, index)
            for width, row in places.items():
                if width == 1:
                    raise PtxError(f"{name} is no predicate")
                file[width][row] = np.asarray(values).astype(np.uint64).astype(f"<u{width // 8}")
        return file

    def _special(self, name: str, thread: np.ndarray, index: np.ndarray) -> Any:
        kind, _, axis = name.partition(".")
        at = "xyz".find(axis) if axis else 0
        lane = np.uint64(1) << (thread % LANES).astype(np.uint64)
        if name.startswith("param:"):
            return self.params[name.partition(":")[2]]
        known = {"%tid": thread if at == 0 else 0, "%ntid": self.num_threads if at == 0 else 1,
                 "%ctaid": index[:, at], "%nctaid": self.grid[at], "%laneid": thread % LANES,
                 "%warpid": thread // LANES, "%nwarpid": self.num_warps, "%lanemask_eq": lane,
                 "%lanemask_lt": lane - np.uint64(1), "%lanemask_le": lane * np.uint64(2) - np.uint64(1),
                 "%cluster_ctarank": 0, "%cluster_nctarank": 1, "%cluster_ctaid": 0, "%cluster_nctaid": 1,
                 "%clusterid": index[:, at], "%nclusterid": self.grid[at], "%is_explicit_cluster": 0}
        if kind not in known:
            raise PtxError(f"the special register {name} is not supported")
        return known[kind]


def _is_partial(op: Instruction, num_threads: int) -> bool:
    """Whether it is a barrier that not all threads of a block meet at."""
    if op.opcode.partition(".")[0] not in ("bar", "barrier") or op.opcode.startswith("bar.warp"):
        return False
    return op.has("arrive") or (len(op.operands) > 1 and getattr(op.operands[1], "value", None) != num_threads)


def _lets_others_go_on(op: Instruction) -> bool:
    """Whether threads arrive for others that wait, otherwise than at a barrier of all; one that says how many bytes a
    copy will bring, or a product's end, arrives for the units that copy and multiply."""
    return op.opcode.startswith("mbarrier.arrive") and not op.has("expect_tx")


@dataclass
class Group:
    """Warps that run in lockstep. fragments: number of the next instruction -> bool [lanes], those that stand there;
    lanes that wait at a barrier are in none. stuck: it could not go on when it was last tried."""

    launch: Launch
    members: list[tuple[Block, int]]
    warps: Warps = field(init=False)
    fragments: dict[int, np.ndarray] = field(init=False)
    alive: np.ndarray = field(init=False)
    stuck: bool = False

    def __post_init__(self) -> None:
        blocks, warps = [block for block, _ in self.members], [warp for _, warp in self.members]
        shared = self.launch.shared_access
        base = np.repeat(np.array([block.number * shared.block_bytes for block in blocks]), LANES)
        self.warps = Warps(self.launch, self.launch.register_file(blocks, warps), blocks, warps, shared.bytes, base)
        threads = (np.array(warps)[:, None] * LANES + np.arange(LANES)).reshape(-1)
        self.alive = threads < self.launch.num_threads
        self.fragments = {0: self.alive.copy()}
        self.all_lanes = bool(self.alive.all())
        self.blocks = list(dict.fromkeys(block.number for block in blocks))
        self.block_of_lane = np.repeat(np.array([block.number for block in blocks]), LANES)
        self.whole = len(blocks) == self.launch.num_warps * len(self.blocks)

    def add(self, pc: int, mask: np.ndarray) -> None:
        at = self.fragments.get(pc)
        self.fragments[pc] = mask if at is None else at | mask


class Scheduler:
    """Lets groups run until all have ended. Raises PtxError, with where."""

    def __init__(self, launch: Launch, groups: list[Group], blocks: list[Block]) -> None:
        self._launch, self._groups, self._blocks = launch, groups, blocks
        self._stretches = launch.code.stretches
        self._waiting: dict[tuple[int, int], list[tuple[Group, np.ndarray, int]]] = {}
        """(block, barrier) -> who waits there, and where each goes on."""
        self._arrived: Counter[tuple[int, int]] = Counter()
        self._wanted: dict[tuple[int, int], int | None] = {}

    def run(self) -> None:
        random, idle = self._launch.random, 0
        patience = int(random.choice(_PATIENCE))
        while ready := [group for group in self._groups if group.fragments]:
            free = [group for group in ready if not group.stuck]
            pending = [block for block in self._blocks if block.pending]
            if pending and (not free or random.integers(patience) == 0):
                _do_one(pending[int(random.integers(len(pending)))], random)
                self._wake()
                continue
            if not free:
                raise PtxError("all warps wait: " + self._where(ready))
            group = free[int(random.integers(len(free)))]
            idle = 0 if self._run(group) else idle + 1
            if not group.stuck:  # it may have done what another waits for
                self._wake()
            if idle > _MOST_IDLE:
                raise PtxError("no end in sight: " + self._where(ready))
        for block in self._blocks:
            while block.pending:
                _do_one(block, random)
        if self._waiting:
            (number, barrier), _ = next(iter(self._waiting.items()))
            raise PtxError(f"block {self._blocks[number].index} waits at barrier {barrier}, and nobody else comes")

    def _wake(self) -> None:
        for group in self._groups:
            group.stuck = False

    def _where(self, groups: list[Group]) -> str:
        lines = [f"block {group.members[0][0].index} warp {group.members[0][1]} at line {self._line(pc)}"
                 for group in groups for pc in group.fragments]
        return "; ".join(lines[:8])

    def _line(self, pc: int) -> int:
        ops = self._launch.code.program.instructions
        return ops[min(pc, len(ops) - 1)].line

    def _run(self, group: Group) -> bool:
        """False if it came to nothing new within its budget."""
        first = True
        for _ in range(_BUDGET):
            if not group.fragments:
                return True
            pc = min(group.fragments)
            mask = group.fragments.pop(pc)
            stretch = self._stretches.get(pc)
            if stretch is None:
                raise PtxError("the kernel runs past its end")
            if not self._stretch(group, stretch, pc, mask, first):
                return True
            first = False
        return False

    def _stretch(self, group: Group, stretch: Stretch, pc: int, mask: np.ndarray, first: bool) -> bool:
        """Runs it. True if the group may go on at once."""
        warps = group.warps
        full = bool(mask.all())
        warps.mask = True if full else mask
        stretch.executions += warps.num_warps if full else int(mask.reshape(-1, LANES).any(1).sum())
        op = None
        try:
            for step in stretch.steps:
                op = step.op
                step.run(warps)
            op = stretch.last
            if op is None:
                group.add(stretch.next, mask)
                return True
            if stretch.wait is not None:
                return self._wait(group, stretch, pc, mask, first)
            return self._end(group, stretch, op, mask)
        except (PtxError, ValueError, TypeError, IndexError, KeyError, AssertionError) as error:
            known = error if isinstance(error, PtxError) else PtxError(f"{type(error).__name__}: {error}")
            raise PtxError(f"{known}\n  in {_shown(op)}, blocks {_indices(group, mask)}, warps "
                           f"{sorted(set(warps.warp_of_block))}") from (None if known is error else error)

    def _wait(self, group: Group, stretch: Stretch, pc: int, mask: np.ndarray, first: bool) -> bool:
        """Tries what may have to wait. Nothing else of the stretch must be done again, so that it stands alone."""
        assert stretch.wait is not None
        if not stretch.wait(group.warps):
            group.add(stretch.next, mask)
            self._wake()
            return not is_atomic(stretch.last)
        group.add(stretch.next - 1, mask)
        group.stuck = first and not stretch.steps
        if stretch.next - 1 not in self._stretches:
            self._stretches[stretch.next - 1] = Stretch([], stretch.last, stretch.wait, stretch.next)
        return False

    def _end(self, group: Group, stretch: Stretch, op: Instruction, mask: np.ndarray) -> bool:
        """A jump, a barrier, or the end of the threads."""
        chosen = mask
        if op.predicate is not None:
            row = group.warps.bits[1][op.predicate.register.index]
            chosen = mask & (~row if op.predicate.negated else row)
            if not chosen.all() and (left := mask & ~chosen).any():
                group.add(stretch.next, left)
            if not chosen.any():
                return True
        name = op.opcode.partition(".")[0]
        if name == "bra":
            group.add(int(op.operands[0].value), chosen)  # type: ignore[union-attr]
            return True
        if name == "trap":
            raise PtxError("trap")
        if name in ("ret", "exit"):
            self._exit(group, chosen)
            return True
        self._barrier(group, op, chosen, stretch.next)
        return False

    def _exit(self, group: Group, mask: np.ndarray) -> None:
        group.alive &= ~mask
        for number in np.unique(group.block_of_lane[mask]):
            block = self._blocks[number]
            block.alive -= int((mask & (group.block_of_lane == number)).sum())
            for key in [key for key in self._waiting if key[0] == number]:
                self._release(key)

    def _barrier(self, group: Group, op: Instruction, mask: np.ndarray, after: int) -> None:
        """bar.sync a, b and its kin: what it waits for is b threads, or all of the block that still run."""
        parts = op.opcode.split(".")
        if "sync" not in parts and "arrive" not in parts:
            raise PtxError(f"unknown instruction {op.opcode}")
        waits = "sync" in parts
        if group.whole and waits and len(op.operands) == 1 and mask is not None and bool(mask.all()):
            for number in group.blocks:
                self._launch.barrier(self._blocks[number])
            group.add(after, mask)
            return
        barrier = group.warps.read(op.operands[0], np.uint32)
        count = group.warps.read(op.operands[1], np.uint32) if len(op.operands) > 1 else None
        for number in np.unique(group.block_of_lane[mask]):
            mine = mask & (group.block_of_lane == number)
            key = int(number), int(barrier[np.argmax(mine)])
            self._arrived[key] += int(mine.sum())
            self._wanted[key] = None if count is None else int(count[np.argmax(mine)])
            self._waiting.setdefault(key, [])
            if waits:
                self._waiting[key].append((group, mine, after))
            else:
                group.add(after, mine)
            self._release(key)

    def _release(self, key: tuple[int, int]) -> None:
        """Those who wait at the barrier go on if all have come."""
        block = self._blocks[key[0]]
        wanted = self._wanted[key]
        if self._arrived[key] < (block.alive if wanted is None else wanted):
            return
        for group, mask, after in self._waiting.pop(key):
            group.add(after, mask)
            group.stuck = False
        del self._arrived[key]
        self._launch.barrier(block)


def _do_one(block: Block, random: np.random.Generator) -> None:
    block.pending.pop(int(random.integers(len(block.pending))))()


def _shown(op: Instruction | None) -> str:
    return "a jump" if op is None else f"line {op.line}: {op.opcode}"


def _indices(group: Group, mask: np.ndarray) -> str:
    some = list(np.any(mask.reshape(-1, LANES), axis=1))
    found = list(dict.fromkeys(block.index for (block, _), here in zip(group.members, some, strict=True) if here))
    return ", ".join(map(str, found[:4])) + (", …" if len(found) > 4 else "")
