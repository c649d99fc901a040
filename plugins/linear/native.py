"""pack_native.c from Python, once it has been compiled and loaded; until then numpy does the same, to the bit.

Its functions run without Python's lock, so that threads pack side by side.
"""
from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..scheme import BLOCK, PANEL

SOURCE = Path(__file__).with_name("pack_native.c")
FLAGS = ("-ffp-contract=off",)
"""Without which products and sums would be rounded once where numpy rounds twice."""

MOST_ROWS = 128
"""Of a group."""

GROUPS_AT_ONCE = 2048
"""Groups that decide together whether they lie on parts of larger grids."""

_FIT_BYTES = 192
"""Of scratch memory, for the fits of 16 groups."""

_NOT_FINITE = 2

Settle = Callable[[np.ndarray, np.ndarray, np.ndarray], None]

_library: ctypes.CDLL | None = None


def use(library: ctypes.CDLL | None) -> None:
    """From now on, everywhere in this process. None: numpy."""
    global _library
    _library = library


def is_used() -> bool:
    return _library is not None


def fit_columns(x: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Step and minimum, float16 [n], of the columns of x, float32 [group, n]; None where numpy has to find them."""
    if _library is None or x.shape[1] < 2 or len(x) > MOST_ROWS:  # numpy adds a single column up in another order
        return None
    x, (rows, n) = np.ascontiguousarray(x), x.shape
    step, minimum = np.empty(n, np.float16), np.empty(n, np.float16)
    scratch = np.empty(-(-n // PANEL) * _FIT_BYTES, np.uint8)
    _library.ingot_fit_columns(_at(x), ctypes.c_int64(rows), ctypes.c_int64(n), _at(step), _at(minimum), _at(scratch))
    return step, minimum


class NotFinite(ValueError):
    """A weight in bfloat16 is NaN or infinite."""


def pack_w4(w: np.ndarray, settle: Settle) -> np.ndarray | None:
    """The panels in w4a8 of w [N, K], float32 or bits of bfloat16; None where numpy has to make them.

    settle: settle_exact. Raises NotFinite; of float32 that is the caller's to look at.
    """
    if _library is None:
        return None
    w, (n, k) = np.ascontiguousarray(w), w.shape
    panels, blocks = -(-n // PANEL), -(-k // BLOCK)
    matrix = _at(w), ctypes.c_int(w.dtype == np.uint16), ctypes.c_int64(n), ctypes.c_int64(k)
    step, minimum = np.empty((2, panels, blocks, PANEL), np.float16)
    scratch = np.empty(panels * blocks * _FIT_BYTES + 4 * -(-panels * PANEL * blocks // GROUPS_AT_ONCE), np.uint8)
    found = _library.ingot_fit_rows(*matrix, _at(step), _at(minimum), _at(scratch))
    if found == _NOT_FINITE:
        raise NotFinite
    if found:
        _settled(w, step, minimum, settle)
    out = np.empty(panels * blocks * 320, np.uint8)
    _library.ingot_pack_w4(*matrix, _at(step), _at(minimum), _at(out))
    return out


def pack_w8_groups(w: np.ndarray, size: int) -> np.ndarray | None:
    """The panels in int8g32, `size` bytes; else as pack_w4."""
    if _library is None:
        return None
    w, out = np.ascontiguousarray(w), np.empty(size, np.uint8)
    if _library.ingot_pack_w8_groups(_at(w), ctypes.c_int(w.dtype == np.uint16), ctypes.c_int64(w.shape[0]),
                                     ctypes.c_int64(w.shape[1]), _at(out)) == _NOT_FINITE:
        raise NotFinite
    return out


def _settled(w: np.ndarray, step: np.ndarray, minimum: np.ndarray, settle: Settle) -> None:
    """Both float16 [panels, blocks, 16], in place."""
    panels, blocks, _ = step.shape
    padded = np.zeros((panels * PANEL, blocks * BLOCK), np.float32)
    padded[:w.shape[0], :w.shape[1]] = w
    groups = padded.reshape(-1, BLOCK)
    by_row = [np.ascontiguousarray(values.transpose(0, 2, 1)).reshape(-1) for values in (step, minimum)]
    for begin in range(0, len(groups), GROUPS_AT_ONCE):
        part = slice(begin, begin + GROUPS_AT_ONCE)
        settle(np.ascontiguousarray(groups[part].T), by_row[0][part], by_row[1][part])
    for values, settled in zip((step, minimum), by_row, strict=True):
        values[:] = settled.reshape(panels, PANEL, blocks).transpose(0, 2, 1)


def _at(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
