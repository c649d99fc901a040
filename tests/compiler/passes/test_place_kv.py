from __future__ import annotations

from ingot.compiler.ir.types import DType
from ingot.compiler.passes.place_kv import place_kv
from tests.compiler.graphs import Builder, expect_same_meaning, expect_structure, ops


def test_keys_and_values_go_through_the_cache() -> None:
    b = Builder()
    q, k, v, sinks = b.x("q", "T", 4, 8), b.x("k", "T", 2, 8), b.x("v", "T", 2, 6), b.weight("sinks", 4)
    graph = b.made(b.op("attention", q, k, v, sinks, slot=7, scale=0.5, window=3))
    placed = place_kv(graph, DType.F32)

    e = Builder()
    q, k, v, sinks = e.x("q", "T", 4, 8), e.x("k", "T", 2, 8), e.x("v", "T", 2, 6), e.weight("sinks", 4)
    cached = e.add("kv_write", [k, v], slot=0, dtype=DType.F32)
    expect_structure(placed, e.made(e.op("attention", q, *cached, sinks, slot=0, scale=0.5, window=3)))
    expect_same_meaning(graph, placed)


def test_layers_with_the_same_keys_and_values_share_a_slot() -> None:
    b = Builder()
    k, v = b.x("k", "T", 2, 8), b.x("v", "T", 2, 8)
    first, second, third = (b.x(name, "T", 4, 8) for name in ("q", "r", "s"))
    graph = b.made(b.op("attention", first, k, v, slot=0, scale=0.5),
                   b.op("attention", second, v, k, slot=1, scale=0.5),
                   b.op("attention", third, k, v, slot=2, scale=0.5))
    placed = place_kv(graph, DType.F32)
    assert ops(placed) == ["kv_write", "attention", "kv_write", "attention", "attention"]
    assert [node.attrs["slot"] for node in placed.nodes] == [0, 0, 1, 1, 0]
    expect_same_meaning(graph, placed)


def test_the_rounding_of_the_cache_is_in_the_graph() -> None:
    b = Builder()
    graph = b.made(b.op("attention", b.x("q", "T", 4, 8), b.x("k", "T", 2, 8), b.x("v", "T", 2, 8), slot=0, scale=0.5))
    expect_same_meaning(graph, place_kv(graph, DType.BF16), 1e-2)
