"""Conversions of ATen operators that move elements or make them from indices."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.fx

from ..ir.graph import Operand
from ..ir.infer import replaced
from ..ir.types import Dim, make_dim, split_dim
from ..weights.expr import literal
from .conversion import INT32_MAX, SYMBOL, Context, Symbolic, aten, axes, axis, dim_of, dtype_of, result_type


@aten("alias", "detach", "clone", "contiguous", "lift_fresh_copy", "lift_fresh", "dropout", "view_copy", "alias_copy",
      "to.device")
def _same(c: Context, node: torch.fx.Node, x: Operand, *_: Any, **kwargs: Any) -> Operand:
    return x


@aten("view", "reshape", "_unsafe_view", "flatten.using_ints", "unflatten.int", "unsqueeze", "squeeze",
      "squeeze.dim", "squeeze.dims", "view_as", "reshape_as", "unsqueeze_copy", "squeeze_copy.dims")
def _reshape(c: Context, node: torch.fx.Node, x: Operand, *_: Any, **kwargs: Any) -> str:
    return c.emit("reshape", x, shape=result_type(c, node).shape)


@aten("permute", "permute_copy")
def _permute(c: Context, node: torch.fx.Node, x: Operand, dims: Sequence[int]) -> str:
    return c.emit("permute", x, dims=tuple(axis(d, len(dims)) for d in dims))


@aten("transpose.int", "transpose_copy.int")
def _transpose(c: Context, node: torch.fx.Node, x: Operand, a: int, b: int) -> str:
    dims = list(range(len(c.shape(x))))
    a, b = axis(a, len(dims)), axis(b, len(dims))
    dims[a], dims[b] = dims[b], dims[a]
    return c.emit("permute", x, dims=tuple(dims))


@aten("t", "t_copy")
def _t(c: Context, node: torch.fx.Node, x: Operand) -> str:
    return c.emit("permute", x, dims=(1, 0)) if len(c.shape(x)) == 2 else str(x)


@aten("expand", "expand_copy", "broadcast_to", "expand_as")
def _expand(c: Context, node: torch.fx.Node, x: Operand, *_: Any, **kwargs: Any) -> str:
    return c.emit("expand", x, shape=result_type(c, node).shape)


@aten("repeat")
def _repeat(c: Context, node: torch.fx.Node, x: Operand, repeats: Sequence[Any]) -> str:
    """[.., N, ..] repeated r times as a whole: through [.., 1, N, ..] -> [.., r, N, ..]."""
    shape = (1,) * (len(repeats) - len(c.shape(x))) + c.shape(x)
    if all(r == 1 for r in repeats):
        return c.emit("reshape", x, shape=shape)
    counts = [r.dim if isinstance(r, Symbolic) else r for r in repeats]
    narrow = tuple(d for dim in shape for d in (1, dim))
    wide = tuple(d for count, dim in zip(counts, shape, strict=True) for d in (count, dim))
    expanded = c.emit("expand", c.emit("reshape", x, shape=narrow), shape=wide)
    return c.emit("reshape", expanded, shape=result_type(c, node).shape)


def _bound(c: Context, bound: Any, size: Dim, default: Dim) -> Dim:
    """A bound of a slice: counted from the end where it is negative, and cut to the extent."""
    if bound is None:
        return default
    if isinstance(bound, Symbolic):
        bound = bound.dim
    if isinstance(size, int) and isinstance(bound, int):
        return max(0, min(bound + size if bound < 0 else bound, size))
    if isinstance(bound, int) and (bound >= INT32_MAX or bound == 0):
        return size if bound else 0
    if split_dim(bound)[1] != split_dim(size)[1]:
        raise c.refuse(f"a slice at {bound} of the {size} tokens of a step mixes sequences")
    return bound


@aten("slice.Tensor", "slice_copy.Tensor")
def _slice(c: Context, node: torch.fx.Node, x: Operand, dim: int = 0, start: Any = None, end: Any = None,
           step: int = 1) -> str:
    shape = c.shape(x)
    dim = axis(dim, len(shape))
    if c.is_constant(x) and start in (None, 0) and isinstance(end, Symbolic) and (end.dim, step) == (SYMBOL, 1):
        return c.emit("take", x, "positions", dim=dim)  # the first T rows of a table: those of positions 0 to T - 1
    low, high = _bound(c, start, shape[dim], 0), _bound(c, end, shape[dim], shape[dim])
    if isinstance(low, int) and isinstance(high, int):
        high = max(low, high)
    if isinstance(shape[dim], str) and (low != 0 or high != shape[dim] or step != 1):
        raise c.refuse(f"a slice {low}:{high}:{step} of the {shape[dim]} tokens of a step mixes sequences")
    return c.emit("slice", x, dim=dim, start=low, stop=high, step=step)


def part(c: Context, x: Operand, dim: int, start: int, stop: int) -> str:
    return c.emit("slice", x, dim=dim, start=start, stop=stop, step=1)


def number_of_elements(c: Context, x: Operand, dim: int, doing: str) -> int:
    """The extent of a dimension, which must not be the tokens'."""
    extent = c.shape(x)[dim]
    if not isinstance(extent, int):
        raise c.refuse(f"{doing} of the {extent} tokens of a step mixes sequences")
    return extent


