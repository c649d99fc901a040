"""Kernels along the last dimension on a GPU: softmax, running sums, the largest, the best in order, scattering.

In every problem: rows is how many there are, a number or a symbol of the step with a factor ("9*T"), m the most of them
in a step; rows lie without gaps. Element types: "fp32", "bf16", "fp16", "i32", and for what is only moved "i8", "u8",
"bool". Parameters are named as here, with `sizes` behind them where rows is symbolic.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..constants import Rows
from ..gpu.device import Device
from ..gpu.kernel import (
    SIZES,
    Candidate,
    Candidates,
    Constant,
    Cost,
    GpuKernel,
    GpuLaunch,
    Parameter,
    Refusal,
    arguments,
    symbol,
)

MODULE = "ingot.plugins.select.gpu"
ELEMENTS = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "i32": "i32", "i8": "i8", "u8": "u8", "bool": "u8"}
BYTES = {"fp32": 4, "i32": 4, "bf16": 2, "fp16": 2, "i8": 1, "u8": 1, "bool": 1}
_TILE = 1024
_PAIRS = 4096
"""Comparisons of a block at a time."""

_MAX_ORDERED = 1 << 15
"""Every element is compared with every other of its row."""


@dataclass(frozen=True)
class Softmax:
    """x [rows, width] -> y; y may be x where the types are the same."""

    m: int
    rows: Rows
    width: int
    x_type: str
    y_type: str


@dataclass(frozen=True)
class Cumsum:
    """x [rows, width] -> y, the sums so far; floats to floats, integers to "i32"."""

    m: int
    rows: Rows
    width: int
    x_type: str
    y_type: str


@dataclass(frozen=True)
class Argmax:
    """x [rows, width] -> y i32 [rows]: the first of the largest; NaN counts as the largest."""

    m: int
    rows: Rows
    width: int
    x_type: str


@dataclass(frozen=True)
class TopK:
    """x [rows, width] -> values [rows, k] of its type, indices i32 [rows, k]; a sort is a TopK of all.

    The best first, of equals the lower index. NaN counts as larger than infinity.
    """

    m: int
    rows: Rows
    width: int
    k: int
    x_type: str
    largest: bool = True

    def __post_init__(self) -> None:
        assert 1 <= self.k <= self.width, self


@dataclass(frozen=True)
class Scatter:
    """x [rows, width], index i32 [rows, count], source [rows, source_width] -> y: x with y[r, index[r, i]] =
    source[r, i] for i < count, in this order. source_width 0: source is one element. y must not be x."""

    m: int
    rows: Rows
    width: int
    count: int
    source_width: int
    type: str

    def __post_init__(self) -> None:
        assert self.source_width == 0 or self.source_width >= self.count, self


def row_constants(rows: Rows) -> dict[str, Constant]:
    """ROWS and FACTOR of plugins/gpu/rows.py: "9*T" -> where T stands in the step's sizes, and 9."""
    if isinstance(rows, int):
        return {"ROWS": 0, "FACTOR": rows}
    factor, _, name = rows.rpartition("*")
    return {"ROWS": SIZES[name], "FACTOR": int(factor or 1)}


def softmax(problem: Softmax, device: Device) -> Candidates:
    p = problem
    tile = _row_tile(p.width)
    moved = p.m * p.width * ((1 if p.width <= tile["BLOCK"] else 3) * BYTES[p.x_type] + BYTES[p.y_type])
    return _one("softmax", p.rows, {"x": p.x_type, "y": p.y_type}, {"N": p.width, **tile}, (p.m, 1), moved)


def cumsum(problem: Cumsum, device: Device) -> Candidates:
    p = problem
    moved = p.m * p.width * (BYTES[p.x_type] + BYTES[p.y_type])
    return _one("cumsum", p.rows, {"x": p.x_type, "y": p.y_type}, {"N": p.width, **_row_tile(p.width, _TILE)},
                (p.m, 1), moved)


def argmax(problem: Argmax, device: Device) -> Candidates:
    p = problem
    return _one("argmax", p.rows, {"x": p.x_type, "y": "i32"}, {"N": p.width, **_row_tile(p.width, _TILE)},
                (p.m, 1), p.m * (p.width * BYTES[p.x_type] + 4))


def topk(problem: TopK, device: Device) -> Candidates:
    p = problem
    if p.width > _MAX_ORDERED:
        return Candidates(refused=(Refusal("topk", f"rows of {p.width}; up to {_MAX_ORDERED} are ordered"),))
    tile = _pair_tile(p.width, p.width)
    return _one("topk", p.rows, {"x": p.x_type, "values": p.x_type, "indices": "i32"},
                {"N": p.width, "K": p.k, "LARGEST": p.largest, **tile}, (p.m, p.width),
                p.m * (p.width + p.k) * BYTES[p.x_type] + 4.0 * p.m * p.k, 2.0 * p.m * p.width**2)


def scatter(problem: Scatter, device: Device) -> Candidates:
    p = problem
    return _one("scatter", p.rows, {"x": p.type, "index": "i32", "source": p.type, "y": p.type},
                {"N": p.width, "COUNT": p.count, "SOURCE_N": p.source_width, **_pair_tile(p.width, p.count)},
                (p.m, p.width), p.m * (2 * p.width + p.count) * BYTES[p.type] + 4.0 * p.m * p.count,
                2.0 * p.m * p.width * p.count)


def _row_tile(width: int, most: int = 4 * _TILE) -> dict[str, int]:
    block = min(most, _power_of_two(width))
    return {"R": max(1, _TILE // block), "BLOCK": block}


def _pair_tile(width: int, others: int) -> dict[str, int]:
    """A few rows whole, or a piece of one."""
    block, against = (min(64, _power_of_two(extent)) for extent in (width, others))
    return {"R": max(1, min(16, _PAIRS // (block * against))), "BLOCK": block, "OTHERS": against}


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _one(name: str, rows: Rows, values: Mapping[str, str], constants: Mapping[str, int], size: tuple[int, int],
         num_bytes: float, flops: float = 0.0) -> Candidates:
    """The one launch. size: the most rows, and how many elements of a row blocks divide among them (1: none)."""
    parameters: dict[str, Parameter | None] = {value: f"*{ELEMENTS[kind]}" for value, kind in values.items()}
    parameters["sizes"] = "*i32" if isinstance(rows, str) else None
    words = [f"{key.lower()}{int(constant)}" for key, constant in constants.items()]
    kernel = GpuKernel(symbol(name, str(rows).replace("*", ""), *words, *values.values()), MODULE, name,
                       *arguments(parameters, row_constants(rows) | dict(constants)), 4, 1)
    grid = -(-size[0] // constants["R"]), -(-size[1] // constants["BLOCK"]), 1
    return Candidates((Candidate(name, (GpuLaunch(kernel, grid),), Cost(num_bytes, flops)),))
