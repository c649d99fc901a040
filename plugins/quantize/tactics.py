"""Row kernels on a GPU: which launch serves a problem, and what they share with the norms."""
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

ELEMENTS = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8e4nv", "int8": "i8", "nvfp4": "u8",
            "fp8_block": "fp8e4nv"}
BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "nvfp4": 0.5625,
         "fp8_block": 1.03125}
"""Of an element with its share of the scales of a block."""

_SUM = "_sum"


def split_form(form: str) -> tuple[str, int]:
    """("fp8", 32) of "fp8_sum32": quantized by token, and the sums of each 32 channels beside them; else (form, 0)."""
    name, _, group = form.partition(_SUM)
    return name, int(group or 0)


def row_bytes(d: int, form: str) -> float:
    """Of d elements in that form with their share of scales and sums; of none if there is no form."""
    name, group = split_form(form)
    return d * BYTES.get(name, 0) + (2 * -(-d // group) if group else 0)


MAX_ROW = 32768
"""Channels of the longest row that a block holds in registers."""


@dataclass(frozen=True)
class Problem:
    """y = x, or act(gate) * other of rows [gate | other], quantized to y_type

    m, d        the most rows of a step; channels of y
    float_type  of x
    y_type      "fp8", "int8", each also with sums ("int8_sum32"), "fp8_block", "nvfp4", or a floating type
    static      quantized by a scale known beforehand
    gated       activation of the gate, or ""
    group       rows a token; x_stride: elements between rows, 0: dense
    """

    m: int
    d: int
    float_type: str
    y_type: str
    rows: str = "T"
    static: bool = False
    gated: str = ""
    x_stride: int = 0
    group: int = 1


def candidates(problem: Problem, device: Device) -> Candidates:
    p = problem
    name = f"quantize.{p.y_type}"
    if reason := unsupported_row(p.d, p.y_type, device):
        return Candidates(refused=(Refusal(name, reason),))
    width = p.d * (2 if p.gated else 1)
    scales, absent = output(p.y_type, p.static)
    wanted: dict[str, Parameter | None] = {"x": f"*{ELEMENTS[p.float_type]}", **scales, "sizes": "*i32"}
    constants: dict[str, Constant] = {"ROWS": SIZES[p.rows], "GROUP": p.group, "D": p.d,
                                      "X_STRIDE": p.x_stride or width, "BLOCK": row_block(p.d, p.y_type),
                                      "GATED": p.gated, **element(p.y_type)}
    kernel = GpuKernel(
        symbol("quantize", p.y_type, "static" if p.static else "", f"d{p.d}", p.rows, p.gated, p.float_type,
               f"x{p.x_stride}" if p.x_stride not in (0, width) else "", f"g{p.group}" if p.group > 1 else ""),
        "ingot.plugins.quantize.gpu", "quantize_rows", *arguments(wanted, absent | constants), row_warps(p.d), 1)
    rows = p.m * p.group
    cost = Cost(rows * (width * BYTES[p.float_type] + row_bytes(p.d, p.y_type)), 0)
    return Candidates((Candidate(name, (GpuLaunch(kernel, (rows, 1, 1)),), cost),))


def unsupported_row(d: int, y_type: str, device: Device) -> str:
    """Why a row of d channels cannot be written as y_type; "" if it can."""
    if split_form(y_type)[0] in ("fp8", "fp8_block") and not device.has_fp8:
        return f"fp8 needs sm_89 or newer, this is {device.arch}"
    if y_type == "nvfp4" and not device.has_fp4:
        return f"nvfp4 needs sm_100a or newer, this is {device.arch}"
    if y_type == "nvfp4" and d % 16:
        return f"nvfp4 needs a multiple of 16 channels, got {d}"
    if y_type == "fp8_block" and d % 128:
        return f"fp8_block needs a multiple of 128 channels, got {d}"
    if d > MAX_ROW:
        return f"rows of {d} channels; a block holds up to {MAX_ROW}"
    return ""


def output(y_type: str, static: bool) -> tuple[dict[str, Parameter], dict[str, Constant]]:
    """Parameters of what store_row writes, in the order of kernels' parameters, and which of them are absent."""
    y_type, group = split_form(y_type)
    parameters: dict[str, Parameter] = {"y": f"*{ELEMENTS[y_type]}"} if y_type else {}
    if group:
        parameters["y_sum"] = "*fp16"
    if y_type == "nvfp4":
        parameters |= {"y_scale": "*fp8e4nv", "static_scale" if static else "y_factor": "*fp32"}
    elif y_type == "fp8_block":
        parameters["y_scale"] = "*fp32"
    elif y_type in ("fp8", "int8"):
        parameters["static_scale" if static else "y_scale"] = "*fp32"
    names = ("y", "y_scale", "y_factor", "y_sum", "static_scale")
    return ({name: parameters[name] for name in names if name in parameters},
            {name: None for name in names if name not in parameters})


def quantized_beside(form: str) -> dict[str, Parameter | None]:
    """Parameters of what store_row or store_columns write beside y, by names that begin with q; None: absent."""
    scales, absent = output(form, False)
    return {f"q{part}": None if f"y{part}" in absent else scales[f"y{part}"]
            for part in ("", "_scale", "_factor", "_sum")}


def element(y_type: str) -> dict[str, Constant]:
    """Constants of store_row that tell the form of y."""
    to, group = split_form(y_type)
    return {"TO": to, "SUMS": group}


def row_block(d: int, y_type: str = "") -> int:
    """The power of two that holds a row, and a group whose sum is wanted."""
    return max(32, split_form(y_type)[1], 1 << (d - 1).bit_length())


def row_warps(d: int) -> int:
    """About sixteen elements a thread, in at most sixteen warps."""
    return max(1, min(16, row_block(d) // 512))