@aten("select.int", "select_copy.int")
def _select(c: Context, node: torch.fx.Node, x: Operand, dim: int, index: int) -> str:
    dim = axis(dim, len(c.shape(x)))
    index = axis(index, number_of_elements(c, x, dim, "a selection"))
    return c.emit("reshape", part(c, x, dim, index, index + 1), shape=result_type(c, node).shape)


@aten("unbind.int", "unbind_copy.int")
def _unbind(c: Context, node: torch.fx.Node, x: Operand, dim: int = 0) -> tuple[str, ...]:
    shape = c.shape(x)
    dim = axis(dim, len(shape))
    rest = (*shape[:dim], *shape[dim + 1:])
    return tuple(c.emit("reshape", part(c, x, dim, i, i + 1), shape=rest)
                 for i in range(number_of_elements(c, x, dim, "a selection")))


@aten("split_with_sizes", "split_with_sizes_copy")
def _split_with_sizes(c: Context, node: torch.fx.Node, x: Operand, sizes: Sequence[int], dim: int = 0,
                      ) -> tuple[str, ...]:
    dim, start, parts = axis(dim, len(c.shape(x))), 0, []
    number_of_elements(c, x, dim, "a split")
    for size in sizes:
        parts.append(part(c, x, dim, start, start + size))
        start += size
    return tuple(parts)


@aten("split.Tensor", "chunk")
def _split(c: Context, node: torch.fx.Node, x: Operand, size: int, dim: int = 0) -> tuple[str, ...]:
    sizes = [value.shape[dim] for value in node.meta["val"]]
    return _split_with_sizes(c, node, x, sizes, dim)


@aten("cat", "concat")
def _cat(c: Context, node: torch.fx.Node, parts: Sequence[Operand], dim: int = 0) -> str:
    parts = [p for p in parts if c.shape(p) != (0,)]  # torch's legacy: an empty vector joins anything
    parts = [p for p in parts if 0 not in c.shape(p)] or parts[:1]
    if len(parts) == 1:
        return str(parts[0])
    target = result_type(c, node)
    dim = axis(dim, len(target.shape))
    if isinstance(target.shape[dim], str):
        raise c.refuse("tokens are joined with others: a step's tokens belong to many sequences")
    return c.emit("cat", *(c.cast(p, target.dtype) for p in parts), dim=dim)


@aten("stack")
def _stack(c: Context, node: torch.fx.Node, parts: Sequence[Operand], dim: int = 0) -> str:
    shape = result_type(c, node).shape
    dim = axis(dim, len(shape))
    return c.emit("cat", *(c.emit("reshape", p, shape=replaced(shape, dim, 1)) for p in parts), dim=dim)


