from __future__ import annotations

from ingot.compiler.ir.types import DType
from ingot.compiler.passes.insert_quantize import insert_quantize
from tests.compiler.graphs import Builder, expect_same_meaning, expect_structure, ops


def test_layers_with_integer_weights_read_quantized_rows() -> None:
    b = Builder()
    x = b.x("x", "T", 64)
    graph = b.made(b.op("linear", x, b.weight("w", 32, 64), scheme="int8"))
    e = Builder()
    q = e.op("quantize", e.x("x", "T", 64), scheme="int8")
    expect_structure(insert_quantize(graph), e.made(e.op("linear", q, e.weight("w", 32, 64), scheme="int8")))
    expect_same_meaning(graph, insert_quantize(graph), 2e-2)


def test_layers_of_one_scheme_share_what_they_read() -> None:
    b = Builder()
    x = b.x("x", "T", 64)
    graph = b.made(*(b.op("linear", x, b.weight(name, 32, 64), scheme=scheme) for name, scheme in (
        ("a", "int8"), ("b", "w4a8"), ("c", "int8"), ("d", "fp32"))))
    assert ops(insert_quantize(graph)) == ["quantize", "linear", "quantize", "linear", "linear", "linear"]


def test_where_pairs_are_multiplied_bf16_reads_rounded_rows() -> None:
    """Elsewhere it reads floats; an embedding has no inputs to round."""
    b = Builder()
    rows = b.op("embedding", b.weight("e", 8, 64), b.x("ids", "T", dtype=DType.I32), scheme="bf16")
    graph = b.made(b.op("linear", rows, b.weight("w", 32, 64), scheme="bf16"))
    assert insert_quantize(graph) == graph
    rounded = insert_quantize(graph, pairs=True)
    assert [node.attrs["scheme"] for node in rounded.nodes] == ["bf16", "bf16_pairs", "bf16_pairs"]
    assert ops(rounded) == ["embedding", "quantize", "linear"]
    expect_same_meaning(graph, rounded, 5e-3)


def test_experts_too() -> None:
    b = Builder()
    ids = b.op("mod", b.x("ids", "T", 2, dtype=DType.I32), 4)
    graph = b.made(b.op("expert_linear", b.x("x", "T", 64), ids, b.weight("w", 4, 32, 64), scheme="w4a8"))
    assert ops(insert_quantize(graph)) == ["mod", "quantize", "expert_linear"]
    expect_same_meaning(graph, insert_quantize(graph), 2e-2)


def test_layers_without_a_scheme_read_floats() -> None:
    b = Builder()
    graph = b.made(b.op("linear", b.x("x", "T", 64), b.weight("w", 32, 64)))
    assert insert_quantize(graph) == graph
