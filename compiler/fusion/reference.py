"""The meaning of a loop node in numpy; registers the operator "loop"."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..ir.op import OPS, operator
from ..ir.types import DType, TensorType
from .expr import Expr

_REDUCE: dict[str, Callable[..., Any]] = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod}


def _infer_loop(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    return (TensorType(tuple(attrs["shape"]), attrs["dtype"]),)


@operator("loop", (0, 1 << 16), _infer_loop)
def _loop(*inputs: np.ndarray, shape: tuple[int, ...], dtype: DType, expr: Expr,
          reduce: tuple[str, tuple[int, ...]] | None) -> np.ndarray:
    """out[i0, i1, …] = expr, or its reduction (kind, extents) over the axes that follow those of the result."""
    extents = [*shape, *(reduce[1] if reduce else ())]
    grids = [np.arange(n, dtype=np.int32).reshape([-1 if axis == a else 1 for a in range(len(extents))])
             for axis, n in enumerate(extents)]
    full = np.broadcast_to(_evaluate(expr, inputs, grids), extents)
    if reduce:
        full = _REDUCE[reduce[0]](full, axis=tuple(range(len(shape), len(extents))))
    return np.ascontiguousarray(full).astype(dtype.numpy, copy=False).reshape(shape)


def _evaluate(expr: Expr, inputs: Sequence[np.ndarray], grids: list[np.ndarray]) -> Any:
    if expr.op == "const":
        return expr.dtype.numpy.type(expr.value)
    if expr.op == "index":
        return grids[expr.value]
    if expr.op == "extent":
        _, axis, factor = expr.value
        return np.int32(grids[axis].size // factor)
    args = [_evaluate(arg, inputs, grids) for arg in expr.args]
    if expr.op == "load":
        array = inputs[expr.value]
        # A `pick` evaluates all its parts everywhere; where a part is not picked its index may lie outside.
        clipped = tuple(np.clip(i, 0, max(n - 1, 0)) for i, n in zip(args, array.shape, strict=True))
        return array[clipped]
    if expr.op == "pick":
        position, *parts = args
        result = parts[-1]
        for end, part in reversed(list(zip(expr.value, parts[:-1], strict=False))):
            result = np.where(position < end, part, result)
        return result
    attrs = {} if expr.value is None else {_ATTR_NAMES[expr.op]: expr.value}
    return OPS[expr.op].reference(*args, **attrs)


_ATTR_NAMES = {"cast": "dtype", "gelu": "approximate"}
