"""Keys and values that one matrix makes head by head: read in place, with the same meaning."""
from __future__ import annotations

import pytest

from ingot.compiler.ir.graph import Graph
from ingot.compiler.ir.types import DType
from ingot.compiler.passes.part_heads import part_heads
from ingot.compiler.passes.place_kv import place_kv
from ingot.compiler.weights.carried import carried
from ingot.compiler.weights.expr import dequantize, tensor
from tests.compiler.graphs import Builder, expect_same_meaning, only, ops

HEADS, KEY, VALUE = 3, 8, 6


def latent(b: Builder, weight: str, key: int = KEY, value: int = VALUE, turned: bool = False,
           scheme: str = "fp8") -> Graph:
    """Attention over keys and values of one matrix; turned: values are no part of it as they are."""
    x = b.x("x", "T", int(b.types[weight].shape[1]))
    both = b.op("reshape", b.op("linear", x, weight, scheme=scheme), shape=("T", HEADS, key + value))
    keys, values = b.slice(both, 2, 0, key), b.slice(both, 2, key, key + value)
    values = b.op("neg", values) if turned else values
    y = b.op("attention", b.x("q", "T", HEADS, key), b.op("neg", keys), values, slot=0, scale=0.3)
    return place_kv(b.made(y), DType.F32)


def plain(turned: bool = False) -> Graph:
    b = Builder()
    return latent(b, b.weight("w", HEADS * (KEY + VALUE), 16), turned=turned)


def test_values_lie_side_by_side() -> None:
    graph = plain()
    parted = part_heads(graph)
    expect_same_meaning(graph, parted)
    assert [node.attrs["start"] for node in parted.nodes if node.op == "slice"] == [0, HEADS * KEY]
    assert set(parted.constants) == set(graph.constants), "under the names by which the model knows its matrices"
    write = only(parted, "kv_write")
    assert parted.producers()[write.values[1]].op == "reshape"


def test_what_would_be_computed_anyway_stays() -> None:
    graph = plain(turned=True)
    assert part_heads(graph).nodes == graph.nodes
    graph = plain()
    read = graph.rebuilt(graph.nodes, probes={"both": only(graph, "linear").output})
    assert part_heads(read).nodes == read.nodes and "linear" in ops(read)


@pytest.mark.parametrize(("key", "value", "moved"), [(128, 128, True), (256, 128, True), (64, 128, False)])
def test_blocks_of_a_quantized_checkpoint(key: int, value: int, moved: bool) -> None:
    """Rows move with their scales, where no block lies in two parts."""
    b = Builder()
    shape = HEADS * (key + value), 256
    weight = b.constant(dequantize(tensor("w", shape), tensor("w.scale", shape), "e4m3", 128, 128), "w")
    graph = latent(b, weight, key, value, scheme="fp8_block")
    parted = part_heads(graph)
    assert (parted.nodes != graph.nodes) == moved
    assert carried(parted.constants["w"], "fp8_block") is not None and parted.constants["w"].shape == shape
