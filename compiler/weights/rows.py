"""Blobs of GPU engines: the arrays of a matrix (plugins/linear/gpu_formats.py) one behind the other.

A blob holds the weights of all rows, then their scales, then, for nvfp4, the factor of each matrix. Experts' matrices
lie one below the other in each array. Every array begins at a multiple of ALIGNMENT.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from ingot.plugins.linear.compensate import Feedback
from ingot.plugins.linear.gpu_formats import GROUP, Format, Packed, nvfp4_factor, pack
from ingot.plugins.linear.gpu_hold import hold, power_factor

from .carried import Carried, carried
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
        sizes["w_scale"] = count * -(-n // form.rows_per_scale) * form.num_scales(k) * _ELEMENT[form.scales]
    if form.minimum:
        sizes["w_minimum"] = sizes["w_scale"]
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

    What the checkpoint holds in this format already is taken over (carried.py), all else is rounded.
    inputs: of each expert, 0 for a plain matrix; see gpu_formats.pack.
    """
    n = expr.shape[-2]
    parts = blob_parts(expr.shape, form)
    blob = np.zeros(blob_size(parts), np.uint8)
    arrays = {name: blob[offset:offset + size] for name, (offset, size) in parts.items()}
    held = carried(expr, form.name)
    pieces = _rounded(expr, source, form, rows_at_a_time, inputs) if held is None else _held(
        held, source, form, rows_at_a_time)
    for expert, begin, packed in pieces:
        _place(arrays["w"], packed.w, expert * n + begin)
        if form.name == "nvfp4":
            arrays["scale"].view(np.float32)[expert] = packed.factor
        if packed.w_scale is None:
            continue
        if form.is_int4:  # [groups, N] of each matrix
            for name, array in (("w_scale", packed.w_scale), ("w_minimum", packed.w_minimum)):
                if array is not None:
                    whole = arrays[name].view(np.float16).reshape(-1, len(array), n)
                    whole[expert, :, begin:begin + len(packed.w)] = array
        else:
            rows_before = expert * -(-n // form.rows_per_scale) + begin // form.rows_per_scale
            _place(arrays["w_scale"], packed.w_scale, rows_before)
    return blob


Packs = Iterator[tuple[int, int, Packed]]
"""(expert, first row, what these rows become) one after the other."""


def _rounded(expr: WeightExpr, source: TensorSource, form: Format, rows_at_a_time: int,
             inputs: Callable[[int], Feedback | None] | None) -> Packs:
    most = np.zeros(math.prod(expr.shape[:-2]), np.float32)
    if form.name == "nvfp4":
        for expert, begin, end in _spans(expr.shape, rows_at_a_time):
            most[expert] = max(most[expert], np.abs(_piece(expr, source, expert, begin, end)).max())
    for expert, begin, end in _spans(expr.shape, rows_at_a_time):
        factor = nvfp4_factor(most[expert:expert + 1]) if form.name == "nvfp4" else None
        yield expert, begin, pack(_piece(expr, source, expert, begin, end), form, factor=factor,
                                  inputs=inputs(expert) if inputs is not None else None)


def _held(held: Carried, source: TensorSource, form: Format, rows_at_a_time: int) -> Packs:
    shape = held.codes.shape
    most = np.zeros(math.prod(shape[:-2]), np.float32)
    if form.name == "nvfp4" and held.factor is None:
        for expert, begin, end in _spans(shape, rows_at_a_time):
            most[expert] = max(most[expert], _piece(held.scales, source, expert, begin, end).max())
    for expert, begin, end in _spans(shape, rows_at_a_time):
        codes, scales = (_piece(part, source, expert, begin, end) for part in (held.codes, held.scales))
        factor = 1.0
        if held.factor is not None:
            factor = float(_piece(held.factor, source, expert, begin, begin + 1)[0, 0])
        elif form.name == "nvfp4":
            factor = power_factor(most[expert:expert + 1])
            scales = scales / np.float32(factor)
        yield expert, begin, hold(codes, scales, form, factor)


def _spans(shape: tuple[int, ...], rows_at_a_time: int) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, row behind the last) of each piece that is in memory at a time: of experts one matrix."""
    assert rows_at_a_time % GROUP == 0
    step = shape[-2] if len(shape) == 3 else rows_at_a_time
    for expert in range(math.prod(shape[:-2])):
        for begin in range(0, shape[-2], step):
            yield expert, begin, min(begin + step, shape[-2])


def _piece(expr: WeightExpr, source: TensorSource, expert: int, begin: int, end: int) -> np.ndarray:
    """Rows of a matrix, or of one expert's, [rows, K]."""
    if len(expr.shape) == 3:
        return evaluate(expr, source, rows=(expert, expert + 1))[0, begin:end]
    return evaluate(expr, source, rows=(begin, end))


def _place(array: np.ndarray, rows: np.ndarray, first: int) -> None:
    """Rows [R, …], or one element a row, behind `first` rows of that size."""
    data = np.ascontiguousarray(rows)
    begin = first * (data.nbytes // len(data))
    array[begin:begin + data.nbytes] = data.reshape(-1).view(np.uint8)
