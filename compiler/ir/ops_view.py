"""Views: the same elements under another index. And the two operators that make values from indices alone."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .infer import axis_of, broadcast_shapes, replaced, require, same_elements, sliced_extent
from .op import operator
from .types import DType, TensorType, make_dim, split_dim


def _infer_reshape(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    same_elements(types[0].shape, attrs["shape"])
    return (TensorType(tuple(attrs["shape"]), types[0].dtype),)


@operator("reshape", 1, _infer_reshape, "view")
def _reshape(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Row-major; every extent is given, none is -1."""
    return np.reshape(x, shape)


def _infer_permute(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    shape, dims = types[0].shape, attrs["dims"]
    require(sorted(dims) == list(range(len(shape))), f"permute of {types[0]} by {dims}")
    return (TensorType(tuple(shape[d] for d in dims), types[0].dtype),)


@operator("permute", 1, _infer_permute, "view")
def _permute(x: np.ndarray, dims: tuple[int, ...]) -> np.ndarray:
    return np.transpose(x, dims)


def _infer_slice(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    shape, axis = types[0].shape, axis_of(attrs["dim"], len(types[0].shape))
    extent = sliced_extent(shape[axis], attrs["start"], attrs["stop"], attrs["step"])
    return (TensorType(replaced(shape, axis, extent), types[0].dtype),)


@operator("slice", 1, _infer_slice, "view")
def _slice(x: np.ndarray, dim: int, start: int, stop: int, step: int = 1) -> np.ndarray:
    """0 <= start <= stop <= extent, step >= 1."""
    return x[(slice(None),) * dim + (slice(start, stop, step),)]


def _infer_expand(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    shape = tuple(attrs["shape"])
    require(len(shape) >= len(types[0].shape) and broadcast_shapes([types[0].shape, shape]) == shape,
            f"expand of {types[0]} to {list(shape)}")
    return (TensorType(shape, types[0].dtype),)


@operator("expand", 1, _infer_expand, "view")
def _expand(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(x, shape)


def _infer_cat(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    first, axis = types[0], axis_of(attrs["dim"], len(types[0].shape))
    factors, symbols = zip(*(split_dim(t.shape[axis]) for t in types if len(t.shape) > axis), strict=True)
    for t in types:
        require(t.dtype == first.dtype and len(t.shape) == len(first.shape)
                and replaced(t.shape, axis, 0) == replaced(first.shape, axis, 0),
                f"cat of {', '.join(map(str, types))} along dimension {axis}")
    require(len(set(symbols)) == 1, f"cat of {', '.join(map(str, types))} along a symbolic dimension")
    return (TensorType(replaced(first.shape, axis, make_dim(sum(factors), symbols[0])), first.dtype),)


@operator("cat", (1, 1 << 16), _infer_cat, "view")
def _cat(*parts: np.ndarray, dim: int) -> np.ndarray:
    return np.concatenate(parts, dim)


def _infer_arange(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    return (TensorType((attrs["length"],), attrs["dtype"]),)


@operator("arange", 0, _infer_arange, "view")
def _arange(start: float, step: float, length: int, dtype: DType) -> np.ndarray:
    """start + step * i for i < length."""
    return (start + step * np.arange(length)).astype(dtype.numpy)


def _infer_full(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    return (TensorType(tuple(attrs["shape"]), attrs["dtype"]),)


@operator("full", 0, _infer_full, "view")
def _full(shape: tuple[int, ...], value: float, dtype: DType) -> np.ndarray:
    return np.full(shape, value, dtype.numpy)
