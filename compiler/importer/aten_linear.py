"""Conversions of products, embeddings, normalisations, and of our own opaque operators."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from ..ir.graph import Operand
from ..ir.types import Dim, product
from .conversion import Context, aten


@aten("linear")
def _linear(c: Context, node: torch.fx.Node, x: Operand, w: Operand, bias: Operand | None = None) -> str:
    return c.emit("linear", x, w, *([] if bias is None else [bias]))


def _product(c: Context, a: Operand, b: Operand, bias: Operand | None = None) -> str:
    """a [.., K] x b [K, N]: a linear layer where b is a weight, whose transposition costs nothing."""
    if c.is_constant(b) and len(c.shape(b)) == 2:
        biases = [bias] if bias is not None and c.is_constant(bias) and c.shape(bias) == c.shape(b)[1:] else []
        y = c.emit("linear", a, c.emit("permute", b, dims=(1, 0)), *biases)
        return y if bias is None or biases else c.emit("add", y, bias)
    y = c.emit("matmul", a, b)
    return y if bias is None else c.emit("add", y, bias)


@aten("mm", "matmul", "bmm")
def _matmul(c: Context, node: torch.fx.Node, a: Operand, b: Operand) -> str:
    return _product(c, a, b)


@aten("addmm", "baddbmm")
def _addmm(c: Context, node: torch.fx.Node, bias: Operand, a: Operand, b: Operand, *, beta: float = 1,
           alpha: float = 1) -> str:
    if beta == alpha == 1:
        return _product(c, a, b, bias)
    y = c.emit("mul", _product(c, a, b), float(alpha))
    return y if beta == 0 else c.emit("add", y, c.emit("mul", bias, float(beta)))


@aten("embedding")
def _embedding(c: Context, node: torch.fx.Node, w: Operand, ids: Operand, *_: Any, **kwargs: Any) -> str:
    return c.emit("embedding", w, ids)


@aten("layer_norm")
def _layer_norm(c: Context, node: torch.fx.Node, x: Operand, shape: Sequence[int], w: Operand | None = None,
                bias: Operand | None = None, eps: float = 1e-5, *_: Any) -> str:
    return _norm(c, "layer_norm", x, shape, w, bias, eps)


@aten("rms_norm")
def _rms_norm(c: Context, node: torch.fx.Node, x: Operand, shape: Sequence[int], w: Operand | None = None,
              eps: float | None = None) -> str:
    return _norm(c, "rms_norm", x, shape, w, None, torch.finfo(torch.float32).eps if eps is None else eps)


def _norm(c: Context, op: str, x: Operand, shape: Sequence[int], w: Operand | None, bias: Operand | None,
          eps: float) -> str:
    """Over the last len(shape) dimensions, which are taken as one."""
    whole = c.shape(x)
    flat = (*whole[:len(whole) - len(shape)], product(tuple(shape)))
    parameters: list[Operand] = []
    for parameter, neutral in ((w, 1.0), (bias, 0.0)):
        if parameter is not None:
            if len(parameters) < (parameter is bias):
                parameters.append(c.emit("full", shape=(flat[-1],), value=neutral, dtype=c.type(parameter).dtype))
            parameters.append(c.emit("reshape", parameter, shape=(flat[-1],)))
    y = c.emit(op, c.emit("reshape", x, shape=flat), *parameters, eps=eps)
    return c.emit("reshape", y, shape=whole)


def without_batch(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """[1, T, ..] -> [T, ..]."""
    return tuple(shape[1:])


@aten("ingot.expert_linear")
def _expert_linear(c: Context, node: torch.fx.Node, x: Operand, ids: Operand, w: Operand, bias: Operand | None,
                   transposed: bool) -> str:
    if transposed:
        w = c.emit("permute", w, dims=(0, 2, 1))
    return c.emit("expert_linear", x, ids, w, *([] if bias is None else [bias]))


@aten("ingot.probe")
def _probe(c: Context, node: torch.fx.Node, x: Operand, label: str) -> Operand:
    """A module that runs several times has no one output: the label of its last run counts."""
    if isinstance(x, str):
        c.builder.probes[label] = x
    return x
