"""Operators in which the ranks of a tensor-parallel engine meet. interpret_ranks.py runs them."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .infer import replaced, require
from .op import operator
from .types import TensorType


def _infer_all_reduce(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    return (types[0],)


@operator("all_reduce", 1, _infer_all_reduce)
def _all_reduce(*parts: np.ndarray, ranks: int) -> np.ndarray:
    """The sum of all ranks' values, on every rank; added in the order of the ranks."""
    assert len(parts) == ranks, f"all_reduce of {ranks} ranks has the values of {len(parts)}"
    return np.asarray(np.sum(parts, axis=0, dtype=np.float32))


def _infer_all_gather(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    shape = types[0].shape
    require(isinstance(shape[-1], int), f"all_gather of {types[0]}")
    return (TensorType(replaced(shape, len(shape) - 1, int(shape[-1]) * attrs["ranks"]), types[0].dtype),)


@operator("all_gather", 1, _infer_all_gather)
def _all_gather(*parts: np.ndarray, ranks: int) -> np.ndarray:
    """All ranks' values joined along the last axis, on every rank."""
    assert len(parts) == ranks, f"all_gather of {ranks} ranks has the values of {len(parts)}"
    return np.concatenate(parts, axis=-1)
