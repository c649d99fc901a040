"""Mixtures of experts on a GPU: the launches beside the grouped matrices, which are plugins/linear/tactics.py's."""
from __future__ import annotations

from dataclasses import dataclass

from ..gpu.device import Device
from ..gpu.kernel import SIZES, Candidate, Candidates, Cost, GpuKernel, GpuLaunch, Refusal, arguments, symbol
from ..quantize.tactics import BYTES, ELEMENTS

MODULE = "ingot.plugins.expert_linear.gpu"
SCORES = ("softmax", "sigmoid", "softmax_of_chosen")
MAX_EXPERTS = 1024
MAX_CHOICES = 32


@dataclass(frozen=True)
class Routing:
    """The choice of experts by the router's logits f32 [m, experts]: the IR's operator `route`.

    scores     "softmax" over all experts, "sigmoid", or "softmax_of_chosen"
    bias       f32 [experts] counts for the choice, not for the weights
    normalise  the weights of a token are divided by their sum + eps; factor multiplies them
    groups     > 1: only experts of kept_groups groups can be chosen, of those whose group_best best have the largest
               sum
    """

    m: int
    experts: int
    choices: int
    scores: str = "softmax"
    bias: bool = False
    normalise: bool = False
    factor: float = 1.0
    eps: float = 0.0
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 2

    def __post_init__(self) -> None:
        assert self.scores in SCORES and self.choices <= self.experts and self.experts % self.groups == 0, self


@dataclass(frozen=True)
class Sorting:
    """The rows (token, choice) of at most m tokens, by their expert."""

    m: int
    experts: int
    choices: int


@dataclass(frozen=True)
class Sum:
    """y[m, d] = (residual +) sum over a token's choices of weight * row.

    residual: its element type, "": there is none
    """

    m: int
    d: int
    choices: int
    x_type: str
    y_type: str
    residual: str = ""


def routing(problem: Routing, device: Device) -> Candidates:
    """Parameters: logits, bias, ids, weights, sizes."""
    p = problem
    if p.experts > MAX_EXPERTS or p.choices > MAX_CHOICES:
        return Candidates(refused=(Refusal("route", f"{p.choices} of {p.experts} experts; up to {MAX_CHOICES} of "
                                                    f"{MAX_EXPERTS}"),))
    size = p.experts // p.groups
    limited = f"best{p.group_best}of{p.kept_groups}of{p.groups}" if p.groups > 1 else ""
    route = GpuKernel(
        symbol("route", f"e{p.experts}", f"of{p.choices}", p.scores, "bias" if p.bias else "",
               f"normalise{p.eps or ''}" if p.normalise else "", f"f{p.factor}" if p.factor != 1 else "", limited),
        MODULE, "route",
        *arguments({"logits": "*fp32", "bias": "*fp32" if p.bias else None, "ids": "*i32", "weights": "*fp32",
                    "sizes": "*i32"},
                   {"ROWS": SIZES["T"], "E": p.experts, "CHOICES": p.choices, "SCORES": p.scores,
                    "NORMALISE": p.normalise, "EPS": p.eps, "FACTOR": p.factor, "GROUPS": p.groups,
                    "KEPT": p.kept_groups, "GROUP_BEST": min(p.group_best, size), "G": _power_of_two(p.groups),
                    "S": max(_power_of_two(size), 32 // _power_of_two(p.groups))}), 1, 1)
    cost = Cost(4.0 * p.m * (p.experts + 2 * p.choices), 0)
    return Candidates((Candidate("route", (GpuLaunch(route, (p.m, 1, 1)),), cost),))


def sorting(problem: Sorting, device: Device) -> Candidates:
    """Parameters: ids, order, starts, sizes."""
    p = problem
    rows = p.m * p.choices
    chunk = min(4096, max(128, _power_of_two(rows)))
    kernel = GpuKernel(
        symbol("sort_by_expert", f"e{p.experts}", f"of{p.choices}", chunk), MODULE, "sort_by_expert",
        *arguments({"ids": "*i32", "order": "*i32", "starts": "*i32", "sizes": "*i32"},
                   {"ROWS": SIZES["T"], "E": p.experts, "CHOICES": p.choices, "BLOCK": chunk}), 4, 1)
    return Candidates((Candidate("sort_by_expert", (GpuLaunch(kernel, (p.experts, 1, 1)),), Cost(8.0 * rows, 0)),))


def summing(problem: Sum, device: Device) -> Candidates:
    """Parameters: x, weights f32, residual, y, sizes. y may be the residual."""
    p = problem
    block = min(1024, max(32, _power_of_two(p.d)))
    kernel = GpuKernel(
        symbol("combine", f"d{p.d}", f"of{p.choices}", p.x_type, p.y_type,
               f"residual_{p.residual}" if p.residual else ""), MODULE, "combine",
        *arguments({"x": f"*{ELEMENTS[p.x_type]}", "weights": "*fp32",
                    "residual": f"*{ELEMENTS[p.residual]}" if p.residual else None, "y": f"*{ELEMENTS[p.y_type]}",
                    "sizes": "*i32"},
                   {"ROWS": SIZES["T"], "D": p.d, "CHOICES": p.choices, "BLOCK": block}), min(4, block // 32), 1)
    moved = p.choices * BYTES[p.x_type] + BYTES[p.y_type] + (BYTES[p.residual] if p.residual else 0)
    return Candidates((Candidate("combine", (GpuLaunch(kernel, (p.m, -(-p.d // block), 1)),),
                                 Cost(p.m * p.d * moved, 0)),))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
