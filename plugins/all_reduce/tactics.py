"""Sums and joins over the ranks of a tensor-parallel engine: which kernel, and how it is cut.

A sum is taken in one shot where there is little to send: every rank reads all parts, between two meetings. In two
shots a rank reads its share of each part and then the other sums, no more than twice the size of one part, between
three meetings.
"""
from __future__ import annotations

from dataclasses import dataclass

from ..gpu.device import Device
from ..gpu.kernel import SIZES, Candidate, Candidates, Cost, GpuKernel, GpuLaunch, Refusal, arguments, symbol
from ..quantize.tactics import BYTES, ELEMENTS

RANKS = (2, 4, 8)

SIGNAL_BYTES = 64
"""Of a block, in each rank's memory: see gpu.py."""

MAX_BLOCKS = 256
"""Rows of signals that a device must have at the most."""

_BLOCKS = ((1024, 4), (2048, 8), (4096, 8), (8192, 16))
"""Elements of a block, and its warps."""


@dataclass(frozen=True)
class Problem:
    """op "all_reduce" or "all_gather" of [m, width] elements of float_type on each of `ranks` GPUs.

    rows   "T" or "L"
    """

    op: str
    m: int
    width: int
    float_type: str
    rows: str
    ranks: int

    def __post_init__(self) -> None:
        assert self.op in ("all_reduce", "all_gather"), self


def candidates(problem: Problem, device: Device) -> Candidates:
    """Parameters: source, destination, peers, sizes."""
    p = problem
    if p.ranks not in RANKS:
        return Candidates(refused=(Refusal(p.op, f"{p.ranks} ranks; there are kernels for 2, 4 and 8"),))
    most = min(device.num_sms, MAX_BLOCKS)
    legal: list[Candidate] = []
    refused: list[Refusal] = []
    for block, warps in _BLOCKS:
        pieces = -(-p.m * p.width // block)
        if p.op == "all_gather":
            legal.append(_candidate(p, "all_gather", block, warps, min(pieces, most)))
            continue
        if pieces <= most:
            legal.append(_candidate(p, "one_shot", block, warps, pieces))
        else:
            refused.append(Refusal(f"all_reduce.one_shot {block}",
                                   f"{pieces} blocks wait for those of other GPUs; {most} run at a time"))
        legal.append(_candidate(p, "two_shot", block, warps, min(-(-pieces // p.ranks), most)))
    return Candidates(tuple(legal), tuple(refused))


def _candidate(p: Problem, function: str, block: int, warps: int, grid: int) -> Candidate:
    name = function if p.op == function else f"{p.op}.{function}"
    kernel = GpuKernel(
        symbol(p.op, function if function != p.op else "", p.float_type, f"w{p.width}", p.rows, f"r{p.ranks}", block),
        "ingot.plugins.all_reduce.gpu", function,
        *arguments({"source": f"*{ELEMENTS[p.float_type]}", "destination": f"*{ELEMENTS[p.float_type]}",
                    "peers": "*i64", "sizes": "*i32"},
                   {"ROWS": SIZES[p.rows], "WIDTH": p.width, "RANKS": p.ranks, "SIZE": int(BYTES[p.float_type]),
                    "BLOCK": block}), warps, 1)
    rounds = -(-(p.m * p.width) // (block * grid * (p.ranks if function == "two_shot" else 1)))
    return Candidate(f"{name} {block}", (GpuLaunch(kernel, (grid, 1, 1), signal_bytes=SIGNAL_BYTES * grid),),
                     _cost(p, function, rounds))


def _cost(p: Problem, function: str, rounds: int) -> Cost:
    """What comes in over the links, and what goes through this GPU's memory: its own, and what the others read. Each
    meeting is waited for, and in each round of a block what it reads."""
    part, others = p.m * p.width * BYTES[p.float_type], p.ranks - 1
    if function == "one_shot":
        return Cost(part * (2 + others), 0, link_bytes=part * others, link_waits=2 + rounds)
    if function == "two_shot":
        return Cost(part * 4, 0, link_bytes=2 * part * others / p.ranks, link_waits=3 + 2 * rounds)
    return Cost(part * (p.ranks + 1 + others), 0, link_bytes=part * others, link_waits=2 + rounds)
