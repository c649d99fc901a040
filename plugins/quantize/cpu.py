"""The kernel that rounds activations for a matrix: to 8 bits, or to bfloat16."""
from __future__ import annotations

from ..kernel import CpuKernel
from ..scheme import Scheme


def emit(k: int, scheme: Scheme, rows: str = "T", x_stride: int = 0) -> CpuKernel:
    """args: x f32 [rows, k], rows x_stride elements apart (0: k); rounded rows, u8 [rows, row_bytes(k, scheme)].

    rows: "T" the tokens of the step, "L" its rows of logits, or "8*T".
    """
    stride = x_stride or k
    body = rounding("args[0]", "args[1]", row_count(rows), k, stride, scheme, "worker, num_workers")
    symbol = f"quantize_{scheme.tag}_k{k}_{rows.replace('*', '')}" + (f"_x{stride}" if stride != k else "")
    return CpuKernel(symbol, "quantize/quantize.h", body)


def rounding(x: str, out: str, count: str, k: int, stride: int, scheme: Scheme, workers: str) -> str:
    """The C statement that rounds `count` rows. workers: "0, 1" for one that rounds all of them."""
    if scheme.act_bits == 16:
        return f"ingot_round_to_pairs({x}, {out}, {count}, {k}, {stride}, {workers});"
    return f"ingot_quantize({x}, {out}, {count}, {k}, {stride}, {scheme.weight_bits}, {scheme.act_group}, {workers});"


def row_count(rows: str) -> str:
    """The C expression for a number of rows: "T", "L", or "8*T"."""
    factor, _, symbol = rows.rpartition("*")
    field = {"T": "step->num_tokens", "L": "step->num_logits"}[symbol]
    return f"{int(factor)} * {field}" if factor else field
