"""Finds the attention calls of a traced program: our own operator, torch's, and what a model writes out by itself.

The last is recognised by what it computes: softmax over the last of two token dimensions, between two products,
    softmax(q @ k^T [* or / a number] [+ or where a mask]) @ v
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.fx

from .conversion import operator_name
from .masks import MaskTerm


@dataclass(frozen=True)
class AttentionCall:
    """q, k, v: nodes, [1, T, H, D] if heads_last, else [1, H, T, D] or [H, T, D]; k as the product takes it,
    [.., D, T], if key_transposed."""

    q: torch.fx.Node
    k: torch.fx.Node
    v: torch.fx.Node
    scale: float
    masks: tuple[MaskTerm, ...] = ()
    is_causal: bool = True
    softcap: float = 0.0
    sinks: torch.fx.Node | None = None
    heads_last: bool = False
    key_transposed: bool = False

    @property
    def inputs(self) -> list[torch.fx.Node]:
        """What has to be converted; masks are only read."""
        return [n for n in (self.q, self.k, self.v, self.sinks) if n is not None]


def find_attention_calls(graph: torch.fx.Graph) -> dict[torch.fx.Node, AttentionCall]:
    """The node of a call's result -> the call."""
    calls = {}
    for node in graph.nodes:
        match operator_name(node) if node.op == "call_function" else "":
            case "ingot.attention":
                calls[node] = _own_operator(node)
            case "scaled_dot_product_attention":
                calls[node] = _torch_operator(node)
            case "softmax.int" | "_softmax":
                found = _written_out(node)
                if found is not None:
                    calls[found[0]] = found[1]
    return calls


def _own_operator(node: torch.fx.Node) -> AttentionCall:
    q, k, v, mask, sinks, scale, softcap = node.args
    masks = (MaskTerm(mask),) if isinstance(mask, torch.fx.Node) else ()
    return AttentionCall(q, k, v, scale, masks, True, softcap, sinks, heads_last=True)


def _torch_operator(node: torch.fx.Node) -> AttentionCall:
    defaults = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False}
    given = dict(zip(defaults, node.args[3:], strict=False))
    settings = {**defaults, **given, **node.kwargs}
    q, k, v = node.args[:3]
    assert isinstance(q, torch.fx.Node)
    scale = settings.get("scale")
    masks = (MaskTerm(settings["attn_mask"]),) if settings["attn_mask"] is not None else ()
    return AttentionCall(q, k, v, 1 / math.sqrt(q.meta["val"].shape[-1]) if scale is None else scale,
                         masks, bool(settings["is_causal"]))


def _written_out(softmax: torch.fx.Node) -> tuple[torch.fx.Node, AttentionCall] | None:
    """The product with the values and the call, if this softmax lies between two products of tokens with tokens."""
    shape = softmax.meta["val"].shape
    dim = softmax.args[1]
    if len(shape) < 3 or dim not in (-1, len(shape) - 1) or not all(isinstance(s, torch.SymInt) for s in shape[-2:]):
        return None
    result = _only_product_with_values(softmax)
    scores = softmax.args[0]
    assert isinstance(scores, torch.fx.Node)
    scale, masks = 1.0, []
    while True:
        name = operator_name(scores) if scores.op == "call_function" else ""
        if name in _PRODUCTS:
            break
        step = _score_step(scores, name)
        if step is None:
            return None
        scores, factor, mask = step
        scale *= factor
        masks += [mask] if mask is not None else []
    if result is None:
        return None
    q, k = scores.args[-2:]
    if name == "baddbmm":
        if scores.kwargs.get("beta", 1) not in (1, 1.0):
            return None
        scale *= scores.kwargs.get("alpha", 1)
        masks.append(MaskTerm(scores.args[0]))
    return result, AttentionCall(q, k, result.args[1], scale, tuple(masks), False, key_transposed=True)


_PRODUCTS = ("matmul", "bmm", "baddbmm")
_NEUTRAL = ("alias", "clone", "detach", "dropout", "_to_copy", "contiguous", "view", "reshape", "_unsafe_view",
            "expand")
"""As long as a head's matrix of scores stays what it is."""


def _only_product_with_values(node: torch.fx.Node) -> torch.fx.Node | None:
    while len(users := [u for u in node.users if not operator_name(u).startswith("_assert")]) == 1:
        user = users[0]
        name = operator_name(user)
        if name in ("matmul", "bmm") and user.args[0] is node:
            return user
        if name not in _NEUTRAL or not _same_matrices(node, user):
            return None
        node = user
    return None


def _same_matrices(a: torch.fx.Node, b: torch.fx.Node) -> bool:
    """[1, H, T, T] and [H, T, T] are the same, in this order."""
    shapes = [[str(size) for size in node.meta["val"].shape if size != 1] for node in (a, b)]
    return shapes[0] == shapes[1]


def _score_step(node: torch.fx.Node, name: str) -> tuple[torch.fx.Node, float, MaskTerm | None] | None:
    """One operator on the scores: the scores before it, a factor, a mask."""
    if name in _NEUTRAL and isinstance(node.args[0], torch.fx.Node) and _same_matrices(node.args[0], node):
        return node.args[0], 1.0, None
    if name in ("mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar"):
        scores, factor = node.args[:2]
        number = _number(factor)
        if number is None or not isinstance(scores, torch.fx.Node):
            return None
        return scores, 1 / number if name.startswith("div") else number, None
    if name == "maximum" and isinstance(node.args[0], torch.fx.Node):
        least = _number(node.args[1])
        return (node.args[0], 1.0, None) if least is not None and least < -1e30 else None
    if name == "add.Tensor":
        for scores, mask in (node.args[:2], node.args[1::-1]):
            if isinstance(scores, torch.fx.Node) and isinstance(mask, torch.fx.Node) and _leads_to_product(scores):
                return scores, 1.0, MaskTerm(mask)
    if name == "where.self":
        condition, a, b = node.args
        for scores, inverted in ((a, False), (b, True)):
            if isinstance(scores, torch.fx.Node) and _leads_to_product(scores):
                return scores, 1.0, MaskTerm(condition, inverted)
    return None


def _leads_to_product(node: torch.fx.Node) -> bool:
    """Whether these are the scores and not a mask: a few operators above stands the product of tokens with tokens."""
    for _ in range(8):
        name = operator_name(node) if node.op == "call_function" else ""
        if name in _PRODUCTS:
            return True
        step = _score_step(node, name) if name else None
        if step is None:
            return False
        node = step[0]
    return False


def _number(value: object) -> float | None:
    """A number, or a constant that holds one."""
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, torch.fx.Node) and operator_name(value) in _NEUTRAL:
        return _number(value.args[0])
    if isinstance(value, torch.fx.Node) and operator_name(value) in ("full", "scalar_tensor"):
        content = value.args[1] if operator_name(value) == "full" else value.args[0]
        return float(content) if isinstance(content, int | float) else None
    return None
