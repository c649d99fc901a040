"""Embedding on a GPU."""
from __future__ import annotations

from dataclasses import dataclass

from ..gpu.device import Device
from ..gpu.kernel import SIZES, Candidate, Candidates, Cost, GpuKernel, GpuLaunch, Parameter, Refusal, arguments, symbol
from ..quantize.tactics import (
    BYTES,
    ELEMENTS,
    element,
    quantized_beside,
    row_block,
    row_bytes,
    row_warps,
    unsupported_row,
)

_BLOCK = 1024


@dataclass(frozen=True)
class Problem:
    """y[m, d] = factor * w[ids]; w of element type `weights`: floating, or fp8 or int8 with a scale a row.

    norm_eps  rms_norm(y) is wanted as well: normed in the type of y, and quantized to normed_form, which is of
              quantize.tactics and not static
    """

    m: int
    d: int
    weights: str
    y_type: str
    factor: float = 1.0
    norm_eps: float | None = None
    normed: bool = False
    normed_form: str = ""

    def __post_init__(self) -> None:
        assert (self.norm_eps is not None) == (self.normed or bool(self.normed_form)), self


def candidates(problem: Problem, device: Device) -> Candidates:
    """Parameters: ids, w, w_scale, y, norm_weight, normed, q, q_scale, q_factor, q_sum, sizes."""
    p = problem
    norm = p.norm_eps is not None
    if p.weights == "fp8" and not device.has_fp8:
        return Candidates(refused=(Refusal("embedding", f"fp8 needs sm_89 or newer, this is {device.arch}"),))
    if norm and (reason := unsupported_row(p.d, p.normed_form or p.y_type, device)):
        return Candidates(refused=(Refusal("embedding", reason),))
    block = row_block(p.d, p.normed_form) if norm else min(_BLOCK, max(32, 1 << (p.d - 1).bit_length()))
    wanted: dict[str, Parameter | None] = {
        "ids": "*i32", "w": f"*{ELEMENTS[p.weights]}", "w_scale": "*fp32" if p.weights in ("fp8", "int8") else None,
        "y": f"*{ELEMENTS[p.y_type]}", "norm_weight": "*fp32" if norm else None,
        "normed": f"*{ELEMENTS[p.y_type]}" if p.normed else None, **quantized_beside(p.normed_form), "sizes": "*i32"}
    words = (f"norm{p.norm_eps}", "normed" if p.normed else "", p.normed_form) if norm else ()
    kernel = GpuKernel(
        symbol("embedding", p.weights, p.y_type, f"d{p.d}", f"f{p.factor}" if p.factor != 1 else "", *words),
        "ingot.plugins.embedding.gpu", "embedding",
        *arguments(wanted, {"ROWS": SIZES["T"], "D": p.d, "BLOCK": block, "FACTOR": p.factor,
                            "EPS": p.norm_eps or 0.0, **element(p.normed_form)}), row_warps(p.d) if norm else 4, 1)
    moved = p.d * (BYTES[p.weights] + BYTES[p.y_type] * (1 + p.normed)) + row_bytes(p.d, p.normed_form)
    return Candidates((Candidate("embedding", (GpuLaunch(kernel, (p.m, -(-p.d // block), 1)),), Cost(p.m * moved, 0)),))
