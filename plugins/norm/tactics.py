"""Norms on a GPU: one launch for the residual sum, the norm and the quantization of its result."""
from __future__ import annotations

from dataclasses import dataclass

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
from ..quantize.tactics import BYTES, ELEMENTS, element, output, row_block, row_bytes, row_warps, unsupported_row


@dataclass(frozen=True)
class Problem:
    """y = norm(x), or total = x + residual and y = norm(total)

    kind       "rms_norm" or "layer_norm"
    x_weight   x itself is normalised, by a weight of its own, before the sum
    y_type, static  as in quantize; y_type "": only the total is wanted
    group      rows a token; x_stride: elements between tokens, 0: dense
    """

    m: int
    d: int
    eps: float
    float_type: str
    y_type: str
    kind: str = "rms_norm"
    rows: str = "T"
    weight: bool = True
    bias: bool = False
    residual: bool = False
    x_weight: bool = False
    static: bool = False
    x_stride: int = 0
    group: int = 1

    def __post_init__(self) -> None:
        assert self.kind in ("rms_norm", "layer_norm") and (self.residual or not self.x_weight), self
        assert self.y_type or self.residual, self


def candidates(problem: Problem, device: Device) -> Candidates:
    p = problem
    name = f"{p.kind}.{p.y_type or 'sum'}"
    if reason := unsupported_row(p.d, p.y_type or p.float_type, device):
        return Candidates(refused=(Refusal(name, reason),))
    scales, absent = output(p.y_type, p.static)
    x = f"*{ELEMENTS[p.float_type]}"
    wanted: dict[str, Parameter | None] = {
        "x": x, "residual": x if p.residual else None, "total": x if p.residual else None,
        "weight": "*fp32" if p.weight else None, "bias": "*fp32" if p.bias else None,
        "x_weight": "*fp32" if p.x_weight else None, **scales, "sizes": "*i32"}
    constants: dict[str, Constant] = {"ROWS": SIZES[p.rows], "GROUP": p.group, "D": p.d,
                                      "X_STRIDE": p.x_stride or p.group * p.d,
                                      "BLOCK": row_block(p.d, p.y_type), "KIND": p.kind, "EPS": p.eps,
                                      **element(p.y_type)}
    words = ("weight" if p.weight else "", "bias" if p.bias else "", "add" if p.residual else "",
             "norm_x" if p.x_weight else "", f"x{p.x_stride}" if p.x_stride not in (0, p.group * p.d) else "",
             f"g{p.group}" if p.group > 1 else "")
    kernel = GpuKernel(
        symbol(p.kind, p.y_type or "sum", "static" if p.static else "", f"d{p.d}", p.rows, f"eps{p.eps}", p.float_type,
               *words),
        "ingot.plugins.norm.gpu", "norm", *arguments(wanted, absent | constants), row_warps(p.d), 1)
    rows = p.m * p.group
    moved = p.d * (3 if p.residual else 1) * BYTES[p.float_type] + (row_bytes(p.d, p.y_type) if p.y_type else 0)
    cost = Cost(rows * moved, 0)
    return Candidates((Candidate(name, (GpuLaunch(kernel, (rows, 1, 1)),), cost),))
