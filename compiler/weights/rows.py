"""Blobs of GPU engines: the arrays of a matrix (plugins/linear/gpu_formats.py) one behind the other.

A blob holds the weights of all rows, then their scales, then, for nvfp4, the factor of each matrix. Experts' matrices
lie one below the other in each array. Every array begins at a multiple of ALIGNMENT.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from ingot.plugins.linear.compensate import Feedback
from ingot.plugins.linear.gpu_formats import GROUP, Format, nvfp4_factor, pack

from .evaluate import TensorSource, evaluate
from .expr import WeightExpr

ALIGNMENT = 256
"""Bytes. Descriptors of the copy engine want 128 for what lies interleaved; allocations begin at 256."""

_ELEMENT = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8e4nv": 1, "i8": 1, "u8": 1}

Parts = Mapping[str, tuple[int, int]]


def blob_parts(shape: tuple[int, ...], form: Format) -> dict[str, tuple[int, int]]:
    """Array -> (offset, bytes) for a matrix [N, K] or [E, N, K]."""
    *experts, n, k = shape
    count = math.prod(experts)
    sizes = {"w": count * n * form.stored_row(k) * _ELEMENT[form.weights]}
    if form.scales:
        groups = -(-k // form.channels_per_scale) if form.channels_per_scale else 1
        sizes["w_scale"] = count * -(-n // form.rows_per_scale) * groups * _ELEMENT[form.scales]
    if form.name == "nvfp4":
        sizes["scale"] = 4 * count
    parts, at = {}, 0
    for name, size in sizes.items():
        parts[name] = at, size
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return parts


def blob_size(parts: Parts) -> int:
    offset, size = list(parts.values())[-1]
    return offset + size


def pack_rows(expr: WeightExpr, source: TensorSource, form: Format, rows_at_a_time: int,
              inputs: Callable[[int], Feedback | None] | None = None) -> np.ndarray:
    """The blob, u8, of an expression [N, K] or [E, N, K]; never more than so many rows of it in float32.

    inputs: of each expert, 0 for a plain matrix; see gpu_formats.pack.
    """
    *_, n, k = expr.shape
    parts = blob_parts(expr.shape, form)
    blob = np.zeros(blob_size(parts), np.uint8)
    arrays = {name: blob[offset:offset + size] for name, (offset, size) in parts.items()}
    factors = np.zeros(math.prod(expr.shape[:-2]), np.float32)
    if form.name == "nvfp4":
        for expert, _, piece in _pieces(expr, source, rows_at_a_time):
            factors[expert] = max(factors[expert], np.abs(piece).max())
        factors = np.array([nvfp4_factor(most) for most in factors[:, None]], np.float32)
        arrays["scale"].view(np.float32)[:] = factors
    for expert, begin, piece in _pieces(expr, source, rows_at_a_time):
        packed = pack(piece, form, factor=float(factors[expert]) if form.name == "nvfp4" else None,
                      inputs=inputs(expert) if inputs is not None else None)
        _place(arrays["w"], packed.w, expert * n + begin)
        if packed.w_scale is None:
            continue
        if form.name == "int4":  # [K / 128, N] of each matrix
            scales = arrays["w_scale"].view(np.float16).reshape(-1, -(-k // GROUP), n)
            scales[expert, :, begin:begin + len(piece)] = packed.w_scale
        else:
            rows_before = expert * -(-n // form.rows_per_scale) + begin // form.rows_per_scale
            _place(arrays["w_scale"], packed.w_scale, rows_before)
    return blob


def _pieces(expr: WeightExpr, source: TensorSource, rows_at_a_time: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """(expert, first row, float32 [rows, K]) one after the other."""
    assert rows_at_a_time % GROUP == 0
    if len(expr.shape) == 3:
        for expert in range(expr.shape[0]):
            yield expert, 0, evaluate(expr, source, rows=(expert, expert + 1))[0]
        return
    for begin in range(0, expr.shape[0], rows_at_a_time):
        yield 0, begin, evaluate(expr, source, rows=(begin, min(begin + rows_at_a_time, expr.shape[0])))


def _place(array: np.ndarray, rows: np.ndarray, first: int) -> None:
    """Rows [R, …], or one element a row, behind `first` rows of that size."""
    data = np.ascontiguousarray(rows)
    begin = first * (data.nbytes // len(data))
    array[begin:begin + data.nbytes] = data.reshape(-1).view(np.uint8)
