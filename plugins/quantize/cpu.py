"""The kernel that quantizes activations for an integer matrix."""
from __future__ import annotations

from ..kernel import CpuKernel
from ..scheme import Scheme


def emit(k: int, scheme: Scheme, rows: str = "T", x_stride: int = 0) -> CpuKernel:
    """args: x f32 [rows, k], rows x_stride elements apart (0: k); quantized rows, u8 [rows, row_bytes(k, scheme)].

    rows: "T" the tokens of the step, "L" its rows of logits, or "8*T".
    """
    stride = x_stride or k
    body = (f"ingot_quantize(args[0], args[1], {row_count(rows)}, {k}, {stride}, {scheme.weight_bits}, "
            f"{scheme.act_group}, worker, num_workers);")
    symbol = f"quantize_{scheme.tag}_k{k}_{rows.replace('*', '')}" + (f"_x{stride}" if stride != k else "")
    return CpuKernel(symbol, "quantize/quantize.h", body)


def row_count(rows: str) -> str:
    """The C expression for a number of rows: "T", "L", or "8*T"."""
    factor, _, symbol = rows.rpartition("*")
    field = {"T": "step->num_tokens", "L": "step->num_logits"}[symbol]
    return f"{int(factor)} * {field}" if factor else field
