"""Operators that passes make: fused forms, and what the serving of many sequences needs.

In the references, as in the whole interpreter, the T tokens of a step are one sequence from position 0.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ingot.plugins.gpu.floats import from_e4m3, to_e4m3

from ..weights.bf16 import bf16_to_f32, f32_to_bf16
from .infer import axis_of, replaced, require
from .op import OPS, operator
from .types import DType, TensorType


def _infer_add_norm(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    x, r, *parameters = types
    require(x.shape == r.shape, f"sum of {x} and {r} before a norm")
    for parameter in parameters:
        require(parameter.shape == x.shape[-1:], f"normalisation of {x} with a parameter {parameter}")
    return (TensorType(x.shape), TensorType(x.shape))


@operator("add_rms_norm", (2, 3), _infer_add_norm)
def _add_rms_norm(x: np.ndarray, r: np.ndarray, w: np.ndarray | None = None, *, eps: float,
                  ) -> tuple[np.ndarray, np.ndarray]:
    """s = x + r -> (rms_norm(s, w), s)."""
    return OPS["rms_norm"].reference(x + r, w, eps=eps), x + r


@operator("add_layer_norm", (2, 4), _infer_add_norm)
def _add_layer_norm(x: np.ndarray, r: np.ndarray, w: np.ndarray | None = None, bias: np.ndarray | None = None, *,
                    eps: float) -> tuple[np.ndarray, np.ndarray]:
    """s = x + r -> (layer_norm(s, w, bias), s)."""
    return OPS["layer_norm"].reference(x + r, w, bias, eps=eps), x + r


def _infer_norm_add(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    x, r, *weights = types
    require(x.shape == r.shape and all(w.shape == x.shape[-1:] for w in weights), f"norm of {x}, added to {r}")
    return (TensorType(x.shape),) * len(weights)


@operator("norm_add", 3, _infer_norm_add)
def _norm_add(x: np.ndarray, r: np.ndarray, x_weight: np.ndarray, *, eps: float) -> np.ndarray:
    """rms_norm(x, x_weight) + r: the norm behind a block, and its residual."""
    return np.asarray(OPS["rms_norm"].reference(x, x_weight, eps=eps) + r)


@operator("norm_add_norm", 4, _infer_norm_add)
def _norm_add_norm(x: np.ndarray, r: np.ndarray, x_weight: np.ndarray, w: np.ndarray, *, eps: float,
                   ) -> tuple[np.ndarray, np.ndarray]:
    """s = rms_norm(x, x_weight) + r -> (rms_norm(s, w), s): the norm behind a block, and the next one's."""
    s = _norm_add(x, r, x_weight, eps=eps)
    return OPS["rms_norm"].reference(s, w, eps=eps), s


def _infer_gather_rows(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    x, rows = types
    require(rows.dtype == DType.I32 and len(rows.shape) == 1, f"gather_rows of {x} by {rows}")
    return (TensorType(replaced(x.shape, axis_of(attrs["dim"], len(x.shape)), rows.shape[0]), x.dtype),)


@operator("gather_rows", 2, _infer_gather_rows)
def _gather_rows(x: np.ndarray, rows: np.ndarray, dim: int) -> np.ndarray:
    """x [.., T, ..], rows i32[L] -> [.., L, ..]: the tokens whose logits are asked for."""
    return np.take(x, rows, axis=dim)


def _infer_kv_write(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    k, v = types
    require(len(k.shape) == len(v.shape) == 3 and k.shape[:2] == v.shape[:2], f"kv_write of {k} and {v}")
    return (k, v)


@operator("kv_write", 2, _infer_kv_write)
def _kv_write(k: np.ndarray, v: np.ndarray, slot: int, dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    """k [T, H, D], v [T, H, Dv] -> the same, as they lie in cache `slot`: rounded to its element type."""
    return kv_round(k, dtype), kv_round(v, dtype)


def kv_round(values: np.ndarray, dtype: DType) -> np.ndarray:
    """f32 [T, H, D] as the cache holds it. i8: symmetric, one float32 scale for each head of a token, its largest value
    becoming 127; fp8: e4m3 without a scale, beyond 448 the largest value.
    """
    match dtype:
        case DType.BF16:
            return bf16_to_f32(f32_to_bf16(values))
        case DType.F16:
            return values.astype(np.float16).astype(np.float32)
        case DType.FP8:
            return from_e4m3(to_e4m3(values))
        case DType.I8:
            largest = np.abs(values).max(axis=-1, keepdims=True).astype(np.float32)
            factor = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
            return np.rint(values * factor) * (largest / np.float32(127))
    return values


def _infer_rope(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    x, cos, sin = types
    require(len(x.shape) == 3 and len(cos.shape) == 2 and cos.shape == sin.shape and cos.shape[0] == x.shape[0]
            and int(cos.shape[1]) <= int(x.shape[2]), f"rope of {x} with cos {cos}, sin {sin}")
    return (x,)


@operator("rope", 3, _infer_rope)
def _rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool = False) -> np.ndarray:
    """Rotary position embedding (Su et al. 2021) of the first R of D elements of each head.

    x [T, H, D], cos and sin [T, R], one factor an element -> [T, H, D].
    Element d turns with d + R/2 (rotate-half), or 2i with 2i + 1 (interleaved).
    """
    width = cos.shape[1]
    turned, rest = x[..., :width], x[..., width:]
    if interleaved:
        partner = np.stack([-turned[..., 1::2], turned[..., ::2]], axis=-1).reshape(turned.shape)
    else:
        partner = np.concatenate([-turned[..., width // 2:], turned[..., :width // 2]], axis=-1)
    return np.concatenate([turned * cos[:, None] + partner * sin[:, None], rest], axis=-1)


def _infer_rope_kv_write(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    q, k, v, *_ = types
    require(len(q.shape) == len(k.shape) == len(v.shape) == 3 and k.shape[:2] == v.shape[:2]
            and q.shape[2] == k.shape[2], f"rope_kv_write of {q}, {k}, {v}")
    return (q, k, v)


@operator("rope_kv_write", (5, 7), _infer_rope_kv_write)
def _rope_kv_write(q: np.ndarray, k: np.ndarray, v: np.ndarray, cos: np.ndarray, sin: np.ndarray,
                   q_norm: np.ndarray | None = None, k_norm: np.ndarray | None = None, *, slot: int, dtype: DType,
                   interleaved: bool = False, eps: float = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What stands between the q/k/v projection and attention: [rms_norm per head,] rope, write to the cache.

    q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], cos, sin [T, R], norm weights [D]
    -> q, k and v as attention reads them; k and v lie in cache `slot`.
    """
    norm, rope = OPS["rms_norm"].reference, OPS["rope"].reference
    if q_norm is not None:
        q, k = norm(q, q_norm, eps=eps), norm(k, k_norm, eps=eps)
    q, k = rope(q, cos, sin, interleaved=interleaved), rope(k, cos, sin, interleaved=interleaved)
    return q, kv_round(k, dtype), kv_round(v, dtype)