@aten("constant_pad_nd")
def _pad(c: Context, node: torch.fx.Node, x: Operand, padding: Sequence[int], value: float = 0) -> str:
    for i in range(len(padding) // 2):
        dim = len(c.shape(x)) - 1 - i
        before, after = padding[2 * i], padding[2 * i + 1]
        if before == after == 0:
            continue
        size = number_of_elements(c, x, dim, "padding")
        x = part(c, x, dim, max(0, -before), size - max(0, -after))
        fills = [c.emit("full", shape=replaced(c.shape(x), dim, max(width, 0)), dtype=c.type(x).dtype,
                        value=c.type(x).dtype.numpy.type(value).item()) for width in (before, after)]
        pieces = [p for p in (fills[0], x, fills[1]) if c.shape(p)[dim] != 0]
        x = c.emit("cat", *pieces, dim=dim)
    return str(x)


@aten("roll")
def _roll(c: Context, node: torch.fx.Node, x: Operand, shifts: Sequence[int], dims: Sequence[int]) -> str:
    for shift, dim in zip(shifts, dims, strict=True):
        dim = axis(dim, len(c.shape(x)))
        size = number_of_elements(c, x, dim, "a rotation")
        cut = -shift % size
        x = c.emit("cat", part(c, x, dim, cut, size), part(c, x, dim, 0, cut), dim=dim) if cut else x
    return str(x)


@aten("flip")
def _flip(c: Context, node: torch.fx.Node, x: Operand, dims: Sequence[int]) -> str:
    for dim in axes(dims, len(c.shape(x))):
        size = number_of_elements(c, x, dim, "a reversal")
        x = c.emit("cat", *(part(c, x, dim, i, i + 1) for i in reversed(range(size))), dim=dim)
    return str(x)


@aten("slice_scatter")
def _slice_scatter(c: Context, node: torch.fx.Node, x: Operand, src: Operand, dim: int = 0, start: Any = None,
                   end: Any = None, step: int = 1) -> str:
    """x with its part [start, end) along dim replaced by src."""
    shape = c.shape(x)
    dim = axis(dim, len(shape))
    low, high = _bound(c, start, shape[dim], 0), _bound(c, end, shape[dim], shape[dim])
    if (low, high, step) == (0, shape[dim], 1):
        return str(src)
    size = number_of_elements(c, x, dim, "an assignment to a part")
    assert isinstance(low, int) and isinstance(high, int), f"bounds {low}:{high} of an extent of {size}"
    if step != 1:
        replaced_ones = np.isin(np.arange(size), np.arange(low, high, step))
        source = np.clip((np.arange(size) - low) // step, 0, None).astype(np.int32)
        source = np.minimum(source, max(replaced_ones.sum() - 1, 0)).astype(np.int32)
        spread = c.emit("take", src, c.builder.constant(literal(source), "spread"), dim=dim)
        mask = replaced_ones.reshape([size if i == dim else 1 for i in range(len(shape))])
        return c.emit("where", c.builder.constant(literal(mask), "replaced"), spread, x)
    pieces = [part(c, x, dim, 0, low), src, part(c, x, dim, high, size)]
    return c.emit("cat", *(p for p in pieces if c.shape(p)[dim] != 0), dim=dim)


@aten("select_scatter")
def _select_scatter(c: Context, node: torch.fx.Node, x: Operand, src: Operand, dim: int, index: int) -> str:
    shape = c.shape(x)
    dim = axis(dim, len(shape))
    index = axis(index, number_of_elements(c, x, dim, "an assignment to a part"))
    return _slice_scatter(c, node, x, c.emit("reshape", src, shape=replaced(shape, dim, 1)), dim, index, index + 1)


@aten("copy")
def _copy(c: Context, node: torch.fx.Node, x: Operand, src: Operand, non_blocking: bool = False) -> str:
    """x overwritten by src, which is broadcast to it."""
    target = result_type(c, node)
    return c.emit("expand", c.cast(src, target.dtype), shape=target.shape)


@aten("full", "full_like", "new_full", "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones",
      "scalar_tensor", "empty.memory_format", "empty_like", "new_empty")
def _full(c: Context, node: torch.fx.Node, *args: Any, **kwargs: Any) -> str:
    """Memory that torch leaves uninitialised is zero here; models overwrite it."""
    name, target = str(node.target), result_type(c, node)
    value: Any = 0
    if "full" in name:
        value = kwargs.get("fill_value", args[1] if len(args) > 1 else None)
        value = args[2] if "new_full" in name else value
    elif "ones" in name:
        value = 1
    elif "scalar_tensor" in name:
        value = args[0]
    if isinstance(value, Symbolic):
        raise c.refuse("the number of tokens of a step is used as a value")
    if target.dtype.is_float:
        return c.emit("full", shape=target.shape, value=float(value), dtype=target.dtype)
    limited = max(-INT32_MAX, min(int(value), INT32_MAX))
    return c.emit("full", shape=target.shape, value=limited, dtype=target.dtype)


@aten("fill.Scalar")
def _fill(c: Context, node: torch.fx.Node, x: Operand, value: Any) -> str:
    target = result_type(c, node)
    return c.emit("full", shape=target.shape, value=target.dtype.numpy.type(value).item(), dtype=target.dtype)


@aten("arange", "arange.start", "arange.start_step")
def _arange(c: Context, node: torch.fx.Node, *args: Any, **kwargs: Any) -> str:
    start, step = (0, 1) if len(args) < 2 else (args[0], args[2] if len(args) > 2 else 1)
    if isinstance(start, Symbolic) or isinstance(step, Symbolic):
        raise c.refuse("the number of tokens of a step is used as a value")
    (length,) = result_type(c, node).shape
    if length == SYMBOL and step == 1:
        # Without a cache, which is how models are traced, a model that numbers its tokens gives them their positions.
        counted = c.emit("add", "positions", start) if start else "positions"
        return c.cast(counted, dtype_of(node.meta["val"].dtype))
    return c.emit("arange", start=start, step=step, length=length, dtype=dtype_of(node.meta["val"].dtype))


@aten("repeat_interleave.self_int")
def _repeat_interleave(c: Context, node: torch.fx.Node, x: Operand, repeats: int, dim: int | None = None,
                       **kwargs: Any) -> str:
    """Each element repeated: through [.., N, 1, ..] -> [.., N, r, ..]."""
    if dim is None:
        raise c.refuse("repeat_interleave without a dimension is not supported")
    shape = c.shape(x)
    dim = axis(dim, len(shape))
    narrow = (*shape[:dim + 1], 1, *shape[dim + 1:])
    wide = (*shape[:dim + 1], repeats, *shape[dim + 1:])
    factor, symbol = split_dim(shape[dim])
    expanded = c.emit("expand", c.emit("reshape", x, shape=narrow), shape=wide)
    return c.emit("reshape", expanded, shape=replaced(shape, dim, make_dim(factor * repeats, symbol)))


@aten("sym_size.int")
def _sym_size(c: Context, node: torch.fx.Node, x: Operand, dim: int) -> Symbolic:
    return Symbolic(dim_of(node.meta["val"], c))
