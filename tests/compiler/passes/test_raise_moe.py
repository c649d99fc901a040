"""Routers as transformers spells them, and the sum over experts: raised, with the same meaning; others stay."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ingot.compiler.ir.types import DType
from ingot.compiler.passes.fold_constants import fold_constants
from ingot.compiler.passes.raise_moe import raise_moe
from tests.compiler.graphs import Builder, expect_same_meaning, only, ops

WIDTH, EXPERTS, CHOICES = 6, 8, 3


def softmax(b: Builder, logits: str) -> tuple[str, str]:
    """qwen3_moe without, olmoe"""
    weights, ids = b.add("topk", [b.op("softmax", logits, dim=1)], k=CHOICES, dim=1, largest=True)
    return weights, ids


def normalised(b: Builder, logits: str) -> tuple[str, str]:
    """mixtral"""
    weights, ids = softmax(b, logits)
    return b.op("div", weights, b.op("reduce_sum", weights, dims=(1,), keepdim=True)), ids


def of_the_chosen(b: Builder, logits: str) -> tuple[str, str]:
    """gpt_oss, granitemoe"""
    best, ids = b.add("topk", [logits], k=CHOICES, dim=1, largest=True)
    return b.op("softmax", best, dim=1), ids


def sigmoid_of_the_chosen(b: Builder, logits: str) -> tuple[str, str]:
    best, ids = b.add("topk", [logits], k=CHOICES, dim=1, largest=True)
    return b.op("mul", b.op("sigmoid", best), 0.5), ids


def biased(b: Builder, logits: str) -> tuple[str, str]:
    """minimax_m2, afmoe"""
    score = b.op("sigmoid", logits)
    _, ids = b.add("topk", [b.op("add", score, b.weight("bias", EXPERTS))], k=CHOICES, dim=1, largest=True)
    weights = b.op("gather", score, ids, dim=1)
    total = b.op("add", b.op("reduce_sum", weights, dims=(1,), keepdim=True), 1e-20)
    return b.op("mul", b.op("div", weights, total), 2.5), ids


def bounded(b: Builder, logits: str) -> tuple[str, str]:
    """ernie4_5_moe: the sum has a lower bound, the bias is a row."""
    score = b.op("softmax", logits, dim=1)
    _, ids = b.add("topk", [b.op("add", b.weight("bias", 1, EXPERTS), score)], k=CHOICES, dim=1, largest=True)
    weights = b.op("gather", score, ids, dim=1)
    total = b.op("maximum", b.op("reduce_sum", weights, dims=(1,), keepdim=True), 1e-12)
    return b.op("div", weights, total), ids


def grouped(b: Builder, logits: str, groups: int = 4, kept: int = 2, biased: bool = True, best: int = 2,
            ) -> tuple[str, str]:
    """deepseek_v3, glm4_moe; with best = 1 deepseek_v2"""
    score = b.op("sigmoid", logits) if biased else b.op("softmax", logits, dim=1)
    key = b.op("add", score, b.weight("bias", EXPERTS)) if biased else score
    split = b.op("reshape", key, shape=("T", groups, EXPERTS // groups))
    if best == 1:
        total = b.op("reduce_max", split, dims=(2,), keepdim=False)
    else:
        total = b.op("reduce_sum", b.add("topk", [split], k=best, dim=2, largest=True)[0], dims=(2,), keepdim=False)
    _, picked = b.add("topk", [total], k=kept, dim=1, largest=True)
    zeros = b.op("full", shape=("T", groups), value=0.0, dtype=DType.F32)
    one = b.op("full", shape=(), value=1.0, dtype=DType.F32)
    mask = b.op("scatter", zeros, picked, one, dim=1)
    wide = b.op("expand", b.op("reshape", mask, shape=("T", groups, 1)), shape=("T", groups, EXPERTS // groups))
    outside = b.op("logical_not", b.op("ne", b.op("reshape", wide, shape=("T", EXPERTS)), 0.0))
    values, ids = b.add("topk", [b.op("where", outside, float("-inf"), key)], k=CHOICES, dim=1, largest=True)
    weights = b.op("gather", score, ids, dim=1)
    del values
    return b.op("mul", weights, 1.5), ids


def of_one_group(b: Builder, logits: str) -> tuple[str, str]:
    """glm4_moe as it is published: all groups are kept, so that none limits."""
    return grouped(b, logits, 2, 2)


def best_of_softmax(b: Builder, logits: str) -> tuple[str, str]:
    return grouped(b, logits, 4, 3, biased=False, best=1)


Route = Callable[[Builder, str], tuple[str, str]]
RAISED: list[tuple[Route, dict[str, Any]]] = [
    (softmax, {"scores": "softmax"}), (normalised, {"scores": "softmax", "normalise": True}),
    (of_the_chosen, {"scores": "softmax_of_chosen"}), (sigmoid_of_the_chosen, {"scores": "sigmoid", "factor": 0.5}),
    (biased, {"scores": "sigmoid", "normalise": True, "eps": 1e-20, "factor": 2.5}),
    (bounded, {"scores": "softmax", "normalise": True}),
    (grouped, {"scores": "sigmoid", "groups": 4, "kept_groups": 2, "group_best": 2, "factor": 1.5}),
    (of_one_group, {"scores": "sigmoid", "factor": 1.5}),
    (best_of_softmax, {"scores": "softmax", "groups": 4, "kept_groups": 3, "group_best": 1, "factor": 1.5})]


def mixture(route: Route, residual: bool = True) -> Builder:
    b = Builder()
    x = b.x("x", "T", WIDTH)
    weights, ids = route(b, b.op("linear", x, b.weight("router", EXPERTS, WIDTH)))
    y = b.op("expert_linear", x, ids, b.weight("up", EXPERTS, 10, WIDTH))
    y = b.op("expert_linear", b.op("silu", y), ids, b.weight("down", EXPERTS, WIDTH, 10))
    y = b.op("mul", y, b.op("reshape", weights, shape=("T", CHOICES, 1)))
    y = b.op("reduce_sum", y, dims=(1,), keepdim=False)
    if residual:
        y = b.op("add", b.op("reshape", b.x("r", "T", WIDTH), shape=(1, "T", WIDTH)),
                 b.op("reshape", y, shape=(1, "T", WIDTH)))
    b.op("neg", y)
    return b


def last(b: Builder) -> str:
    return next(reversed(b.producers))


@pytest.mark.parametrize(("route", "attrs"), RAISED, ids=lambda case: getattr(case, "__name__", ""))
@pytest.mark.parametrize("residual", [False, True])
def test_raised(route: Route, attrs: dict[str, Any], residual: bool) -> None:
    b = mixture(route, residual)
    graph = b.made(last(b))
    graph = fold_constants(graph)
    raised = raise_moe(graph)
    found = only(raised, "route")
    assert dict(found.attrs) == {"choices": CHOICES, **attrs}
    assert set(ops(raised)) <= {"linear", "route", "expert_linear", "silu", "combine", "reshape", "neg"}
    assert len(only(raised, "combine").inputs) == 2 + residual
    expect_same_meaning(graph, raised, tolerance=2e-6)


def best_values(b: Builder) -> str:
    return next(node for node in b.producers.values() if node.op == "topk").outputs[0]


def test_what_others_read_stays() -> None:
    """Weights before they are normalised are the node's own; logits that were chosen are not."""
    b = mixture(normalised)
    graph = b.made(last(b), best_values(b))
    raised = raise_moe(graph)
    assert "normalise" not in only(raised, "route").attrs and {"reduce_sum", "div", "combine"} <= set(ops(raised))
    expect_same_meaning(graph, raised)
    b = mixture(of_the_chosen)
    graph = b.made(last(b), best_values(b))
    assert {"topk", "softmax", "combine"} <= set(ops(raise_moe(graph)))
    expect_same_meaning(graph, raise_moe(graph))


