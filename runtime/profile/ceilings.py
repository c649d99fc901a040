"""What this machine can do at most, measured by kernels that are part of every CPU engine (plugins/cpu/ceilings.py)."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..devices.native_code import Launch, NativeCode, Step
from ..engine_file import EngineFile
from ..errors import WorkFailed
from .work import Work

# As plugins/cpu/ceilings.py has them.
READ_PIECE_BYTES = 4096
CHAINS = 12
OUT_BYTES = 1024
KINDS = ("float", "int8", "w4a8")

# More than any cache holds, read in pieces that are done before the system gives a core to another program.
_READ_BYTES = 256 << 20
_READ_PIECES = 32
_REPEATS = 4
_STEPS = 1 << 15
_MULTIPLY_LAUNCHES = 16


@dataclass(frozen=True)
class Ceilings:
    """read_bytes_s   bytes of memory that all workers together read a second; of a GPU, that a copy reads and writes
    operations_s      multiplications and additions a second on registers: of "float", "int8", and "w4a8", which is
                      4-bit weights with 8-bit activations. What has none is bound by memory alone: "bf16", all of a GPU
    """

    read_bytes_s: float
    operations_s: dict[str, float]

    def seconds(self, work: Work) -> float:
        """The least time that this work can take: the roofline of Williams et al. 2009."""
        most = self.operations_s.get(work.arithmetic, float("inf"))
        return max(work.num_bytes / self.read_bytes_s, work.operations / most)


def measure_ceilings(engine: EngineFile, num_workers: int) -> Ceilings:
    """Takes half a second. Raises EngineMismatch if the engine's code does not run here, or has no such kernels.

    Each is the best of some runs: whatever else the machine does can only make it lower.
    """
    code = NativeCode(engine)
    try:
        code.need("ceiling_read")
        pool = code.pool_create(num_workers)
        if not pool:
            raise WorkFailed(f"the system refuses {num_workers} threads")
        try:
            return _measure(code, pool, num_workers)
        finally:
            code.pool_destroy(pool)
    finally:
        code.close()


def _measure(code: NativeCode, pool: int, num_workers: int) -> Ceilings:
    out = np.zeros(OUT_BYTES * num_workers, np.uint8)
    memory = np.frombuffer(mmap.mmap(-1, _READ_BYTES), np.uint8)
    memory[::mmap.PAGESIZE] = 1  # pages that nobody has written to are all the same one
    piece_bytes = _READ_BYTES // _READ_PIECES
    pieces = [[memory[begin:begin + piece_bytes], out] for begin in range(0, _READ_BYTES, piece_bytes)]
    read_s = _seconds(code, pool, "read", pieces, piece_bytes // READ_PIECE_BYTES)
    zeros, products = np.zeros(64, np.uint8), np.zeros(1, np.int32)
    operations = {}
    for kind in KINDS:
        seconds = _seconds(code, pool, kind, [[zeros, out, products]] * _MULTIPLY_LAUNCHES, _STEPS)
        operations[kind] = 2 * CHAINS * _STEPS * int(products[0]) * num_workers / seconds
    return Ceilings(piece_bytes / read_s, operations)


def _seconds(code: NativeCode, pool: int, kind: str, args: Sequence[Sequence[np.ndarray]], count: int) -> float:
    """The shortest of launches with these arguments; count: the kernel's step->num_tokens."""
    address = code.kernel(f"ceiling_{kind}")
    pointers = [(ctypes.c_void_p * len(each))(*(array.ctypes.data for array in each)) for each in args]
    launches = (Launch * len(args))(*(Launch(address, ctypes.addressof(each)) for each in pointers))
    durations, shortest = np.zeros(len(args), np.int64), []
    for _ in range(_REPEATS):
        code.profile(pool, Step(num_tokens=count), ctypes.addressof(launches), 0, len(args), durations.ctypes.data)
        shortest.append(int(durations.min()))
    return min(shortest) * 1e-9
