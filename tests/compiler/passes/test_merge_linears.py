from __future__ import annotations

from ingot.compiler.passes.merge_linears import merge_linears
from tests.compiler.graphs import Builder, expect_same_meaning, expect_structure, ops


def test_layers_that_read_the_same_become_slices_of_one() -> None:
    b = Builder()
    x = b.x("x", 1, "T", 8)
    layers = {"q": 6, "k": 4, "v": 2}
    graph = b.made(*(b.op("neg", b.op("linear", x, b.weight(name, n, 8))) for name, n in layers.items()))
    merged = merge_linears(graph)

    e = Builder()
    weight = e.op("cat", *(e.weight(name, n, 8) for name, n in layers.items()), dim=0)
    y = e.op("linear", e.x("x", 1, "T", 8), weight)
    expect_structure(merged, e.made(*(e.op("neg", e.slice(y, 2, start, stop)) for start, stop in (
        (0, 6), (6, 10), (10, 12)))))
    expect_same_meaning(graph, merged)


def test_missing_biases_are_zero() -> None:
    b = Builder()
    x = b.x("x", "T", 8)
    graph = b.made(b.op("linear", x, b.weight("q", 6, 8), b.weight("c", 6)), b.op("linear", x, b.weight("k", 4, 8)))
    merged = merge_linears(graph)
    assert ops(merged) == ["linear", "slice", "slice"] and len(merged.nodes[0].inputs) == 3
    expect_same_meaning(graph, merged)


def test_other_precision_other_input_or_a_computed_part_stays_apart() -> None:
    b = Builder()
    x, y = b.x("x", "T", 8), b.x("y", "T", 8)
    outputs = [b.op("linear", x, b.weight("a", 4, 8), scheme="fp32"), b.op("linear", x, b.weight("b", 4, 8),
                                                                           scheme="bf16"),
               b.op("linear", y, b.weight("c", 4, 8), scheme="fp32"), b.op("linear", x, b.x("w", 4, 8), scheme="fp32"),
               b.op("linear", x, b.weight("d", 4, 8), b.x("bias", 4), scheme="fp32")]
    graph = b.made(*outputs)
    assert merge_linears(graph) == graph


def test_routers_apart() -> None:
    """What a topk chooses by stays a matrix of its own, the others merge."""
    b = Builder()
    x = b.x("x", "T", 8)
    logits, *others = (b.op("linear", x, b.weight(name, n, 8)) for name, n in {"router": 4, "gate": 6, "up": 6}.items())
    values, ids = b.add("topk", [b.op("softmax", logits, dim=1)], k=2, dim=1, largest=True)
    graph = b.made(values, ids, b.op("mul", *others))
    assert ops(merge_linears(graph)).count("linear") == 1
    merged = merge_linears(graph, routers_apart=True)
    assert ops(merged).count("linear") == 2
    assert [node.values[1] for node in merged.nodes if node.op == "linear"] == ["router", "gate+up"]
    expect_same_meaning(graph, merged)


def test_merged_layers_stand_where_the_first_stood() -> None:
    """The second may be read only after something that depends on the first."""
    b = Builder()
    x = b.x("x", "T", 8)
    y = b.op("exp", b.op("linear", x, b.weight("a", 4, 8)))
    graph = b.made(b.op("add", y, b.op("linear", x, b.weight("b", 4, 8))))
    merged = merge_linears(graph)
    assert ops(merged) == ["linear", "slice", "slice", "exp", "add"]
    expect_same_meaning(graph, merged)
