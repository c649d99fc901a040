"""Mixtures of experts beside their matrices: the choice of experts for each token, and the sum of what they give."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .infer import require
from .op import OPS, operator
from .types import DType, TensorType


def _infer_route(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    logits, *bias = types
    require(len(logits.shape) == 2 and isinstance(logits.shape[1], int), f"route of {logits}")
    experts = int(logits.shape[1]) - attrs.get("shared_gate", False)
    require(attrs["choices"] <= experts and (not bias or bias[0].shape == (experts,))
            and (attrs.get("shared", 0) > 0 or not attrs.get("shared_gate")), f"route of {logits} with bias {bias}")
    shape = logits.shape[0], attrs["choices"] + attrs.get("shared", 0)
    return TensorType(shape, DType.I32), TensorType(shape)


@operator("route", (1, 2), _infer_route)
def _route(logits: np.ndarray, bias: np.ndarray | None = None, *, choices: int, scores: str = "softmax",
           normalise: bool = False, eps: float = 0.0, factor: float = 1.0, groups: int = 1, kept_groups: int = 1,
           group_best: int = 2, shared: int = 0, shared_gate: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """logits [T, E], bias [E] -> the best experts of each token i32 [T, choices], best first, and their weights.

    scores      "softmax" over all experts, "sigmoid", or "softmax_of_chosen"
    bias        counts for the choice, not for the weights
    groups      > 1: experts stand in so many groups, and those of kept_groups of them can be chosen: of the groups
                whose group_best best experts have the largest sum
    normalise   the weights of a token are divided by their sum + eps; factor multiplies them
    shared      > 0: each token goes through so many experts more, those from E on, which stand behind the chosen ones:
                [T, choices + shared]. Their weight is one; with shared_gate, of logits [T, E + 1], the sigmoid of the
                last
    Of equals the expert of the smaller number comes first.
    """
    logits, gate = (logits[:, :-1], logits[:, -1:]) if shared_gate else (logits, None)
    score = OPS["sigmoid"].reference(logits) if scores == "sigmoid" else np.exp(
        logits - logits.max(axis=-1, keepdims=True))
    if scores == "softmax":
        score = score / score.sum(axis=-1, keepdims=True)
    key = logits if bias is None and groups == 1 else score if bias is None else score + bias
    if groups > 1:
        grouped = key.reshape(len(key), groups, -1)
        best = -np.sort(-grouped, axis=2)[:, :, :group_best].sum(axis=2)
        kept = np.zeros(best.shape, bool)
        np.put_along_axis(kept, np.argsort(-best, axis=1, kind="stable")[:, :kept_groups], True, axis=1)
        key = np.where(kept[:, :, None], grouped, np.float32(-np.inf)).reshape(key.shape)
    ids = np.argsort(-key, axis=1, kind="stable")[:, :choices].astype(np.int32)
    weights = np.take_along_axis(score, ids, axis=1)
    if normalise or scores == "softmax_of_chosen":
        weights = weights / (weights.sum(axis=1, keepdims=True) + np.float32(eps))
    weights = weights * np.float32(factor)
    if not shared:
        return ids, weights
    always = np.arange(logits.shape[1], logits.shape[1] + shared, dtype=np.int32)
    share = np.ones((1, 1), np.float32) if gate is None else OPS["sigmoid"].reference(gate)
    shape = len(ids), shared
    return (np.concatenate([ids, np.broadcast_to(always, shape)], axis=1),
            np.concatenate([weights, np.broadcast_to(share, shape)], axis=1))


def _infer_combine(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    x, weights, *residual = types
    require(len(x.shape) == 3 and weights.shape == x.shape[:2], f"combine of {x} by {weights}")
    out = TensorType((x.shape[0], x.shape[2]))
    require(not residual or residual[0].shape == out.shape, f"combine of {x} with residual {residual}")
    return (out,)


@operator("combine", (2, 3), _infer_combine)
def _combine(x: np.ndarray, weights: np.ndarray, residual: np.ndarray | None = None) -> np.ndarray:
    """x [T, k, D], weights [T, k] -> the weighted sum over a token's choices [T, D], plus residual [T, D]."""
    total = (x * weights[..., None]).sum(axis=1, dtype=np.float32)
    return total if residual is None else total + residual
