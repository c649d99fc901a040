"""Conversions of ATen reductions, sorting and indexing."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from ..ir.graph import Operand
from ..ir.types import DType
from .conversion import SYMBOL, Context, aten, axes, axis, result_type


def _reduce(c: Context, op: str, x: Operand, dims: Sequence[int] | int | None, keepdim: bool) -> str:
    rank = len(c.shape(x))
    over = axes(dims, rank)
    if op == "reduce_max" and len(over) == rank and _is_positions(c, x):
        return c.emit("reshape", _longest_position(c), shape=(1,) * rank if keepdim else ())
    return c.emit(op, x, dims=over, keepdim=keepdim)


def _is_positions(c: Context, x: Operand) -> bool:
    view = c.builder.produced_by(x, "reshape")
    return x == "positions" or (view is not None and view.inputs[0] == "positions")


def _longest_position(c: Context) -> str:
    """The largest position at hand becomes the largest that will ever be."""
    if c.max_seq_len is None:
        raise c.refuse("the model computes with the length of the longest sequence; give max_seq_len")
    c.warnings.append(f"the model scales its positions by the length of the longest sequence, taken as max_seq_len = "
                      f"{c.max_seq_len}: {c.builder.origin}")
    return c.emit("full", shape=(), value=c.max_seq_len - 1, dtype=DType.I32)


@aten("sum", "sum.dim_IntList")
def _sum(c: Context, node: torch.fx.Node, x: Operand, dims: Sequence[int] | None = None, keepdim: bool = False,
         dtype: torch.dtype | None = None) -> str:
    return _reduce(c, "reduce_sum", c.cast(x, result_type(c, node).dtype), dims, keepdim)


@aten("mean", "mean.dim")
def _mean(c: Context, node: torch.fx.Node, x: Operand, dims: Sequence[int] | None = None, keepdim: bool = False,
          dtype: torch.dtype | None = None) -> str:
    return _reduce(c, "reduce_mean", c.as_float(x), dims, keepdim)


@aten("amax")
def _amax(c: Context, node: torch.fx.Node, x: Operand, dims: Sequence[int] = (), keepdim: bool = False) -> str:
    return _reduce(c, "reduce_max", x, list(dims), keepdim)


@aten("amin")
def _amin(c: Context, node: torch.fx.Node, x: Operand, dims: Sequence[int] = (), keepdim: bool = False) -> str:
    return _reduce(c, "reduce_min", x, list(dims), keepdim)


@aten("max", "min")
def _extreme(c: Context, node: torch.fx.Node, x: Operand) -> str:
    return _reduce(c, "reduce_max" if "max" in str(node.target) else "reduce_min", x, None, False)


@aten("max.dim")
def _max_dim(c: Context, node: torch.fx.Node, x: Operand, dim: int, keepdim: bool = False) -> tuple[str, str]:
    return (_reduce(c, "reduce_max", x, [dim], keepdim), _argmax(c, node, x, dim, keepdim))


@aten("min.dim")
def _min_dim(c: Context, node: torch.fx.Node, x: Operand, dim: int, keepdim: bool = False) -> tuple[str, str]:
    return (_reduce(c, "reduce_min", x, [dim], keepdim), _argmax(c, node, c.emit("neg", x), dim, keepdim))


@aten("argmax")
def _argmax(c: Context, node: torch.fx.Node, x: Operand, dim: int | None = None, keepdim: bool = False) -> str:
    if dim is None:
        raise c.refuse("argmax over all elements is not supported")
    return c.emit("argmax", x, dim=axis(dim, len(c.shape(x))), keepdim=keepdim)


@aten("any", "any.dim", "any.dims")
def _any(c: Context, node: torch.fx.Node, x: Operand, dims: Any = None, keepdim: bool = False) -> str:
    return c.emit("gt", _reduce(c, "reduce_sum", c.emit("cast", _truth(c, x), dtype=DType.I32), dims, keepdim), 0)


@aten("all", "all.dim", "all.dims")
def _all(c: Context, node: torch.fx.Node, x: Operand, dims: Any = None, keepdim: bool = False) -> str:
    false = c.emit("logical_not", _truth(c, x))
    return c.emit("eq", _reduce(c, "reduce_sum", c.cast(false, DType.I32), dims, keepdim), 0)


def _truth(c: Context, x: Operand) -> Operand:
    return x if c.type(x).dtype == DType.BOOL else c.emit("ne", x, 0)


@aten("prod.dim_int")
def _prod(c: Context, node: torch.fx.Node, x: Operand, dim: int, keepdim: bool = False, **kwargs: Any) -> str:
    return _reduce(c, "reduce_prod", x, [dim], keepdim)


@aten("var.correction", "var.dim", "std.correction")
def _var(c: Context, node: torch.fx.Node, x: Operand, dims: Sequence[int] | None = None, *args: Any,
         correction: float | None = 1, keepdim: bool = False) -> str:
    over = axes(dims, len(c.shape(x)))
    sizes = [c.shape(x)[d] for d in over]
    count = math.prod(s for s in sizes if isinstance(s, int))
    if any(not isinstance(s, int) for s in sizes):
        raise c.refuse("a variance over the tokens of a step mixes sequences")
    centered = c.emit("sub", x, c.emit("reduce_mean", x, dims=over, keepdim=True))
    total = c.emit("reduce_sum", c.emit("pow", centered, 2), dims=over, keepdim=keepdim)
    variance = c.emit("div", total, float(count - (1 if correction is None else correction)))
    return c.emit("sqrt", variance) if "std" in str(node.target) else variance


@aten("linalg_vector_norm")
def _vector_norm(c: Context, node: torch.fx.Node, x: Operand, ord: float = 2, dims: Sequence[int] | None = None,
                 keepdim: bool = False, **kwargs: Any) -> str:
    if ord == 2:
        return c.emit("sqrt", _reduce(c, "reduce_sum", c.emit("pow", x, 2), dims, keepdim))
    if ord == 1:
        return _reduce(c, "reduce_sum", c.emit("abs", x), dims, keepdim)
    if ord == math.inf:
        return _reduce(c, "reduce_max", c.emit("abs", x), dims, keepdim)
    raise c.refuse(f"the norm of order {ord} is not supported")


@aten("softmax.int", "_softmax", "_safe_softmax")
def _softmax(c: Context, node: torch.fx.Node, x: Operand, dim: int, *_: Any, **kwargs: Any) -> str:
    return c.emit("softmax", c.as_float(x), dim=axis(dim, len(c.shape(x))))


@aten("_log_softmax", "log_softmax.int")
def _log_softmax(c: Context, node: torch.fx.Node, x: Operand, dim: int, *_: Any, **kwargs: Any) -> str:
    dim = axis(dim, len(c.shape(x)))
    shifted = c.emit("sub", x, c.emit("reduce_max", x, dims=(dim,), keepdim=True))
    total = c.emit("reduce_sum", c.emit("exp", shifted), dims=(dim,), keepdim=True)
    return c.emit("sub", shifted, c.emit("log", total))


@aten("cumsum")
def _cumsum(c: Context, node: torch.fx.Node, x: Operand, dim: int, **kwargs: Any) -> str:
    target, dim = result_type(c, node), axis(dim, len(c.shape(x)))
    ones = c.builder.produced_by(x, "full")
    if ones is not None and c.shape(x)[dim] == SYMBOL:
        # How many tokens there are up to each one: positions that are counted from 1.
        counted = c.emit("mul", c.cast(c.emit("add", "positions", 1), target.dtype), ones.attrs["value"])
        shape = tuple(SYMBOL if i == dim else 1 for i in range(len(target.shape)))
        return c.emit("expand", c.emit("reshape", counted, shape=shape), shape=target.shape)
    return c.emit("cumsum", c.cast(x, target.dtype), dim=dim)


@aten("topk")
def _topk(c: Context, node: torch.fx.Node, x: Operand, k: int, dim: int = -1, largest: bool = True,
          sorted: bool = True) -> tuple[str, ...]:
    return c.emit_all("topk", x, k=k, dim=axis(dim, len(c.shape(x))), largest=largest)


@aten("sort", "sort.stable")
def _sort(c: Context, node: torch.fx.Node, x: Operand, dim: int = -1, descending: bool = False, **kwargs: Any,
          ) -> tuple[str, ...]:
    return c.emit_all("sort", x, dim=axis(kwargs.get("dim", dim), len(c.shape(x))),
                      descending=kwargs.get("descending", descending))


@aten("argsort", "argsort.stable")
def _argsort(c: Context, node: torch.fx.Node, x: Operand, dim: int = -1, descending: bool = False, **kwargs: Any,
             ) -> str:
    return _sort(c, node, x, dim, descending, **kwargs)[1]


@aten("gather")
def _gather(c: Context, node: torch.fx.Node, x: Operand, dim: int, index: Operand, **kwargs: Any) -> str:
    return c.emit("gather", x, index, dim=axis(dim, len(c.shape(x))))


@aten("scatter.src", "scatter.value")
def _scatter(c: Context, node: torch.fx.Node, x: Operand, dim: int, index: Operand, src: Operand, **kwargs: Any,
             ) -> str:
    if not isinstance(src, str):
        src = c.type(x).dtype.numpy.type(src).item()
    return c.emit("scatter", x, index, src, dim=axis(dim, len(c.shape(x))))


@aten("index_select")
def _index_select(c: Context, node: torch.fx.Node, x: Operand, dim: int, index: Operand) -> str:
    return c.emit("take", x, index, dim=axis(dim, len(c.shape(x))))


@aten("index.Tensor")
def _index(c: Context, node: torch.fx.Node, x: Operand, indices: Sequence[Operand | None]) -> str:
    """One index tensor: whole slices of that dimension. Others are element by element and not supported."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1:
        raise c.refuse(f"indexing by {len(given)} tensors at once is not supported")
    dim, index = given[0]
    if c.type(index).dtype == DType.BOOL:
        raise c.refuse("a selection by a mask has a size that depends on values")
    return c.emit("take", x, index, dim=dim)
