"""Mixtures of experts on a GPU: the launches beside the grouped matrices, which are plugins/linear/tactics.py's."""
from __future__ import annotations

from dataclasses import dataclass

from ..gpu.device import Device
from ..gpu.kernel import SIZES, Candidate, Candidates, Cost, GpuKernel, GpuLaunch, Refusal, arguments, symbol
from ..quantize.tactics import BYTES, ELEMENTS

MODULE = "ingot.plugins.expert_linear.gpu"
SCORES = ("softmax", "sigmoid", "softmax_of_chosen")
_MAX_EXPERTS = 1024


@dataclass(frozen=True)
class Routing:
    """The choice of experts by the router's logits f32 [m, experts], and their rows sorted.

    scores     "softmax" over all experts, "sigmoid", or "softmax_of_chosen"
    bias       f32 [experts] counts for the choice, not for the weights
    normalise  the weights of a token sum to one; factor multiplies them
    """

    m: int
    experts: int
    choices: int
    scores: str = "softmax"
    bias: bool = False
    normalise: bool = False
    factor: float = 1.0

    def __post_init__(self) -> None:
        assert self.scores in SCORES and self.choices <= self.experts, self


@dataclass(frozen=True)
class Sum:
    """y[m, d] = (residual +) sum over a token's choices of weight * row."""

    m: int
    d: int
    choices: int
    float_type: str
    residual: bool = False


def routing(problem: Routing, device: Device) -> Candidates:
    """Two launches: route, then sort_by_expert."""
    p = problem
    if p.experts > _MAX_EXPERTS:
        return Candidates(refused=(Refusal("route", f"{p.experts} experts; up to {_MAX_EXPERTS}"),))
    block = max(32, 1 << (p.experts - 1).bit_length())
    words = (f"e{p.experts}", f"of{p.choices}")
    route = GpuKernel(
        symbol("route", *words, p.scores, "bias" if p.bias else "", "normalise" if p.normalise else "",
               f"f{p.factor}" if p.factor != 1 else ""), MODULE, "route",
        *arguments({"logits": "*fp32", "bias": "*fp32" if p.bias else None, "ids": "*i32", "weights": "*fp32",
                    "sizes": "*i32"},
                   {"ROWS": SIZES["T"], "E": p.experts, "BLOCK": block, "CHOICES": p.choices, "SCORES": p.scores,
                    "NORMALISE": p.normalise, "FACTOR": p.factor}), 1, 1)
    rows = p.m * p.choices
    chunk = min(4096, max(128, 1 << (rows - 1).bit_length()))
    order = GpuKernel(
        symbol("sort_by_expert", *words, chunk), MODULE, "sort_by_expert",
        *arguments({"ids": "*i32", "order": "*i32", "starts": "*i32", "sizes": "*i32"},
                   {"ROWS": SIZES["T"], "E": p.experts, "CHOICES": p.choices, "BLOCK": chunk}), 4, 1)
    cost = Cost(4.0 * p.m * (p.experts + 4 * p.choices), 0)
    return Candidates((Candidate("route", (GpuLaunch(route, (p.m, 1, 1)), GpuLaunch(order, (p.experts, 1, 1))), cost),))


def summing(problem: Sum, device: Device) -> Candidates:
    p = problem
    block = min(1024, max(32, 1 << (p.d - 1).bit_length()))
    element = f"*{ELEMENTS[p.float_type]}"
    kernel = GpuKernel(
        symbol("combine", f"d{p.d}", f"of{p.choices}", p.float_type, "residual" if p.residual else ""),
        MODULE, "combine",
        *arguments({"x": element, "weights": "*fp32", "residual": element if p.residual else None, "y": element,
                    "sizes": "*i32"},
                   {"ROWS": SIZES["T"], "D": p.d, "CHOICES": p.choices, "BLOCK": block}), 4, 1)
    cost = Cost(p.m * p.d * (p.choices + 1 + p.residual) * BYTES[p.float_type], 0)
    return Candidates((Candidate("combine", (GpuLaunch(kernel, (p.m, -(-p.d // block), 1)),), cost),))
