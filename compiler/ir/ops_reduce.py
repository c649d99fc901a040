"""Reductions, and what works along one dimension: softmax, cumsum, sorting, gathering."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .infer import axis_of, like_first, promote, reduced, replaced, require
from .op import operator
from .types import Dim, DType, TensorType


def _infer_reduce(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    return (TensorType(reduced(types[0].shape, attrs["dims"], attrs["keepdim"]), promote(types)),)


def _infer_mean(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    return (TensorType(reduced(types[0].shape, attrs["dims"], attrs["keepdim"]), DType.F32),)


def _infer_sum(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    dtype = DType.F32 if types[0].dtype.is_float else DType.I32
    return (TensorType(reduced(types[0].shape, attrs["dims"], attrs["keepdim"]), dtype),)


def _register(name: str, function: Callable[..., Any], infer: Callable[..., tuple[TensorType, ...]]) -> None:
    @operator(name, 1, infer, "reduce")
    def reference(x: np.ndarray, dims: tuple[int, ...], keepdim: bool) -> np.ndarray:
        return np.asarray(function(x, axis=tuple(dims), keepdims=keepdim))


def _sum(x: np.ndarray, **kwargs: Any) -> np.ndarray:
    """Of bools: their count."""
    return np.sum(x, dtype=np.float32 if x.dtype.kind == "f" else np.int32, **kwargs)


_register("reduce_sum", _sum, _infer_sum)
_register("reduce_mean", lambda x, **kwargs: np.mean(x, dtype=np.float32, **kwargs), _infer_mean)
_register("reduce_max", np.max, _infer_reduce)
_register("reduce_min", np.min, _infer_reduce)
_register("reduce_prod", lambda x, **kwargs: np.prod(x, **kwargs).astype(x.dtype), _infer_reduce)


def _infer_argmax(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    return (TensorType(reduced(types[0].shape, (attrs["dim"],), attrs["keepdim"]), DType.I32),)


@operator("argmax", 1, _infer_argmax)
def _argmax(x: np.ndarray, dim: int, keepdim: bool) -> np.ndarray:
    """The first of equal maxima."""
    return np.argmax(x, axis=dim, keepdims=keepdim).astype(np.int32)


def _infer_along(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    axis_of(attrs["dim"], len(types[0].shape))
    return like_first(types, attrs)


@operator("softmax", 1, _infer_along)
def _softmax(x: np.ndarray, dim: int) -> np.ndarray:
    exps = np.exp(x - np.max(x, axis=dim, keepdims=True))
    return exps / np.sum(exps, axis=dim, keepdims=True)


def _infer_cumsum(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    axis_of(attrs["dim"], len(types[0].shape))
    return (TensorType(types[0].shape, DType.F32 if types[0].dtype.is_float else DType.I32),)


@operator("cumsum", 1, _infer_cumsum)
def _cumsum(x: np.ndarray, dim: int) -> np.ndarray:
    return np.cumsum(x, axis=dim, dtype=np.float32 if x.dtype.kind == "f" else np.int32)


def _infer_topk(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    shape, axis = types[0].shape, axis_of(attrs["dim"], len(types[0].shape))
    extent = shape[axis]
    require(isinstance(extent, int) and attrs["k"] <= extent, f"topk of {attrs['k']} among {extent}")
    shape = replaced(shape, axis, attrs["k"])
    return TensorType(shape, types[0].dtype), TensorType(shape, DType.I32)


@operator("topk", 1, _infer_topk)
def _topk(x: np.ndarray, k: int, dim: int, largest: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """The best first; of equals the one with the lower index first."""
    order = np.argsort(-x if largest else x, axis=dim, kind="stable")
    indices = order[(slice(None),) * dim + (slice(0, k),)]
    return np.take_along_axis(x, indices, dim), indices.astype(np.int32)


def _infer_sort(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    axis_of(attrs["dim"], len(types[0].shape))
    return types[0], TensorType(types[0].shape, DType.I32)


@operator("sort", 1, _infer_sort)
def _sort(x: np.ndarray, dim: int, descending: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Stable: equals keep their order."""
    indices = np.argsort(-x if descending else x, axis=dim, kind="stable")
    return np.take_along_axis(x, indices, dim), indices.astype(np.int32)


def _fits(index: Sequence[Dim], whole: Sequence[Dim], axis: int) -> bool:
    """Every extent of index is that of whole, or less where both are numbers; `axis` does not count."""
    return len(index) == len(whole) and all(
        i == axis or a == b or (isinstance(a, int) and isinstance(b, int) and a <= b)
        for i, (a, b) in enumerate(zip(index, whole, strict=True)))


def _infer_gather(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    x, index = types
    axis = axis_of(attrs["dim"], len(x.shape))
    require(index.dtype == DType.I32 and _fits(index.shape, x.shape, axis), f"gather of {x} by {index} along {axis}")
    return (TensorType(index.shape, x.dtype),)


def _grid(index: np.ndarray, dim: int) -> tuple[np.ndarray, ...]:
    """The coordinates that gather and scatter address: those of `index` itself, with its values in place of `dim`."""
    grid = list(np.ogrid[tuple(slice(n) for n in index.shape)])
    grid[dim] = index
    return tuple(grid)


@operator("gather", 2, _infer_gather)
def _gather(x: np.ndarray, index: np.ndarray, dim: int) -> np.ndarray:
    """out[.., i, ..] = x[.., index[.., i, ..], ..] with `index` in place of coordinate `dim`."""
    return x[_grid(index, dim)]


def _infer_scatter(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    x, index, src = types
    axis = axis_of(attrs["dim"], len(x.shape))
    require(index.dtype == DType.I32 and _fits(index.shape, x.shape, axis), f"scatter into {x} by {index} along {axis}")
    require(src.shape == () or _fits(index.shape, src.shape, -1), f"scatter of {src} by {index}")
    return (x,)


@operator("scatter", 3, _infer_scatter)
def _scatter(x: np.ndarray, index: np.ndarray, src: Any, dim: int) -> np.ndarray:
    """A copy of x with out[.., index[.., i, ..], ..] = src[.., i, ..]; src may be a scalar. Indices don't repeat."""
    out = x.copy()
    values = np.asarray(src)
    out[_grid(index, dim)] = values[tuple(slice(n) for n in index.shape)] if values.ndim else values
    return out


def _infer_take(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    x, index = types
    axis = axis_of(attrs["dim"], len(x.shape))
    require(index.dtype == DType.I32, f"take by {index}")
    return (TensorType((*x.shape[:axis], *index.shape, *x.shape[axis + 1:]), x.dtype),)


@operator("take", 2, _infer_take)
def _take(x: np.ndarray, index: np.ndarray, dim: int) -> np.ndarray:
    """Whole slices of x along `dim`; the index's shape takes the place of that dimension."""
    return np.take(x, index, axis=dim)
