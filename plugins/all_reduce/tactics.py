"""Sums and joins over the ranks of a tensor-parallel engine: which kernel, and how it is cut.

A sum is taken in one shot where there is little to send: every rank reads all parts, between two meetings. In two
shots a rank reads its share of each part and then the other sums, no more than twice the size of one part, between
three meetings.
"""
from __future__ import annotations

from dataclasses import dataclass, fields, replace

from ..gpu.device import Device
from ..gpu.kernel import (
    SIZES,
    Candidate,
    Candidates,
    Cost,
    GpuKernel,
    GpuLaunch,
    Parameter,
    Refusal,
    arguments,
    symbol,
)
from ..norm import tactics as norm_tactics
from ..quantize.tactics import BYTES, ELEMENTS, element, output, row_block, row_warps

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


@dataclass(frozen=True)
class SumAndNorm:
    """A sum over ranks, and the residual sum and rms_norm of its rows behind it."""

    reduce: Problem
    norm: norm_tactics.Problem

    def __post_init__(self) -> None:
        norm = self.norm
        assert norm.kind == "rms_norm" and norm.residual and norm.y_type and norm.group == 1, self
        assert not (norm.bias or norm.x_weight or norm.static or norm.x_stride), self


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


def sums_and_norms(problem: SumAndNorm, device: Device) -> Candidates:
    """In one launch, or in two. Parameters: source, destination, x (what stands there), residual, total, weight, y,
    y_scale, y_factor, y_sum, peers, sizes."""
    sums = candidates(problem.reduce, device)
    norms = norm_tactics.candidates(problem.norm, device)
    apart = [Candidate(f"{one.name}, {two.name}", (*one.launches, *two.launches), _both(one.cost, two.cost))
             for one in sums.legal for two in norms.legal]
    refused = (*sums.refused, *norms.refused)
    most = min(device.num_sms, MAX_BLOCKS)
    if apart and problem.reduce.m > most:
        refused = (*refused, Refusal("all_reduce.one_shot_norm", f"{problem.reduce.m} rows; {most} run at a time"))
    if not apart or problem.reduce.m > most:
        return Candidates(tuple(apart), refused)
    return Candidates((*apart, _one_launch(problem, norms.legal[0])), refused)


def _one_launch(problem: SumAndNorm, alone: Candidate) -> Candidate:
    p, norm = problem.reduce, problem.norm
    scales, absent = output(norm.y_type, static=False)
    floats = f"*{ELEMENTS[p.float_type]}"
    wanted: dict[str, Parameter | None] = {
        "source": floats, "residual": floats, "total": floats, "weight": "*fp32" if norm.weight else None, **scales,
        "peers": "*i64", "sizes": "*i32"}
    del absent["static_scale"]
    kernel = GpuKernel(
        symbol("all_reduce_norm", p.float_type, norm.y_type, f"w{p.width}", p.rows, f"r{p.ranks}", f"eps{norm.eps}",
               "weight" if norm.weight else ""),
        "ingot.plugins.all_reduce.gpu", "one_shot_norm",
        *arguments(wanted, absent | {
            "ROWS": SIZES[p.rows], "WIDTH": p.width, "RANKS": p.ranks, "SIZE": int(BYTES[p.float_type]),
            "BLOCK": row_block(p.width, norm.y_type), "EPS": norm.eps, **element(norm.y_type)}), row_warps(p.width), 1)
    whole = _both(_cost(p, "one_shot", 1), alone.cost)
    saved = 2 * p.m * p.width * BYTES[p.float_type]  # the sum is neither written nor read
    return Candidate("all_reduce.one_shot_norm", (GpuLaunch(kernel, (p.m, 1, 1), signal_bytes=SIGNAL_BYTES * p.m),),
                     replace(whole, num_bytes=whole.num_bytes - saved))


def _both(one: Cost, other: Cost) -> Cost:
    return Cost(**{field.name: getattr(one, field.name) + getattr(other, field.name) for field in fields(Cost)})


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
