from __future__ import annotations

import pytest

from ingot.compiler.passes.fuse_norm_add import fuse_norm_add
from tests.compiler.graphs import Builder, expect_same_meaning, ops


@pytest.mark.parametrize("swapped", [False, True])
def test_norms_on_both_sides_of_a_sum(swapped: bool) -> None:
    b = Builder()
    r, behind = b.x("r", "T", 8), b.op("rms_norm", b.x("x", "T", 8), b.weight("v", 8), eps=1e-6)
    s = b.op("add", *((behind, r) if swapped else (r, behind)))
    graph = b.made(b.op("rms_norm", s, b.weight("w", 8), eps=1e-6), b.op("neg", s))
    fused = fuse_norm_add(graph)
    assert ops(fused) == ["norm_add_norm", "neg"]
    expect_same_meaning(graph, fused)


@pytest.mark.parametrize("eps", [None, 1e-5])
def test_a_sum_without_a_like_norm_behind_it(eps: float | None) -> None:
    b = Builder()
    s = b.op("add", b.x("r", "T", 8), b.op("rms_norm", b.x("x", "T", 8), b.weight("v", 8), eps=1e-6))
    graph = b.made(b.op("neg", s) if eps is None else b.op("rms_norm", s, b.weight("w", 8), eps=eps))
    fused = fuse_norm_add(graph)
    assert ops(fused) == ["norm_add", "neg" if eps is None else "rms_norm"]
    expect_same_meaning(graph, fused)


def test_a_sum_that_is_read_before_its_norm() -> None:
    b = Builder()
    s = b.op("add", b.x("r", "T", 8), b.op("rms_norm", b.x("x", "T", 8), b.weight("v", 8), eps=1e-6))
    graph = b.made(b.op("neg", s), b.op("rms_norm", s, b.weight("w", 8), eps=1e-6))
    assert ops(fuse_norm_add(graph)) == ["norm_add", "neg", "rms_norm"]
    expect_same_meaning(graph, fuse_norm_add(graph))


def test_a_norm_that_others_read_stays() -> None:
    b = Builder()
    y = b.op("rms_norm", b.x("x", "T", 8), b.weight("v", 8), eps=1e-6)
    graph = b.made(b.op("add", b.x("r", "T", 8), y), b.op("neg", y))
    assert fuse_norm_add(graph) == graph
