"""Attention over the sequence that the tokens of a step belong to: the only operator that mixes tokens."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .infer import require
from .op import operator
from .types import TensorType


def _infer_attention(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    q, k, v, *sinks = types
    shown = f"attention of q {q}, k {k}, v {v}"
    require(all(len(t.shape) == 3 for t in (q, k, v)), shown)
    heads, kv_heads = q.shape[1], k.shape[1]
    require(q.shape[0] == k.shape[0] == v.shape[0] and q.shape[2] == k.shape[2] and v.shape[1] == kv_heads, shown)
    require(isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads == 0, shown)
    require(not sinks or sinks[0].shape == (heads,), f"{shown}, sinks {sinks[0] if sinks else None}")
    return (TensorType((*q.shape[:2], v.shape[2])),)


@operator("attention", (3, 4), _infer_attention)
def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, sinks: np.ndarray | None = None, *, slot: int,
               scale: float, window: int = 0, chunk: int = 0, softcap: float = 0.0) -> np.ndarray:
    """q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], sinks [Hq] -> [T, Hq, Dv]. T tokens of one sequence from position 0.

    slot     which KV cache the keys and values belong to; no part of the arithmetic
    window   > 0: the token at position p sees (p - window, p]
    chunk    > 0: it sees [p // chunk * chunk, p]
    softcap  > 0: scores become softcap * tanh(score / softcap)
    sinks    one more logit a head in the denominator, without a value
    Head h reads key/value head h // (Hq / Hkv).
    """
    tokens, heads, _ = q.shape
    group = heads // k.shape[1]
    scores = np.einsum("qhgd,khd->hgqk", q.reshape(tokens, -1, group, q.shape[2]), k, optimize=True)
    scores = scores * np.float32(scale)
    if softcap:
        scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
    query, key = np.arange(tokens)[:, None], np.arange(tokens)[None]
    visible = key <= query
    if window:
        visible &= key > query - window
    if chunk:
        visible &= key >= query // chunk * chunk
    scores = np.where(visible, scores, np.float32(-np.inf))
    peak = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.reshape(-1, group, 1, 1).astype(np.float32)
        peak = np.maximum(peak, sinks)
    weights = np.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - peak)
    out = np.einsum("hgqk,khd->qhgd", weights / total, v, optimize=True)
    return np.ascontiguousarray(out, np.float32).reshape(tokens, heads, v.shape[2])
