"""Which element of a matrix each lane of a warp holds in which register: the fragments of mma.sync and wgmma.

Source: PTX ISA, "Matrix fragments for mma.m16n8k…" and "Register fragments for wgmma.mma_async". All their figures are
one rule. With group = lane / 4, place = lane % 4 and p elements in a register,

    A [16, K]  register r, element i: row group + 8 * (r % 2), column p * place + i + 4 * p * (r / 2)
    B [K, 8]   register r, element i: row p * place + i + 4 * p * r, column group
    C [16, N]  register r (of 32 bits): row group + 8 * (r / 2 % 2), column 2 * place + r % 2 + 8 * (r / 4)
    C of f16   register r, element i: row group + 8 * (r % 2), column 2 * place + i + 8 * (r / 2)
"""
from __future__ import annotations

from functools import cache

import numpy as np

_LANE = np.arange(32)
_GROUP, _PLACE = _LANE // 4, _LANE % 4


@cache
def order_of_a(columns: int, per_register: int) -> np.ndarray:
    """[16, columns] -> index into registers [r, 32, per_register], flattened."""
    registers = columns * 16 // (32 * per_register)
    r, lane, i = np.ogrid[:registers, :32, :per_register]
    row = _GROUP[lane] + 8 * (r % 2)
    column = per_register * _PLACE[lane] + i + 4 * per_register * (r // 2)
    return _inverse(row, column, (16, columns))


@cache
def order_of_b(rows: int, per_register: int) -> np.ndarray:
    """[rows, 8] -> index into registers [r, 32, per_register], flattened."""
    registers = rows * 8 // (32 * per_register)
    r, lane, i = np.ogrid[:registers, :32, :per_register]
    row = per_register * _PLACE[lane] + i + 4 * per_register * r
    return _inverse(row, _GROUP[lane] + 0 * row, (rows, 8))


@cache
def places_of_c(columns: int, per_register: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of what registers [r, 32, per_register] hold of [16, columns]."""
    registers = columns * 16 // (32 * per_register)
    r, lane, i = np.ogrid[:registers, :32, :per_register]
    half, block = (r // 2 % 2, r // 4) if per_register == 1 else (r % 2, r // 2)
    within = r % 2 if per_register == 1 else i
    row = _GROUP[lane] + 8 * half + 0 * i
    return row, 2 * _PLACE[lane] + within + 8 * block + 0 * i


@cache
def order_of_c(columns: int, per_register: int = 1) -> np.ndarray:
    """[16, columns] -> index into registers [r, 32, per_register], flattened."""
    return _inverse(*places_of_c(columns, per_register), (16, columns))


def _inverse(row: np.ndarray, column: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    places = (row * shape[1] + column).reshape(-1)
    assert places.size == shape[0] * shape[1]
    found = np.empty(places.size, np.int64)
    found[places] = np.arange(places.size)
    return found.reshape(shape)
