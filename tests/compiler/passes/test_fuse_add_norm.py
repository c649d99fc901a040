from __future__ import annotations

import pytest

from ingot.compiler.passes.fuse_add_norm import fuse_add_norm
from tests.compiler.graphs import Builder, expect_same_meaning, expect_structure, ops


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_sum_and_norm_become_one(op: str) -> None:
    b = Builder()
    s = b.op("add", b.x("x", "T", 8), b.x("r", "T", 8))
    graph = b.made(b.op(op, s, b.weight("w", 8), eps=1e-6), b.op("neg", s))
    fused = fuse_add_norm(graph)

    e = Builder()
    y, s = e.add(f"add_{op}", [e.x("x", "T", 8), e.x("r", "T", 8), e.weight("w", 8)], eps=1e-6)
    expect_structure(fused, e.made(y, e.op("neg", s)))
    expect_same_meaning(graph, fused)


def test_the_first_of_two_norms_makes_the_sum() -> None:
    b = Builder()
    s = b.op("add", b.x("x", "T", 8), b.x("r", "T", 8))
    graph = b.made(b.op("rms_norm", s, eps=1e-6), b.op("layer_norm", s, eps=1e-5))
    fused = fuse_add_norm(graph)
    assert ops(fused) == ["add_rms_norm", "layer_norm"]
    expect_same_meaning(graph, fused)


def test_a_sum_that_is_read_before_the_norm_stays() -> None:
    b = Builder()
    s = b.op("add", b.x("x", "T", 8), b.x("r", "T", 8))
    early = b.op("neg", s)
    graph = b.made(early, b.op("rms_norm", s, eps=1e-6))
    assert fuse_add_norm(graph) == graph


@pytest.mark.parametrize("shape", [(8,), ("T", 1)])
def test_a_sum_that_broadcasts_stays(shape: tuple[int | str, ...]) -> None:
    b = Builder()
    s = b.op("add", b.x("x", "T", 8), b.x("r", *shape))
    graph = b.made(b.op("rms_norm", s, eps=1e-6))
    assert fuse_add_norm(graph) == graph


def test_a_sum_with_a_number_stays() -> None:
    b = Builder()
    graph = b.made(b.op("rms_norm", b.op("add", b.x("x", "T", 8), 1.0), eps=1e-6))
    assert fuse_add_norm(graph) == graph
