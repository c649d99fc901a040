"""Shared experts become some of the experts that tokens are sent to, with the same meaning; others stay."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ingot.compiler.ir.graph import Graph
from ingot.compiler.ir.interpret import run
from ingot.compiler.ir.interpret_ranks import run_ranks
from ingot.compiler.passes.join_shared_experts import join_shared_experts
from ingot.compiler.passes.pipeline import gpu_pipeline, run_passes
from ingot.compiler.precision import Precision, find_precision
from ingot.compiler.targets import find_target
from ingot.compiler.weights.carried import carried
from ingot.compiler.weights.expr import WeightExpr, concat, dequantize, stack, tensor
from tests.compiler.graphs import Builder, Weights, expect_same_meaning, only, random_inputs
from tests.compiler.models import EXPERTS, INNER, Layer, model

GPU = find_target("h200").gpu
JOIN = "join_shared_experts"


def passes(precision: Precision, num_ranks: int = 1) -> list[Any]:
    return gpu_pipeline(precision, "fp32", num_ranks=num_ranks)


def before_and_after(graph: Graph, name: str = "fp32", num_ranks: int = 1) -> tuple[Graph, Graph]:
    steps = passes(find_precision(name, GPU), num_ranks)
    before = run_passes(graph, steps[:[name for name, _ in steps].index(JOIN)])
    return before, join_shared_experts(before)


def matrices(graph: Graph) -> int:
    return sum(node.op == "linear" for node in graph.nodes)


@pytest.mark.parametrize("width", [INNER, 3 * INNER])
@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("post_norm", [False, True])
def test_joined(width: int, weighed: bool, post_norm: bool) -> None:
    """post_norm: there is no residual at the sum."""
    graph = model([Layer(experts=True, shared=width, weighed=weighed, post_norm=post_norm)])
    before, after = before_and_after(graph)
    parts = width // INNER
    route = only(after, "route")
    assert route.attrs["shared"] == parts and route.attrs.get("shared_gate", False) == weighed
    assert {after.types[node.values[2]].shape[0] for node in after.nodes if node.op == "expert_linear"} == {
        EXPERTS + parts}
    assert matrices(before) - matrices(after) == 2 + weighed
    assert len(only(after, "combine").values) == (2 if post_norm else 3)
    expect_same_meaning(before, after, 3e-6)


def changed(graph: Graph, **attrs: Any) -> Graph:
    """The matrix that makes the shared expert's gate, with other attributes."""
    return graph.rebuilt([node.with_attrs(**attrs) if node.op == "linear" and "shared.gate" in node.values[1] else node
                          for node in graph.nodes])


def test_others_stay() -> None:
    """Of another width; of another activation or scheme; what is read as it is."""
    before, after = before_and_after(model([Layer(experts=True, shared=INNER - 16, weighed=True)]))
    assert after.nodes == before.nodes
    before, after = before_and_after(model([Layer(experts=True, shared=INNER)]))
    assert after.nodes != before.nodes
    for other in (changed(before, gated="gelu"), changed(before, scheme="bf16"),
                  before.rebuilt(before.nodes, probes={"shared": gate_of(before)}),
                  before.rebuilt(before.nodes, outputs=[*before.outputs, only(before, "route").outputs[0]])):
        assert join_shared_experts(other).nodes == other.nodes


def gate_of(graph: Graph) -> str:
    return next(node.output for node in graph.nodes if node.op == "linear" and "shared.gate" in node.values[1])


def test_a_router_of_few_bits_keeps_the_weight_apart() -> None:
    before, _ = before_and_after(model([Layer(experts=True, shared=INNER, weighed=True)]))
    narrow = before.rebuilt([node.with_attrs(scheme="fp8") if "router" in "".join(node.values[1:2]) else node
                             for node in before.nodes])
    assert join_shared_experts(narrow).nodes == narrow.nodes


@pytest.mark.parametrize("weighed", [False, True])
def test_ranks_have_their_shares(weighed: bool) -> None:
    """Of the shared expert each rank has as many of its channels as of every other one."""
    graph = model([Layer(experts=True, shared=2 * INNER, weighed=weighed)])
    _, after = before_and_after(graph, num_ranks=2)
    widths = {after.types[node.values[2]].shape for node in after.nodes if node.op == "expert_linear"}
    assert {shape[0] for shape in widths} == {EXPERTS + 2} and INNER // 2 in {shape[2] for shape in widths}
    inputs, weights = random_inputs(graph, 5), Weights(graph)
    want = run(graph, inputs, weights)[graph.outputs[0]]
    inputs["logit_rows"] = np.arange(5, dtype=np.int32)
    for values in run_ranks(after, inputs, weights, 2):
        np.testing.assert_allclose(values[after.outputs[0]], want, atol=3e-5 * np.abs(want).max())


def held(b: Builder, name: str, parts: int, n: int, k: int, blocks: bool, experts: int = 0) -> str:
    """A constant that a checkpoint holds in e4m3, with a scale for each row or each block: matrices one below the
    other, or of so many experts."""
    def one(name: str) -> WeightExpr:
        whole = tensor(name, (n, k)), tensor(f"{name}.scale", (n, k))
        return dequantize(*whole, "e4m3", *((128, 128) if blocks else (1, 1 << 20)))

    def matrix(name: str) -> WeightExpr:
        return concat([one(f"{name}.{part}") for part in range(parts)], 0)

    return b.constant(stack([matrix(f"{name}.{i}") for i in range(experts)], 0) if experts else matrix(name), name)


@pytest.mark.parametrize(("experts", "shared", "inner", "joined"), [
    ("fp8", "fp8", 64, True), ("fp8_block", "fp8_block", 128, True), ("fp8_block", "fp8_block", 64, False),
    ("fp8", "", 64, False), ("", "fp8", 64, False)])
def test_what_a_checkpoint_holds_quantized(experts: str, shared: str, inner: int, joined: bool) -> None:
    """Stays in its own numbers: nothing is joined where a block would be cut, or where one of both is rounded."""
    b, width, parts = Builder(), 256, 2
    x, attrs = b.x("x", "T", width), {"scheme": experts or shared}
    ids, weights = b.add("route", [b.op("linear", x, b.weight("router", EXPERTS, width), scheme="bf16")], choices=2)

    def matrix(name: str, form: str, halves: int, n: int, k: int, count: int = 0) -> str:
        if form:
            return held(b, name, halves, n, k, form == "fp8_block", count)
        return b.weight(name, *((count,) if count else ()), halves * n, k)

    up = b.op("expert_linear", x, ids, matrix("up", experts, 2, inner, width, EXPERTS), gated="silu", **attrs)
    down = b.op("expert_linear", up, ids, matrix("down", experts, 1, width, inner, EXPERTS), **attrs)
    y = b.op("linear", x, matrix("shared.up", shared, 2, parts * inner, width), gated="silu", **attrs)
    y = b.op("add", x, b.op("linear", y, matrix("shared.down", shared, 1, width, parts * inner), **attrs))
    graph = b.made(b.op("combine", down, weights, y))
    after = join_shared_experts(graph)
    assert (matrices(after) == 1) == joined
    for node in after.nodes if joined else ():
        if node.op == "expert_linear":
            assert carried(after.constants[node.values[2]], experts) is not None
