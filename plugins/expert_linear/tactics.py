"""Mixtures of experts on a GPU: the launches beside the grouped matrices, which are plugins/linear/tactics.py's."""
from __future__ import annotations

from dataclasses import dataclass
from itertools import product

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
from ..linear.gpu_formats import ELEMENTS as WEIGHTS
from ..linear.tactics import has_aligned_rows, power_of_two
from ..quantize.tactics import (
    BYTES,
    ELEMENTS,
    element,
    quantized_beside,
    row_block,
    row_bytes,
    row_warps,
    split_form,
    unsupported_row,
)

MODULE = "ingot.plugins.expert_linear.gpu"
SCORES = ("softmax", "sigmoid", "softmax_of_chosen")
MAX_EXPERTS = 1024
MAX_CHOICES = 32
FORMS = ("fp8", "int8", "fp8_block", "nvfp4")
"""What `route` and `combine` quantize a norm to, fp8 and int8 with sums as well (quantize.tactics.split_form)."""

_CHOSEN = 16
"""Tokens that a block chooses for at a time, at most."""

_CHOSEN_OF = 4096
"""Scores among which a block chooses at a time, at most: eight for each thread. With twice as many registers spill."""


@dataclass(frozen=True)
class Routing:
    """The choice of experts: the IR's operator `route`, with the router and the norm before it where they are told.

    scores     "softmax" over all experts, "sigmoid", or "softmax_of_chosen"
    bias       f32 [experts] counts for the choice, not for the weights
    normalise  the weights of a token are divided by their sum + eps; factor multiplies them
    groups     > 1: only experts of kept_groups groups can be chosen, of those whose group_best best have the largest
               sum
    k          0: the logits f32 [m, experts] are given; else channels of x [m, k], which the router multiplies
    x_type     "bf16", "fp16" or "fp32", of x and of the router
    w_bias     f32 [experts] is added to the router's result
    norm_eps   x is normalised first (rms_norm)
    y          others read the norm: it is written. y_form: and quantized, one of FORMS
    shared     experts behind the others that every token goes through, after its choices. shared_gate: there is one
               logit more, or one row more of the router, whose sigmoid is their weight; else that is one
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
    k: int = 0
    x_type: str = "bf16"
    w_bias: bool = False
    norm_eps: float | None = None
    y: bool = False
    y_form: str = ""
    shared: int = 0
    shared_gate: bool = False

    def __post_init__(self) -> None:
        assert self.shared or not self.shared_gate, f"a weight of no expert: {self}"
        assert not (self.shared_gate and self.w_bias), f"a bias of experts that are chosen, beside a gate: {self}"
        assert self.scores in SCORES and self.choices <= self.experts and self.experts % self.groups == 0, self
        assert self.k or not (self.w_bias or self.norm_eps is not None), self
        assert self.norm_eps is not None or not (self.y or self.y_form), f"nothing to write: {self}"

    @property
    def tile_experts(self) -> int:
        return max(16, power_of_two(self.experts))

    @property
    def all_experts(self) -> int:
        """Those that are chosen and those that all tokens go through."""
        return self.experts + self.shared

    @property
    def pairs(self) -> int:
        """Experts that a token goes through."""
        return self.choices + self.shared


@dataclass(frozen=True)
class Sorting:
    """The rows (token, choice) of at most m tokens, by their expert, where the choice is made by others."""

    m: int
    experts: int
    choices: int


@dataclass(frozen=True)
class Sum:
    """y[m, d] = (residual +) sum over a token's choices of weight * row

    residual  its element type, "": there is none
    norm_eps  rms_norm(y) is wanted as well: normed in the type of y, and quantized to normed_form
    """

    m: int
    d: int
    choices: int
    x_type: str
    y_type: str
    residual: str = ""
    norm_eps: float | None = None
    normed: bool = False
    normed_form: str = ""


def quantizes_to(form: str) -> bool:
    """Whether `route` and `combine` quantize a norm to it."""
    name, group = split_form(form)
    return name in FORMS and (not group or name in ("fp8", "int8"))


def routing(problem: Routing, device: Device) -> Candidates:
    """Parameters: x, norm_weight, w, w_bias, bias, ids, weights, order, starts, y, q, q_scale, q_factor, q_sum,
    sizes."""
    p = problem
    if reason := _unroutable(p, device):
        return Candidates(refused=(Refusal("route", reason),))
    if not p.k:
        return Candidates((_route(p, min(_CHOSEN, max(8, power_of_two(p.m))), 1, 64, 1),))
    legal = []
    step = _router_step(p)
    for tokens, splits in product((16, 32, 64), (1, 2, 4, 8, 16, 32)):
        tiles = -(-p.m // tokens)
        if tokens > 16 and (p.m < tokens or p.tile_experts * tokens > 1 << 14):
            continue
        uneven = -(-p.k // step) % splits or p.k < 2 * splits * step
        if splits > 1 and (uneven or tiles * splits > device.num_sms):
            continue
        stages = next((n for n in (4, 3, 2) if _router_bytes(p, tokens, step, n) <= device.shared_per_block), 0)
        if stages:
            legal.append(_route(p, tokens, splits, step, stages))
    if not legal:
        return Candidates(refused=(Refusal("route", f"{_router_bytes(p, 16, step, 2)} bytes of shared memory; "
                                                    f"{device.arch} has {device.shared_per_block} a block"),))
    return Candidates(tuple(legal))


def _unroutable(p: Routing, device: Device) -> str:
    if p.all_experts > MAX_EXPERTS or p.pairs > MAX_CHOICES:
        return f"{p.pairs} of {p.all_experts} experts; up to {MAX_CHOICES} of {MAX_EXPERTS}"
    if p.k and not has_aligned_rows(p.x_type, p.x_type, p.k):
        return f"rows of {p.k} channels do not start at multiples of 16 bytes"
    if p.y_form and not quantizes_to(p.y_form):
        return f"a norm quantized to {p.y_form}"
    return unsupported_row(p.k, p.y_form, device) if p.y_form else ""


def _router_step(p: Routing) -> int:
    """Channels at a time: groups of fp8_block whole; else fewer of many experts."""
    if p.y_form == "fp8_block":
        return 128
    return max(split_form(p.y_form)[1], 32 if p.x_type == "fp32" or p.tile_experts > 256 else 64)


def _router_bytes(p: Routing, tokens: int, step: int, stages: int) -> int:
    return int(stages * (p.tile_experts + tokens) * step * BYTES[p.x_type])


def _route(p: Routing, tokens: int, splits: int, step: int, stages: int) -> Candidate:
    """tokens: of a tile; splits of K, `step` channels at a time."""
    size = p.experts // p.groups
    groups, tile_size = power_of_two(p.groups), max(power_of_two(size), 32 // power_of_two(p.groups))
    chosen = min(tokens, _CHOSEN, max(8, power_of_two(p.m)), _CHOSEN_OF // (groups * tile_size))
    floats = f"*{ELEMENTS[p.x_type]}"
    wanted: dict[str, Parameter | None] = {
        "x": floats if p.k else "*fp32", "norm_weight": "*fp32" if p.norm_eps is not None else None,
        "w": f"*{WEIGHTS[p.x_type]}" if p.k else None, "w_bias": "*fp32" if p.w_bias else None,
        "bias": "*fp32" if p.bias else None, "ids": "*i32", "weights": "*fp32", "order": "*i32", "starts": "*i32",
        "y": floats if p.y else None, **quantized_beside(p.y_form), "sizes": "*i32",
        "partial": "*fp32" if p.k else None, "arrived": "*i32"}
    constants: dict[str, Constant] = {
        "ROWS": SIZES["T"], "E": p.experts, "EP": p.tile_experts, "K": p.k, "NORM_EPS": p.norm_eps or 0.0,
        "CHOICES": p.choices, "CP": power_of_two(p.pairs), "SCORES": p.scores, "NORMALISE": p.normalise,
        "EPS": p.eps, "FACTOR": p.factor, "GROUPS": p.groups, "KEPT": p.kept_groups,
        "GROUP_BEST": min(p.group_best, size), "G": groups, "S": tile_size, "BM": tokens, "BK": step, "R": chosen,
        "SPLITS": splits, **element(p.y_form), "SHARED": p.shared, "GATE": p.shared_gate,
        "AP": max(16, power_of_two(p.all_experts))}
    limited = f"best{p.group_best}of{p.kept_groups}of{p.groups}" if p.groups > 1 else ""
    router = (f"k{p.k}", p.x_type, "wbias" if p.w_bias else "", f"norm{p.norm_eps}" if p.norm_eps is not None else "",
              "y" if p.y else "", p.y_form, f"{tokens}x{step}", f"s{splits}" if splits > 1 else "") if p.k else ()
    # Eight elements a thread where experts are chosen; of the logits' tile thirty-two, or more.
    warps = max(4, min(16, chosen * groups * tile_size // 256), min(8, p.tile_experts * tokens // 1024))
    kernel = GpuKernel(
        symbol("route", f"e{p.experts}", f"of{p.choices}", p.scores, "bias" if p.bias else "",
               f"normalise{p.eps or ''}" if p.normalise else "", f"f{p.factor}" if p.factor != 1 else "", limited,
               f"shared{p.shared}" if p.shared else "", "gate" if p.shared_gate else "", f"r{chosen}", *router),
        MODULE, "route", *arguments(wanted, constants), warps, stages)
    tiles = -(-p.m // tokens)
    num_bytes = 4.0 * p.m * (p.experts + 3 * p.pairs)
    through_cache = 0.0
    if p.k:
        row = p.k * BYTES[p.x_type]
        readings = 1 + splits * (p.y or bool(p.y_form))  # to find the scale of a token, each split reads its row first
        num_bytes = row * (p.experts + p.m * (1 + p.y)) + p.m * row_bytes(p.k, p.y_form)
        num_bytes += 8.0 * tiles * splits * tokens * (p.tile_experts + 16)
        through_cache = tiles * row * (p.experts + readings * tokens)
    cost = Cost(num_bytes, 2.0 * p.m * p.experts * p.k, through_cache)
    scratch = 4 * tiles * splits * tokens * (p.tile_experts + 16) if p.k else 0
    launch = GpuLaunch(kernel, (tiles, splits, 1), scratch, 4 * (1 + p.experts + tiles))
    name = f"route.{p.x_type} {tokens}x{step}" + (f" split {splits}" if splits > 1 else "") if p.k else "route"
    return Candidate(name, (launch,), cost, _router_bytes(p, tokens, step, stages) if p.k else 0)


def sorting(problem: Sorting, device: Device) -> Candidates:
    """Parameters: ids, order, starts, sizes."""
    p = problem
    rows = p.m * p.choices
    chunk = min(4096, max(128, power_of_two(rows)))
    kernel = GpuKernel(
        symbol("sort_by_expert", f"e{p.experts}", f"of{p.choices}", chunk), MODULE, "sort_by_expert",
        *arguments({"ids": "*i32", "order": "*i32", "starts": "*i32", "sizes": "*i32"},
                   {"ROWS": SIZES["T"], "E": p.experts, "CHOICES": p.choices, "BLOCK": chunk}), 4, 1)
    return Candidates((Candidate("sort_by_expert", (GpuLaunch(kernel, (p.experts, 1, 1)),), Cost(8.0 * rows, 0)),))


def summing(problem: Sum, device: Device) -> Candidates:
    """Parameters: x, weights f32, residual, y, norm_weight, normed, q, q_scale, q_factor, q_sum, sizes.

    y may be the residual.
    """
    p = problem
    norm = p.norm_eps is not None
    if p.normed_form and not quantizes_to(p.normed_form):
        return Candidates(refused=(Refusal("combine", f"a norm quantized to {p.normed_form}"),))
    if norm and (reason := unsupported_row(p.d, p.normed_form or p.y_type, device)):
        return Candidates(refused=(Refusal("combine", reason),))
    block = row_block(p.d, p.normed_form) if norm else min(1024, max(32, power_of_two(p.d)))
    words = (f"norm{p.norm_eps}", "normed" if p.normed else "", p.normed_form) if norm else ()
    kernel = GpuKernel(
        symbol("combine", f"d{p.d}", f"of{p.choices}", p.x_type, p.y_type,
               f"residual_{p.residual}" if p.residual else "", *words), MODULE, "combine",
        *arguments({"x": f"*{ELEMENTS[p.x_type]}", "weights": "*fp32",
                    "residual": f"*{ELEMENTS[p.residual]}" if p.residual else None, "y": f"*{ELEMENTS[p.y_type]}",
                    "norm_weight": "*fp32" if norm else None, "normed": f"*{ELEMENTS[p.y_type]}" if p.normed else None,
                    **quantized_beside(p.normed_form), "sizes": "*i32"},
                   {"ROWS": SIZES["T"], "D": p.d, "CHOICES": p.choices, "BLOCK": block, "EPS": p.norm_eps or 0.0,
                    **element(p.normed_form)}), row_warps(p.d) if norm else min(4, block // 32), 1)
    moved = p.d * (p.choices * BYTES[p.x_type] + BYTES[p.y_type] * (1 + p.normed))
    moved += row_bytes(p.d, p.normed_form) + (p.d * BYTES[p.residual] if p.residual else 0)
    return Candidates((Candidate("combine", (GpuLaunch(kernel, (p.m, -(-p.d // block), 1)),),
                                 Cost(p.m * moved, 0)),))
