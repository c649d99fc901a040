"""Products with weights, embeddings and normalisations."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES
from ingot.plugins.linear.pack import dequantize
from ingot.plugins.quantize.reference import dequantize_rows, quantize, row_bytes
from ingot.plugins.scheme import SCHEMES

from .infer import broadcast_shapes, require
from .op import OPS, operator
from .types import DType, TensorType


def _infer_matmul(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    a, b = types
    require(len(a.shape) >= 2 and len(b.shape) >= 2 and a.shape[-1] == b.shape[-2], f"matmul of {a} and {b}")
    batch = broadcast_shapes([a.shape[:-2], b.shape[:-2]]) if len(a.shape) > 2 or len(b.shape) > 2 else ()
    return (TensorType((*batch, a.shape[-2], b.shape[-1])),)


@operator("matmul", 2, _infer_matmul)
def _matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[.., M, K] x [.., K, N] -> [.., M, N]; the leading dimensions broadcast."""
    return np.matmul(a, b)


def _infer_linear(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    x, w, *rest = types
    require(len(w.shape) == 2, f"linear with weight {w}")
    width = row_bytes(int(w.shape[1]), SCHEMES[attrs["scheme"]]) if x.dtype == DType.U8 else w.shape[1]
    require(x.shape[-1] == width, f"linear of {x} with weight {w}")
    y = TensorType((*x.shape[:-1], _features(int(w.shape[0]), attrs)))
    residual = rest.pop() if attrs.get("residual") else y
    require(residual.shape == y.shape, f"linear that gives {y}, added to {residual}")
    require(len(rest) < 2 and (not rest or rest[0].shape == w.shape[:1]),
            f"linear with weight {w} and bias {', '.join(map(str, rest))}")
    return (y,)


def _features(rows: int, attrs: Mapping[str, Any]) -> int:
    """Of the result, for a matrix of so many rows."""
    require(not attrs.get("gated") or rows % 2 == 0, f"gated linear with {rows} rows")
    return rows // 2 if attrs.get("gated") else rows


@operator("linear", (2, 4), _infer_linear)
def _linear(x: np.ndarray, w: np.ndarray, *rest: np.ndarray, scheme: str = "fp32", gated: str = "",
            residual: bool = False) -> np.ndarray:
    """x [.., K], w [N, K], then bias [N] if there is one, then the residual [.., N] if so -> [.., N].

    scheme  how the weights are stored, key of plugins.scheme.SCHEMES or of GPU_SCHEMES. With x u8 [.., row_bytes] as
            `quantize` makes it, the activations are those quantized values; schemes of GPUs quantize x themselves
    gated   the rows of w and of the bias are the gate's, then as many others: [.., N / 2] = act(gate) * other
    """
    y = np.matmul(quantized_inputs(x, w.shape[1], scheme), _stored(w, scheme).T)
    if len(rest) > residual:
        y = y + rest[0]
    y = _gate(y, gated)
    return y + rest[-1] if residual else y


def quantized_inputs(x: np.ndarray, width: int, scheme: str) -> np.ndarray:
    """x as the matrix takes it."""
    if x.dtype == np.uint8:
        rows = dequantize_rows(x.reshape(-1, x.shape[-1]), width, SCHEMES[scheme])
        return rows.reshape(*x.shape[:-1], width)
    return x if scheme in SCHEMES else GPU_SCHEMES[scheme].inputs(x)


def _stored(w: np.ndarray, scheme: str) -> np.ndarray:
    """The weights as the scheme rounds them. w [.., K]."""
    if scheme not in SCHEMES:
        return GPU_SCHEMES[scheme].stored(w)
    chosen = SCHEMES[scheme]
    return w if chosen.weight_bits == 32 else dequantize(w.reshape(-1, w.shape[-1]), chosen).reshape(w.shape)


def _gate(y: np.ndarray, activation: str) -> np.ndarray:
    """[.., gate | other] -> act(gate) * other; as it is without an activation."""
    if not activation:
        return y
    gate, other = np.split(y, 2, axis=-1)
    if activation == "clamped_swiglu":
        gate = np.minimum(gate, np.float32(7))
        return gate * OPS["sigmoid"].reference(np.float32(1.702) * gate) * (other.clip(-7, 7) + 1)
    approximate = {"gelu": "none", "gelu_tanh": "tanh"}.get(activation)
    if approximate:
        return OPS["gelu"].reference(gate, approximate=approximate) * other
    return OPS[activation].reference(gate) * other


def _infer_quantize(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    x, = types
    return (TensorType((*x.shape[:-1], row_bytes(int(x.shape[-1]), SCHEMES[attrs["scheme"]])), DType.U8),)


@operator("quantize", 1, _infer_quantize)
def _quantize(x: np.ndarray, scheme: str) -> np.ndarray:
    """x [.., K] -> u8 [.., row_bytes]: the activations as the matrix kernels of the scheme read them."""
    rows = quantize(np.ascontiguousarray(x.reshape(-1, x.shape[-1]), np.float32), SCHEMES[scheme])
    return rows.reshape(*x.shape[:-1], rows.shape[1])


def _infer_expert_linear(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    x, ids, w, *bias = types
    require(ids.dtype == DType.I32 and len(ids.shape) == 2 and len(w.shape) == 3
            and x.shape[:-1] in (ids.shape, ids.shape[:1]), f"expert_linear of {x} by {ids} with weight {w}")
    width = row_bytes(int(w.shape[2]), SCHEMES[attrs["scheme"]]) if x.dtype == DType.U8 else w.shape[2]
    require(x.shape[-1] == width, f"expert_linear of {x} with weight {w}")
    require(not bias or bias[0].shape == w.shape[:2],
            f"expert_linear with weight {w} and bias {', '.join(map(str, bias))}")
    return (TensorType((*ids.shape, _features(int(w.shape[1]), attrs))),)


@operator("expert_linear", (3, 4), _infer_expert_linear)
def _expert_linear(x: np.ndarray, ids: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None,
                   scheme: str = "fp32", gated: str = "") -> np.ndarray:
    """The linear layer of expert ids[t, j] applied to token t (x [T, K]) or to its part j (x [T, k, K]).

    w [E, N, K], bias [E, N] -> [T, k, N]. scheme, quantized x and gated as in `linear`.
    """
    x = quantized_inputs(x, w.shape[2], scheme)
    w = _stored(w, scheme)
    x = np.broadcast_to(x[:, None] if x.ndim == 2 else x, (*ids.shape, x.shape[-1]))
    out = np.empty((*ids.shape, w.shape[1]), np.float32)
    for expert in np.unique(ids):
        rows = ids == expert
        out[rows] = x[rows] @ w[expert].T
        if bias is not None:
            out[rows] += bias[expert]
    return _gate(out, gated)


def _infer_embedding(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    w, ids = types
    require(len(w.shape) == 2 and ids.dtype == DType.I32, f"embedding of {ids} in {w}")
    return (TensorType((*ids.shape, w.shape[1]), w.dtype),)


@operator("embedding", 2, _infer_embedding)
def _embedding(w: np.ndarray, ids: np.ndarray, scheme: str = "fp32", factor: float = 1.0) -> np.ndarray:
    """w [V, H], stored by the scheme, ids [..] -> [.., H], times the factor."""
    rows = w[ids.reshape(-1)]
    found = _stored(rows, scheme).reshape(*ids.shape, w.shape[1]) if scheme != "fp32" else w[ids]
    return found if factor == 1 else found * np.float32(factor)


def _infer_norm(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    x = types[0]
    for parameter in types[1:]:
        require(parameter.shape == x.shape[-1:], f"normalisation of {x} with a parameter {parameter}")
    return (TensorType(x.shape),)


@operator("rms_norm", (1, 2), _infer_norm)
def _rms_norm(x: np.ndarray, w: np.ndarray | None = None, *, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * w over the last dimension."""
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32) + np.float32(eps))
    return y if w is None else y * w


@operator("layer_norm", (1, 3), _infer_norm)
def _layer_norm(x: np.ndarray, w: np.ndarray | None = None, bias: np.ndarray | None = None, *, eps: float,
                ) -> np.ndarray:
    """(x - mean) / sqrt(variance + eps) * w + bias over the last dimension; the variance is the biased one."""
    centered = x - np.mean(x, axis=-1, keepdims=True, dtype=np.float32)
    y = centered / np.sqrt(np.mean(centered * centered, axis=-1, keepdims=True, dtype=np.float32) + np.float32(eps))
    y = y if w is None else y * w
    return y if bias is None else y + bias
