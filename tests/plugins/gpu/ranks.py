"""The memory of several ranks, and launches on all of them."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ingot.compiler.gpu.triton_compile import PtxKernel
from ingot.plugins.all_reduce.tactics import MAX_BLOCKS, SIGNAL_BYTES
from ingot.plugins.gpu.kernel import Candidate
from tools.ptx.code import Code
from tools.ptx.machine import Options
from tools.ptx.memory import BASE, GlobalMemory
from tools.ptx.parser import parse
from tools.ptx.ranks import RanksLaunch

from . import support

_ALIGNMENT = 256


class Ranks:
    """Each rank's arena holds NaN, `source` [rows, width] with random numbers, and where it is another place
    `destination`. signals i32 [blocks, 16]."""

    def __init__(self, count: int, rows: int, width: int, kind: str, op: str, in_place: bool = False) -> None:
        assert not in_place or op == "all_reduce"
        self.count, self.shape = count, (rows, width)
        self.joined = (rows, width * (count if op == "all_gather" else 1))
        element = support.unwritten((1,), kind).itemsize
        self.begins = _ALIGNMENT, _ALIGNMENT + (0 if in_place else -(-rows * width * element // 256) * 256)
        size = self.begins[1] + self.joined[0] * self.joined[1] * element
        self.arenas = [aligned(support.unwritten((-(-size // element),), kind)) for _ in range(count)]
        self.signals = [aligned(np.zeros((MAX_BLOCKS, SIGNAL_BYTES // 4), np.int32)) for _ in range(count)]
        rng = np.random.default_rng(0)
        for rank in range(count):
            self.source(rank)[...] = support.store(rng.standard_normal(self.shape), kind)

    def source(self, rank: int) -> np.ndarray:
        return self._view(rank, self.begins[0], self.shape)

    def destination(self, rank: int) -> np.ndarray:
        return self._view(rank, self.begins[1], self.joined)

    def fill(self, parts: list[np.ndarray]) -> None:
        for rank, part in enumerate(parts):
            self.source(rank)[...] = part

    def table(self, rank: int) -> np.ndarray:
        """What the kernels call `peers`."""
        return np.array([rank, *(int(memory.ctypes.data) for memory in (*self.arenas, *self.signals))], np.int64)

    def give_up(self) -> None:
        for signals in self.signals:
            signals.fill(1)

    def _view(self, rank: int, begin: int, shape: tuple[int, int]) -> np.ndarray:
        arena = self.arenas[rank]
        first = begin // arena.itemsize
        return arena[first : first + shape[0] * shape[1]].reshape(shape)


def in_threads(team: Ranks, way: Candidate, rows: int, ranks: int | None = None, limit_s: float = 60.0,
               others: Sequence[Mapping[str, np.ndarray]] = ()) -> None:
    """In Triton's interpreter, in this process. others: of each rank, parameter -> array (aligned)."""
    from ingot.plugins.gpu.interpret import prepare, run_together

    sizes, count = aligned(np.array([rows, 0, 0, 0], np.int32)), team.count if ranks is None else ranks
    tables = [aligned(team.table(rank)) for rank in range(count)]
    for launch in way.launches:
        launches = []
        for rank, table in enumerate(tables):
            arena = int(team.arenas[rank].ctypes.data)
            given = {"source": arena + team.begins[0], "destination": arena + team.begins[1],
                     "x": arena + team.begins[1], "peers": int(table.ctypes.data), "sizes": int(sizes.ctypes.data)}
            given |= {name: int(array.ctypes.data) for name, array in (others[rank] if others else {}).items()}
            launches.append(prepare(launch.kernel, launch.grid, given))
        run_together(launches, team.give_up, limit_s)


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at an address that is a multiple of 256."""
    memory = np.zeros(array.nbytes + _ALIGNMENT, np.uint8)
    begin = -int(memory.ctypes.data) % _ALIGNMENT
    found = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found



def on_machine(team: Ranks, way: Candidate, rows: int, compiled: PtxKernel, ptx: str, options: Options,
               others: Mapping[str, np.ndarray], result: str) -> list[np.ndarray]:
    """As compiled code, of the text `ptx`; what each rank has in `result` when its launch has ended: "destination", or
    one of `others`, parameter -> array of every rank.

    A rank's source is there when its launch begins, and gone when it has ended: the launches before and behind it.
    """
    memory = GlobalMemory({f"{name} {rank}": array for rank in range(team.count) for name, array in (
        ("arena", team.arenas[rank]), ("signals", team.signals[rank]), ("table", team.table(rank)), *others.items())}
        | {"sizes": np.array([rows, 0, 0, 0], np.int32)})
    places, code, params = memory.addresses, Code(parse(ptx)), []
    (launch,) = way.launches

    def held(name: str, form: np.ndarray, begin: int = 0) -> np.ndarray:
        at = places[name] - BASE + begin
        return memory.bytes[at : at + form.nbytes].view(form.dtype).reshape(form.shape)

    for rank in range(team.count):
        table = np.array([rank, *(places[f"{name} {other}"] for name in ("arena", "signals")
                                  for other in range(team.count))], np.int64)
        held(f"table {rank}", table)[...] = table
        held(f"arena {rank}", team.source(rank), team.begins[0]).fill(1)
        arena = places[f"arena {rank}"]
        given = {"source": arena + team.begins[0], "destination": arena + team.begins[1],
                 "peers": places[f"table {rank}"], "sizes": places["sizes"],
                 **{name: places[f"{name} {rank}"] for name in others}}
        values = [*(given[name] for name, _ in launch.kernel.parameters), 0, 0]
        params.append(dict(zip((param.name for param in code.program.params), values, strict=True)))
    found: dict[int, np.ndarray] = {}

    def begin(rank: int) -> None:
        held(f"arena {rank}", team.source(rank), team.begins[0])[...] = team.source(rank)

    def end(rank: int) -> None:
        found[rank] = (held(f"arena {rank}", team.destination(rank), team.begins[1]) if result == "destination" else
                       held(f"{result} {rank}", others[result])).copy()
        held(f"arena {rank}", team.source(rank), team.begins[0]).fill(2)
        held(f"arena {rank}", team.destination(rank), team.begins[1]).fill(2)

    RanksLaunch(code, memory, params, launch.grid[0], 32 * compiled.num_warps, compiled.shared_bytes, options, begin,
                end).run()
    return [found[rank] for rank in range(team.count)]
