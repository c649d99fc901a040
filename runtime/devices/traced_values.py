"""Values of a plan as arrays: what `Program.trace` returns, whatever form a device keeps them in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ..bf16 import widen
from .plan_fields import DTYPES


class StepSizes(Protocol):
    """What sizes depend on: StepInputs have it."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_logits(self) -> int: ...


def value_shape(dims: Sequence[int | str], step: StepSizes) -> tuple[int, ...]:
    """Of a value in this step: "T" is its tokens, "L" its rows of logits, "9*T" nine times as many."""
    symbols = {"T": step.num_tokens, "L": step.num_logits}
    shape = []
    for dim in dims:
        factor, _, symbol = str(dim).rpartition("*")
        shape.append(int(factor or 1) * symbols[symbol] if symbol in symbols else int(symbol))
    return tuple(shape)


def value_bytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize


def decode(data: np.ndarray, shape: Sequence[int], dtype: str) -> np.ndarray:
    """u8 [value_bytes] -> the value; bf16 and fp8 (e4m3) as float32."""
    array: np.ndarray = data.view(DTYPES[dtype]).reshape(shape)
    if dtype == "bf16":
        return widen(array)
    return _E4M3[array] if dtype == "fp8" else array


def _e4m3_values() -> np.ndarray:
    """float32 [256]: sign, four bits of exponent with bias 7, three of mantissa; 0x7f and 0xff are NaN."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values[codes & 127 == 127] = np.nan
    return np.where(codes < 128, values, -values).astype(np.float32)


_E4M3 = _e4m3_values()
