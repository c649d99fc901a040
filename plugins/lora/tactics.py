"""The launches of LoRA adapters on a GPU."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..gpu.device import Device
from ..gpu.kernel import Candidate, Candidates, Constant, Cost, GpuKernel, GpuLaunch, arguments, symbol
from ..quantize.tactics import BYTES, ELEMENTS

MODULE = "ingot.plugins.lora.gpu"
MAX_PARTS = 4
"""Of an expand."""

_FEW_TOKENS, _FEW_ROWS, _MANY_ROWS = 64, 16, 64
_MAX_SPLITS, _SPLIT_CHANNELS = 8, 512
_MAX_RANK_BLOCK, _BLOCK_K, _BLOCK_N = 64, 64, 64


@dataclass(frozen=True)
class Shrink:
    """h[T, num_modules * rank] = x[T, k] aᵀ, in `splits(m, k)` sums of parts of the channels.

    m             the most tokens of a step
    x_stride      elements between rows of x; 0: k
    module_bytes  from one module's a to the next one's, in a slot of slot_bytes, of which there are num_slots
    """

    m: int
    k: int
    rank: int
    num_modules: int
    module_bytes: int
    slot_bytes: int
    num_slots: int
    x_type: str
    x_stride: int = 0


@dataclass(frozen=True)
class Expand:
    """y[T, n] += h[T, h_width] b, in the columns of each part; h in so many sums.

    parts  at most MAX_PARTS: (first column of y, columns, bytes from the pointer to its b, first column of h)
    """

    m: int
    n: int
    h_width: int
    splits: int
    rank: int
    slot_bytes: int
    num_slots: int
    y_type: str
    parts: tuple[tuple[int, int, int, int], ...]

    def __post_init__(self) -> None:
        assert 1 <= len(self.parts) <= MAX_PARTS, self


def splits(m: int, k: int) -> int:
    """In how many sums of its own a product over k channels is made: few tokens would leave most of a GPU idle."""
    return -(-k // _channels(m, k))


def _channels(m: int, k: int) -> int:
    """Of each sum, in whole tiles."""
    parts = 1 if m > _FEW_TOKENS else max(1, min(_MAX_SPLITS, k // _SPLIT_CHANNELS))
    return -(-k // parts // _BLOCK_K) * _BLOCK_K


def shrink(problem: Shrink, device: Device) -> Candidates:
    """Parameters: x, a, h, adapters, token_seq, sizes."""
    return Candidates(tuple(_shrink(problem, rows) for rows in _rows(problem.m)))


def _shrink(p: Shrink, rows: int) -> Candidate:
    block_r, parts = min(_MAX_RANK_BLOCK, _power(p.rank)), splits(p.m, p.k)
    constants: dict[str, Constant] = {
        "K": p.k, "RANK": p.rank, "MODULES": p.num_modules, "X_STRIDE": p.x_stride or p.k,
        "A_STRIDE": p.module_bytes // 2, "SLOT_STRIDE": p.slot_bytes // 2, "NUM_SLOTS": p.num_slots,
        "K_SPLIT": _channels(p.m, p.k), "BLOCK_M": rows, "BLOCK_R": block_r, "BLOCK_K": _BLOCK_K}
    kernel = _kernel("shrink", (p.x_type, *constants.values()), {"x": p.x_type, "a": "bf16", "h": "fp32"}, constants)
    grid = -(-p.m // rows), p.num_modules * -(-p.rank // block_r), parts
    width = p.num_modules * p.rank
    moved = p.m * (p.k * BYTES[p.x_type] + 4 * parts * width) + 2 * width * p.k
    return Candidate(f"lora_shrink {rows}", (GpuLaunch(kernel, grid),), Cost(moved, 2.0 * p.m * width * p.k))


def expand(problem: Expand, device: Device) -> Candidates:
    """Parameters: y, h, b, adapters, token_seq, sizes."""
    return Candidates(tuple(_expand(problem, rows) for rows in _rows(problem.m)))


def _expand(p: Expand, rows: int) -> Candidate:
    block_r = min(_MAX_RANK_BLOCK, _power(p.rank))
    constants: dict[str, Constant] = {
        "N": p.n, "H_WIDTH": p.h_width, "RANK": p.rank, "SLOT_STRIDE": p.slot_bytes // 2, "NUM_SLOTS": p.num_slots,
        "SPLITS": p.splits, "BLOCK_M": rows, "BLOCK_N": _BLOCK_N, "BLOCK_R": block_r}
    for number in range(MAX_PARTS):
        start, width, offset, column = p.parts[number] if number < len(p.parts) else (0, 0, 0, 0)
        constants |= {f"START{number}": start, f"WIDTH{number}": width, f"B{number}": offset // 2,
                      f"COLUMN{number}": column}
    kernel = _kernel("expand", (p.y_type, *constants.values()), {"y": p.y_type, "h": "fp32", "b": "bf16"}, constants)
    width = sum(part[1] for part in p.parts)
    grid = -(-p.m // rows), sum(-(-part[1] // _BLOCK_N) for part in p.parts), 1
    moved = p.m * (2 * width * BYTES[p.y_type] + 4 * p.splits * p.h_width) + 2 * p.rank * width
    return Candidate(f"lora_expand {rows}", (GpuLaunch(kernel, grid),), Cost(moved, 2.0 * p.m * width * p.rank))


def _kernel(name: str, words: tuple[Any, ...], pointers: dict[str, str], constants: dict[str, Constant]) -> GpuKernel:
    parameters = {**{key: f"*{ELEMENTS[kind]}" for key, kind in pointers.items()}, "adapters": "*i32",
                  "token_seq": "*i32", "sizes": "*i32"}
    # What is not bfloat16 is multiplied in three parts, which take registers; so do tiles of many rows.
    warps, stages = 8 if constants["BLOCK_M"] == _MANY_ROWS else 4, 3 if words[0] == "bf16" else 2
    return GpuKernel(symbol(f"lora_{name}", *words), MODULE, name, *arguments(dict(parameters), constants), warps,
                     stages)


def _rows(m: int) -> tuple[int, ...]:
    """Tokens of a block; fewer where registers are too few for so many."""
    return (_FEW_ROWS,) if m <= _FEW_TOKENS else (_MANY_ROWS, _MANY_ROWS // 2)


def _power(rank: int) -> int:
    """The power of two that a tile of so many rows takes: of at least 16, as matrix instructions do."""
    return max(16, 1 << (rank - 1).bit_length())