def ascending(b: Builder, logits: str) -> tuple[str, str]:
    weights, ids = b.add("topk", [b.op("softmax", logits, dim=1)], k=CHOICES, dim=1, largest=False)
    return weights, ids


def limited_by_a_threshold(b: Builder, logits: str) -> tuple[str, str]:
    score = b.op("softmax", logits, dim=1)
    values, ids = b.add("topk", [b.op("where", b.op("lt", score, 0.1), float("-inf"), score)], k=CHOICES, dim=1,
                        largest=True)
    return b.op("maximum", values, 0.0), ids


def scaled_scores(b: Builder, logits: str) -> tuple[str, str]:
    """The choice is by another multiple of the scores than the weights."""
    score = b.op("tanh", logits)
    weights, ids = b.add("topk", [score], k=CHOICES, dim=1, largest=True)
    return weights, ids


@pytest.mark.parametrize("route", [ascending, limited_by_a_threshold, scaled_scores])
def test_other_routers_stay(route: Route) -> None:
    b = mixture(route)
    graph = b.made(last(b))
    raised = raise_moe(graph)
    assert "route" not in ops(raised) and "topk" in ops(raised) and "combine" in ops(raised)
    expect_same_meaning(graph, raised)


def test_sums_of_anything_else_stay() -> None:
    b = Builder()
    x, w = b.x("x", "T", 3, WIDTH), b.x("w", "T", 3)
    y = b.op("reduce_sum", b.op("mul", x, b.op("reshape", w, shape=("T", 3, 1))), dims=(1,), keepdim=False)
    graph = b.made(y)
    assert raise_moe(graph).nodes == graph.nodes
