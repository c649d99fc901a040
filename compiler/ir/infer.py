"""What the type inference of several operators shares. Shapes may hold one symbol, see types.Dim."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .types import Dim, DType, TensorType, make_dim, product, split_dim


class InferError(ValueError):
    """Operands that an operator cannot take. The verifier adds the node and its origin."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise InferError(message)


def broadcast_shapes(shapes: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
    """numpy's rule; a symbol goes with itself and with 1."""
    rank = max(len(shape) for shape in shapes)
    result: list[Dim] = []
    for axis in range(rank):
        dims = [shape[axis - rank + len(shape)] for shape in shapes if axis - rank + len(shape) >= 0]
        wide = {dim for dim in dims if dim != 1}
        require(len(wide) <= 1, f"shapes {', '.join(str(list(s)) for s in shapes)} do not broadcast")
        result.append(wide.pop() if wide else 1)
    return tuple(result)


def promote(types: Sequence[TensorType]) -> DType:
    """The common element type: a float if any is one, else i32 if any is an integer, else bool."""
    dtypes = {t.dtype for t in types}
    if any(d.is_float for d in dtypes):
        return DType.F32
    return DType.BOOL if dtypes == {DType.BOOL} else DType.I32


def axis_of(dim: int, rank: int) -> int:
    require(0 <= dim < rank, f"dimension {dim} of a value of rank {rank} (dimensions count from 0, none is negative)")
    return dim


def replaced(shape: tuple[Dim, ...], axis: int, dim: Dim) -> tuple[Dim, ...]:
    return (*shape[:axis], dim, *shape[axis + 1:])


def reduced(shape: tuple[Dim, ...], dims: Sequence[int], keepdim: bool) -> tuple[Dim, ...]:
    axes = {axis_of(d, len(shape)) for d in dims}
    if keepdim:
        return tuple(1 if i in axes else d for i, d in enumerate(shape))
    return tuple(d for i, d in enumerate(shape) if i not in axes)


def same_elements(old: tuple[Dim, ...], new: tuple[Dim, ...]) -> None:
    require(product(old) == product(new), f"{list(old)} has {product(old)} elements, {list(new)} has {product(new)}")


def sliced_extent(size: Dim, start: Dim, stop: Dim, step: int) -> Dim:
    """Number of elements of range(start, stop, step) inside an extent of `size`. A symbolic size only with bounds
    that are multiples of its symbol: the whole of "T", or [T, 2*T) of "2*T"."""
    (size_factor, symbol), (low, low_symbol), (high, high_symbol) = split_dim(size), split_dim(start), split_dim(stop)
    if symbol is None:
        require(low_symbol is None and high_symbol is None, f"symbolic bounds {start}:{stop} of an extent of {size}")
        require(0 <= low <= high <= size_factor, f"slice {start}:{stop} of an extent of {size}")
        require(step >= 1, f"slice with step {step}")
        return (high - low + step - 1) // step
    require(step == 1 and high_symbol == symbol and (low == 0 or low_symbol == symbol) and low < high <= size_factor,
            f"slice {start}:{stop}:{step} of the symbolic extent {size}")
    return make_dim(high - low, symbol)


def elementwise(result: Callable[[Sequence[TensorType]], DType]) -> Callable[..., tuple[TensorType, ...]]:
    """Inference of an operator that broadcasts its operands; `result` gives the element type."""
    def infer(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
        return (TensorType(broadcast_shapes([t.shape for t in types]), result(types)),)
    return infer


def like_first(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    return (types[0],)
