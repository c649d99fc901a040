"""The normalisation kernels of the CPU target."""
from __future__ import annotations

from dataclasses import dataclass

from ..constants import Rows, float_in_c, rows_in_c, symbol
from ..kernel import CpuKernel

_KINDS = {"rms_norm": "INGOT_RMS_NORM", "layer_norm": "INGOT_LAYER_NORM"}


@dataclass(frozen=True)
class Norm:
    """Rows of `dim` float32 values, normalised each by itself.

    kind: "rms_norm" | "layer_norm". rows: "T", "L", with a factor "9*T", or a number.
    Strides in floats from a row to the next, 0: no gap. s of the add_ form has y's stride.
    x_group: so many rows of x lie side by side and x_stride leads to the next group: the heads of a token, read out
    of a merged projection.
    """

    kind: str
    rows: Rows
    dim: int
    eps: float
    x_stride: int = 0
    r_stride: int = 0
    y_stride: int = 0
    x_group: int = 1

    def __post_init__(self) -> None:
        assert self.kind in _KINDS, self

    def _kernel(self, name: str, call: str) -> CpuKernel:
        n = self
        strides = {"x": n.x_stride or n.x_group * n.dim, "r": n.r_stride or n.dim, "y": n.y_stride or n.dim}
        fields = "".join(f", .{row}_stride = {stride}" for row, stride in strides.items())
        return CpuKernel(
            symbol(name, n.rows, n.dim, *(f"{row}{s}" for row, s in strides.items() if s != n.dim), f"g{n.x_group}",
                   float(n.eps)), "norm/norm.h",
            f"const ingot_norm c = {{.kind = {_KINDS[n.kind]}, .dim = {n.dim}, .eps = {float_in_c(n.eps)}, "
            f".x_group = {n.x_group}{fields}}};\n"
            f"ingot_norm_rows({rows_in_c(n.rows)}, {call}, worker, num_workers, c);")


def norm(problem: Norm) -> CpuKernel:
    """args: x, weight [dim] or null, bias [dim] or null (layer_norm only), y. y may be x where the strides agree."""
    if problem.kind == "rms_norm":
        return problem._kernel("rms_norm", "args[0], 0, args[1], 0, args[3], 0")
    return problem._kernel("layer_norm", "args[0], 0, args[1], args[2], args[3], 0")


def add_norm(problem: Norm) -> CpuKernel:
    """s = x + r, y = norm(s). args: x, r, weight or null, bias or null, y, s. s may be x or r, but not y."""
    bias = "0" if problem.kind == "rms_norm" else "args[3]"
    return problem._kernel(f"add_{problem.kind}", f"args[0], args[1], args[2], {bias}, args[4], args[5]")
