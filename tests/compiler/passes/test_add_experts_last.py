from __future__ import annotations

import pytest

from ingot.compiler.ir.graph import Graph
from ingot.compiler.passes.add_experts_last import add_experts_last
from ingot.compiler.passes.fuse_residual import fuse_residual
from ingot.compiler.passes.raise_moe import raise_moe
from tests.compiler.graphs import Builder, expect_same_meaning, ops


def experts_beside(b: Builder, swapped: bool = False, reshaped: bool = False, read_again: bool = False) -> Graph:
    """x + (experts of x + another matrix of x)"""
    x = b.x("x", "T", 4)
    weights, ids = b.add("topk", [b.op("linear", x, b.weight("router", 4, 4))], k=2, dim=1, largest=True)
    chosen = b.op("expert_linear", x, ids, b.weight("experts", 4, 4, 4), scheme="bf16")
    experts = b.op("reduce_sum", b.op("mul", chosen, b.op("reshape", weights, shape=("T", 2, 1))), dims=(1,),
                   keepdim=False)
    shared = b.op("linear", x, b.weight("shared", 4, 4), scheme="bf16")
    inner = b.op("add", *((shared, experts) if swapped else (experts, shared)))
    if reshaped:
        inner, x = b.op("reshape", inner, shape=(1, "T", 4)), b.op("reshape", x, shape=(1, "T", 4))
    outer = b.op("add", *((inner, x) if swapped else (x, inner)))
    return b.made(b.op("mul", outer, inner) if read_again else outer)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("reshaped", [False, True])
def test_both_sums_become_parts_of_launches(swapped: bool, reshaped: bool) -> None:
    graph = experts_beside(Builder(), swapped, reshaped)
    changed = add_experts_last(graph)
    expect_same_meaning(graph, changed)
    raised = raise_moe(fuse_residual(changed))
    assert "add" not in ops(raised) and [op for op in ops(raised) if op != "reshape"][-1] == "combine"
    assert "add" in ops(raise_moe(fuse_residual(graph)))


def test_a_sum_that_others_read_stays() -> None:
    graph = experts_beside(Builder(), read_again=True)
    assert ops(add_experts_last(graph)) == ops(graph)
    expect_same_meaning(graph, add_experts_last(graph))
