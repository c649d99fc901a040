"""Matrices whose rows no matrix kernel of GPUs takes become arithmetic of the same meaning; others stay."""
from __future__ import annotations

import pytest

from ingot.compiler.fusion.fuse import fuse_loops
from ingot.compiler.ir.graph import Graph
from ingot.compiler.ir.types import DType
from ingot.compiler.passes.spell_out_matrices import spell_out_matrices
from tests.compiler.graphs import Builder, expect_same_meaning, ops

CHANNELS = {"fp32": (4, 6), "bf16": (8, 12), "fp8": (16, 24)}
"""Scheme -> channels that its kernels take, and that they don't."""


def linear(channels: int, scheme: str, bias: bool) -> Graph:
    b = Builder()
    parameters = [b.weight("w", 5, channels), *([b.weight("bias", 5)] if bias else [])]
    return b.made(b.op("linear", b.x("x", 1, "T", channels), *parameters, scheme=scheme))


def experts(channels: int, scheme: str, bias: bool, shared: bool) -> Graph:
    b = Builder()
    parameters = [b.weight("w", 4, 5, channels), *([b.weight("bias", 4, 5)] if bias else [])]
    ids = b.x("ids_below4", "T", 2, dtype=DType.I32)
    x = b.x("x", "T", channels) if shared else b.x("x", "T", 2, channels)
    return b.made(b.op("expert_linear", x, ids, *parameters, scheme=scheme))


@pytest.mark.parametrize("scheme", CHANNELS)
@pytest.mark.parametrize("bias", [False, True])
def test_linear(scheme: str, bias: bool) -> None:
    taken, other = (linear(channels, scheme, bias) for channels in CHANNELS[scheme])
    assert spell_out_matrices(taken).nodes == taken.nodes
    plain = linear(CHANNELS[scheme][1], "fp32", bias)
    spelled = spell_out_matrices(other)
    assert "linear" not in ops(spelled)
    expect_same_meaning(plain, spelled)
    expect_same_meaning(plain, fuse_loops(spelled))
    assert set(ops(fuse_loops(spelled))) <= {"loop", "reshape"}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_experts(bias: bool, shared: bool) -> None:
    graph = experts(12, "bf16", bias, shared)
    spelled = spell_out_matrices(graph)
    assert "expert_linear" not in ops(spelled)
    expect_same_meaning(experts(12, "fp32", bias, shared), spelled)
    expect_same_meaning(experts(12, "fp32", bias, shared), fuse_loops(spelled))
    assert spell_out_matrices(experts(16, "bf16", bias, shared)).nodes == experts(16, "bf16", bias, shared).nodes


def test_matrices_without_a_scheme_stay() -> None:
    b = Builder()
    graph = b.made(b.op("linear", b.x("x", "T", 3), b.weight("w", 5, 3)))
    assert spell_out_matrices(graph).nodes == graph.nodes
