from __future__ import annotations

import numpy as np
import pytest

from ingot.compiler.ir.interpret import run
from ingot.compiler.passes.fuse_gate import fuse_gate
from tests.compiler.graphs import Builder, Weights, expect_same_meaning, only, ops, random_inputs


def gate(b: Builder, y: str, first: int, activation: str = "silu", **attrs: object) -> str:
    """act(half) * other half of y [.., 16]; first: where the gate's half begins."""
    rank = len(b.types[y].shape) - 1
    halves = [b.slice(y, rank, begin, begin + 8) for begin in (first, 8 - first)]
    return b.op("mul", b.op(activation, halves[0], **attrs), halves[1])


@pytest.mark.parametrize(("activation", "attrs", "name"), [
    ("silu", {}, "silu"), ("gelu", {"approximate": "tanh"}, "gelu_tanh"), ("gelu", {"approximate": "none"}, "gelu")])
@pytest.mark.parametrize("first", [0, 8])
def test_a_gate_becomes_part_of_its_matrix(activation: str, attrs: dict[str, str], name: str, first: int) -> None:
    b = Builder()
    y = b.op("linear", b.x("x", 1, "T", 4), b.weight("w", 16, 4), b.weight("bias", 16))
    graph = b.made(gate(b, y, first, activation, **attrs))
    fused = fuse_gate(graph)
    assert ops(fused) == ["linear"] and only(fused, "linear").attrs["gated"] == name
    expect_same_meaning(graph, fused)


def test_experts_likewise() -> None:
    b = Builder()
    scores, ids = b.add("topk", [b.x("scores", "T", 3)], k=2, dim=1, largest=True)
    y = b.op("expert_linear", b.x("x", "T", 4), ids, b.weight("w", 3, 16, 4), b.weight("bias", 3, 16))
    graph = b.made(gate(b, y, 8), scores)
    fused = fuse_gate(graph)
    assert ops(fused) == ["topk", "expert_linear"]
    inputs = random_inputs(graph, 5)
    source = Weights(graph)
    want, got = (run(one, inputs, source)[one.outputs[0]] for one in (graph, fused))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def clamped(b: Builder, y: str, limit: float = 7.0, factor: float = 1.702) -> str:
    """Even features of y [.., 16] are the gate's, odd ones the others."""
    rank = len(b.types[y].shape) - 1
    even, odd = (b.op("slice", y, dim=rank, start=start, stop=16, step=2) for start in (0, 1))
    even = b.op("minimum", even, limit)
    odd = b.op("minimum", b.op("maximum", odd, -limit), limit)
    return b.op("mul", b.op("add", odd, 1), b.op("mul", even, b.op("sigmoid", b.op("mul", even, factor))))


def test_a_clamped_gate_of_interleaved_features() -> None:
    b = Builder()
    scores, ids = b.add("topk", [b.x("scores", "T", 3)], k=2, dim=1, largest=True)
    x = b.op("mul", b.x("x", "T", 4), 4.0)
    graph = b.made(clamped(b, b.op("expert_linear", x, ids, b.weight("w", 3, 16, 4), b.weight("bias", 3, 16))), scores)
    fused = fuse_gate(graph)
    assert ops(fused) == ["topk", "mul", "expert_linear"]
    assert only(fused, "expert_linear").attrs["gated"] == "clamped_swiglu"
    inputs, source = random_inputs(graph, 5), Weights(graph)
    want, got = (run(one, inputs, source)[one.outputs[0]] for one in (graph, fused))
    assert (np.abs(want) > 20).any(), "the bounds count"
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changes", [{"limit": 6.0}, {"factor": 1.5}])
def test_other_clamped_gates_stay(changes: dict[str, float]) -> None:
    b = Builder()
    graph = b.made(clamped(b, b.op("linear", b.x("x", "T", 4), b.weight("w", 16, 4)), **changes))
    assert fuse_gate(graph) == graph


def test_what_others_read_stays() -> None:
    b = Builder()
    y = b.op("linear", b.x("x", "T", 4), b.weight("w", 16, 4))
    graph = b.made(gate(b, y, 0), b.op("neg", y))
    assert fuse_gate(graph) == graph


def test_halves_of_different_matrices_stay() -> None:
    b = Builder()
    x = b.x("x", "T", 4)
    first, second = (b.op("linear", x, b.weight(f"w{i}", 16, 4)) for i in range(2))
    graph = b.made(b.op("mul", b.op("silu", b.slice(first, 1, 0, 8)), b.slice(second, 1, 8, 16)))
    assert fuse_gate(graph) == graph


def test_parts_that_are_no_halves_stay() -> None:
    b = Builder()
    y = b.op("linear", b.x("x", "T", 4), b.weight("w", 18, 4))
    graph = b.made(b.op("mul", b.op("silu", b.slice(y, 1, 0, 8)), b.slice(y, 1, 8, 16)))
    assert fuse_gate(graph) == graph
