"""Embedding on a GPU."""
from __future__ import annotations

from dataclasses import dataclass

from ..gpu.device import Device
from ..gpu.kernel import SIZES, Candidate, Candidates, Cost, GpuKernel, GpuLaunch, Parameter, Refusal, arguments, symbol
from ..quantize.tactics import BYTES, ELEMENTS

_BLOCK = 1024


@dataclass(frozen=True)
class Problem:
    """y[m, d] = factor * w[ids]; w of element type `weights`: floating, or fp8 or int8 with a scale a row."""

    m: int
    d: int
    weights: str
    y_type: str
    factor: float = 1.0


def candidates(problem: Problem, device: Device) -> Candidates:
    p = problem
    if p.weights == "fp8" and not device.has_fp8:
        return Candidates(refused=(Refusal("embedding", f"fp8 needs sm_89 or newer, this is {device.arch}"),))
    block = min(_BLOCK, max(32, 1 << (p.d - 1).bit_length()))
    wanted: dict[str, Parameter | None] = {
        "ids": "*i32", "w": f"*{ELEMENTS[p.weights]}", "w_scale": "*fp32" if p.weights in ("fp8", "int8") else None,
        "y": f"*{ELEMENTS[p.y_type]}", "sizes": "*i32"}
    kernel = GpuKernel(
        symbol("embedding", p.weights, p.y_type, f"d{p.d}", f"f{p.factor}" if p.factor != 1 else ""),
        "ingot.plugins.embedding.gpu", "embedding",
        *arguments(wanted, {"ROWS": SIZES["T"], "D": p.d, "BLOCK": block, "FACTOR": p.factor}), 4, 1)
    cost = Cost(p.m * p.d * (BYTES[p.weights] + BYTES[p.y_type]), 0)
    return Candidates((Candidate("embedding", (GpuLaunch(kernel, (p.m, -(-p.d // block), 1)),), cost),))
