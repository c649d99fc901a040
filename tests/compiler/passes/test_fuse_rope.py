from __future__ import annotations

import pytest

from ingot.compiler.ir.graph import Graph
from ingot.compiler.ir.types import DType
from ingot.compiler.passes.fuse_rope import fuse_rope_kv_write
from tests.compiler.graphs import Builder, expect_same_meaning, expect_structure, only, ops


def inputs(b: Builder) -> tuple[str, str, str, str, str]:
    return (b.x("q", "T", 32), b.x("k", "T", 16), b.x("v", "T", 2, 8), b.x("cos", "T", 6), b.x("sin", "T", 6))


def heads(b: Builder, x: str, count: int, norm: str | None) -> str:
    x = b.op("reshape", x, shape=("T", count, 8))
    return x if norm is None else b.op("rms_norm", x, b.weight(norm, 8), eps=1e-5)


def rotated(norms: tuple[str | None, str | None] = (None, None), interleaved: bool = False) -> Graph:
    b = Builder()
    q, k, v, cos, sin = inputs(b)
    attrs = {"interleaved": True} if interleaved else {}
    q = b.op("rope", heads(b, q, 4, norms[0]), cos, sin, **attrs)
    k = b.op("rope", heads(b, k, 2, norms[1]), cos, sin, **attrs)
    cached = b.add("kv_write", [k, v], slot=0, dtype=DType.F32)
    return b.made(b.op("attention", q, *cached, slot=0, scale=0.5))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norms", [(None, None), ("q_norm", "k_norm")])
def test_rope_and_write_become_one(norms: tuple[str | None, str | None], interleaved: bool) -> None:
    graph = rotated(norms, interleaved)
    fused = fuse_rope_kv_write(graph)

    e = Builder()
    q, k, v, cos, sin = inputs(e)
    weights = [e.weight(norm, 8) for norm in norms if norm]
    attrs = {"interleaved": True} if interleaved else {}
    if weights:
        attrs["eps"] = 1e-5  # type: ignore[assignment]
    q, k = e.op("reshape", q, shape=("T", 4, 8)), e.op("reshape", k, shape=("T", 2, 8))
    q, k = (e.op("reshape", x, shape=e.types[x].shape) for x in (q, k))  # costs nothing
    q, *cached = e.add("rope_kv_write", [q, k, v, cos, sin, *weights], **attrs, slot=0, dtype=DType.F32)
    expect_structure(fused, e.made(e.op("attention", q, *cached, slot=0, scale=0.5)))
    expect_same_meaning(graph, fused)


def test_one_norm_is_not_enough() -> None:
    graph = rotated(("q_norm", None))
    assert fuse_rope_kv_write(graph) == graph


def test_norms_with_different_eps_stay() -> None:
    b = Builder()
    q, k, v, cos, sin = inputs(b)
    q = b.op("rope", b.op("rms_norm", heads(b, q, 4, None), b.weight("a", 8), eps=1e-5), cos, sin)
    k = b.op("rope", b.op("rms_norm", heads(b, k, 2, None), b.weight("b", 8), eps=1e-6), cos, sin)
    cached = b.add("kv_write", [k, v], slot=0, dtype=DType.F32)
    graph = b.made(b.op("attention", q, *cached, slot=0, scale=0.5))
    assert fuse_rope_kv_write(graph) == graph


def test_other_factors_stay() -> None:
    b = Builder()
    q, k, v, cos, sin = inputs(b)
    q, k = b.op("rope", heads(b, q, 4, None), cos, sin), b.op("rope", heads(b, k, 2, None), sin, cos)
    cached = b.add("kv_write", [k, v], slot=0, dtype=DType.F32)
    graph = b.made(b.op("attention", q, *cached, slot=0, scale=0.5))
    assert fuse_rope_kv_write(graph) == graph


def test_a_norm_of_the_whole_row_stays_before() -> None:
    b = Builder()
    q, k, v, cos, sin = inputs(b)
    q = heads(b, b.op("rms_norm", q, b.weight("a", 32), eps=1e-5), 4, None)
    k = heads(b, b.op("rms_norm", k, b.weight("b", 16), eps=1e-5), 2, None)
    cached = b.add("kv_write", [b.op("rope", k, cos, sin), v], slot=0, dtype=DType.F32)
    graph = b.made(b.op("attention", b.op("rope", q, cos, sin), *cached, slot=0, scale=0.5))
    fused = fuse_rope_kv_write(graph)
    assert ops(fused).count("rms_norm") == 2 and len(only(fused, "rope_kv_write").inputs) == 5
    expect_same_meaning(graph, fused)


def test_a_cache_that_two_layers_read_is_written_once() -> None:
    b = Builder()
    q, k, v, cos, sin = inputs(b)
    q = b.op("rope", heads(b, q, 4, None), cos, sin)
    cached = b.add("kv_write", [b.op("rope", heads(b, k, 2, None), cos, sin), v], slot=0, dtype=DType.F32)
    graph = b.made(*(b.op("attention", q, *cached, slot=0, scale=scale) for scale in (0.5, 0.25)))
    assert fuse_rope_kv_write(graph) == graph


def test_a_later_query_of_the_same_cache_keeps_its_rope() -> None:
    b = Builder()
    q, k, v, cos, sin = inputs(b)
    q = b.op("rope", heads(b, q, 4, None), cos, sin)
    cached = b.add("kv_write", [b.op("rope", heads(b, k, 2, None), cos, sin), v], slot=0, dtype=DType.F32)
    graph = b.made(b.op("attention", q, *cached, slot=0, scale=0.5), b.op("neg", q))
    assert fuse_rope_kv_write(graph) == graph
