"""Operators that exist only in weight expressions: what brings packed, scaled weights of a checkpoint back to numbers.

Integers come and go as i32, whatever they are stored as. With the elementwise operators of the graph these few tell
every layout that the readers of quantized checkpoints know (checkpoint/quantized).
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _unpack(words: np.ndarray, word: int, bits: int, order: tuple[int, ...], signed: bool) -> np.ndarray:
    """i32 [...] of words -> i32 [..., word / bits]: element j is the field at bits * order[j]."""
    # As unsigned: a shift of a negative word to the right would bring ones in.
    shifts = np.array(order, np.uint32) * np.uint32(bits)
    fields = ((words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)).astype(np.int32)
    assert word % bits == 0 and len(order) == word // bits, (word, bits, order)
    return fields - ((fields >> (bits - 1)) << bits) if signed else fields


def unpack_columns(words: np.ndarray, word: int, bits: int, order: tuple[int, ...], signed: bool) -> np.ndarray:
    """i32 [..., C] -> i32 [..., C * word / bits]."""
    return _unpack(words, word, bits, order, signed).reshape(*words.shape[:-1], -1)


def unpack_rows(words: np.ndarray, word: int, bits: int, order: tuple[int, ...], signed: bool, times: int,
                ) -> np.ndarray:
    """i32 [R, K] -> i32 [R * times, K], times = word / bits: row i holds what becomes rows times * i and on."""
    return _unpack(words, word, bits, order, signed).transpose(0, 2, 1).reshape(-1, words.shape[1])


def repeat_columns(x: np.ndarray, times: int, size: int) -> np.ndarray:
    """[..., C] -> [..., size]: each column `times` times, the last perhaps fewer."""
    return np.repeat(x, times, axis=-1)[..., :size]


def repeat_rows(x: np.ndarray, times: int, size: int) -> np.ndarray:
    """[R, ...] -> [size, ...]: each row `times` times, the last perhaps fewer."""
    return np.repeat(x, times, axis=0)[:size]


def take_columns(x: np.ndarray, index: np.ndarray) -> np.ndarray:
    """x [N, G], index i32 [1, K] -> [N, K]."""
    return x[:, index[0]]


def scale_columns(w: np.ndarray, scale: np.ndarray, bits: int) -> np.ndarray:
    """w f32 [N, K] * scale f32 [1, K]: what a layer computes whose inputs are multiplied by `scale` before w.

    bits: of the grid that w lies on; a scheme of so many bits keeps w and multiplies the inputs instead.
    """
    return w * scale


def e2m1(codes: np.ndarray) -> np.ndarray:
    """i32 in 0..15 -> f32: sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0)."""
    return _E2M1[codes]


def e8m0(codes: np.ndarray) -> np.ndarray:
    """i32 in 0..254 -> f32: 2 to the power code - 127 (OCP Microscaling Formats 1.0)."""
    return np.ldexp(np.float32(1), codes - 127)


def dequantize(codes: np.ndarray, scales: np.ndarray, factor: np.ndarray | None = None, *, kind: str, rows: int,
               columns: int) -> tuple[np.ndarray, ...]:
    """codes [N, K] * (scales * factor), f32; then codes, scales and factor alone, in that shape.

    scales, factor  f32, broadcast to the codes: scales are equal in every `rows` x `columns` of these
    kind            of numbers that the codes are: "e4m3", "e2m1", "int8"
    """
    both = scales if factor is None else scales * factor
    parts = (scales,) if factor is None else (scales, factor)
    return codes.astype(np.float32, copy=False) * both, codes, *(np.broadcast_to(part, codes.shape) for part in parts)


UNPACK_OPS: Mapping[str, Callable[..., Any]] = MappingProxyType({f.__name__: f for f in (
    unpack_columns, unpack_rows, repeat_columns, repeat_rows, take_columns, scale_columns, e2m1, e8m0,
    dequantize)})

ROW_WISE_UNPACK_OPS = frozenset({"unpack_columns", "repeat_columns", "take_columns", "scale_columns", "e2m1", "e8m0",
                                  "dequantize"})
"""Those whose row i depends on row i of the operands alone: they can be evaluated a piece at a time."""

EXPANDING_OPS = frozenset({"unpack_rows", "repeat_rows"})
"""Row i of the operand makes rows times * i, times * i + 1, … of the result."""
