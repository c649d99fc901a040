"""Elementwise operators: numpy broadcasting, float arithmetic in f32, integers in i32.

Operands may be literal scalars. Where floats and integers meet, the result is f32.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..weights.bf16 import bf16_to_f32, f32_to_bf16
from .infer import elementwise, promote, require
from .op import operator
from .types import DType, TensorType


def _float(types: Sequence[TensorType]) -> DType:
    return DType.F32


def _bool(types: Sequence[TensorType]) -> DType:
    return DType.BOOL


def _f32(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32)


def _common(*operands: Any) -> list[np.ndarray]:
    """Operands as arrays of their common type; the numpy twin of infer.promote."""
    arrays = [np.asarray(o) for o in operands]
    kinds = {a.dtype.kind for a in arrays}
    dtype = np.float32 if "f" in kinds else np.int32 if kinds - {"b"} else np.bool_
    return [a.astype(dtype, copy=False) for a in arrays]


def _register_float(name: str, function: Callable[[np.ndarray], np.ndarray]) -> None:
    """A function of one float operand; integers are widened to f32 first."""
    @operator(name, 1, elementwise(_float), "elementwise")
    def reference(x: Any) -> np.ndarray:
        with np.errstate(all="ignore"):  # log(0) = -inf and the like are meant
            return np.asarray(function(_f32(x)), np.float32)


_erf = np.vectorize(math.erf, otypes=[np.float32])



_FLOAT_FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "exp": np.exp,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: np.float32(1) / np.sqrt(x),
    "reciprocal": lambda x: np.float32(1) / x,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "erf": _erf,
    "sigmoid": lambda x: np.float32(1) / (np.float32(1) + np.exp(-x)),
    "silu": lambda x: x / (np.float32(1) + np.exp(-x)),
    "softplus": lambda x: np.logaddexp(x, np.float32(0)),
}
for _name, _float_function in _FLOAT_FUNCTIONS.items():
    _register_float(_name, _float_function)


@operator("gelu", 1, elementwise(_float), "elementwise")
def _gelu(x: Any, approximate: str = "none") -> np.ndarray:
    """approximate: "none" (by erf) or "tanh"."""
    x = _f32(x)
    if approximate == "tanh":
        inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
        return np.float32(0.5) * x * (np.float32(1) + np.tanh(inner))
    return np.float32(0.5) * x * (np.float32(1) + _erf(x * np.float32(math.sqrt(0.5))))


for _name, _function in {
    "neg": np.negative,
    "abs": np.abs,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.round,  # ties to even
    "trunc": np.trunc,
    "sign": np.sign,
}.items():
    operator(_name, 1, elementwise(promote), "elementwise")(
        lambda x, _function=_function: _function(np.asarray(x)).astype(np.asarray(x).dtype))


@operator("logical_not", 1, elementwise(_bool), "elementwise")
def _logical_not(x: Any) -> np.ndarray:
    return np.logical_not(x)


def _infer_cast(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    return (TensorType(types[0].shape, attrs["dtype"]),)


@operator("cast", 1, _infer_cast, "elementwise")
def _cast(x: Any, dtype: DType) -> np.ndarray:
    """To an integer: towards zero. bf16 is carried as u16 bits, which makes an operand of u16 a bf16."""
    x = np.asarray(x)
    if x.dtype == np.uint16:
        x = bf16_to_f32(x)
    if dtype == DType.BF16:
        return f32_to_bf16(_f32(x))
    return x.astype(dtype.numpy, copy=False)


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return _f32(a) / _f32(b)


def _register_binary(name: str, function: Callable[..., Any], result: Callable[[Sequence[TensorType]], DType]) -> None:
    @operator(name, 2, elementwise(result), "elementwise")
    def reference(a: Any, b: Any) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.asarray(function(*_common(a, b)))


for _name, _function in {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "floor_div": np.floor_divide,
    "mod": np.mod,  # the sign of the divisor
    "pow": np.power,
    "maximum": np.maximum,  # NaN if either is
    "minimum": np.minimum,
}.items():
    _register_binary(_name, _function, promote)

_register_binary("div", _divide, _float)

for _name, _function in {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
                         "ge": np.greater_equal, "logical_and": np.logical_and, "logical_or": np.logical_or}.items():
    _register_binary(_name, _function, _bool)


def _infer_where(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    require(types[0].dtype == DType.BOOL, f"where needs a bool condition, got {types[0]}")
    return elementwise(lambda operands: promote(operands[1:]))(types, attrs)


@operator("where", 3, _infer_where, "elementwise")
def _where(condition: np.ndarray, a: Any, b: Any) -> np.ndarray:
    return np.where(condition, *_common(a, b))
