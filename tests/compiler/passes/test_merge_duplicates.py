from __future__ import annotations

from ingot.compiler.passes.merge_duplicates import merge_duplicates
from tests.compiler.graphs import Builder, expect_same_meaning, ops


class Unmerged(Builder):
    """Adds a node for each call: the importer's builder merges equal ones by itself."""

    def op(self, op: str, *inputs: object, **attrs: object) -> str:
        self._known.clear()
        return super().op(op, *inputs, **attrs)


def test_equal_chains_become_one() -> None:
    b = Unmerged()
    x = b.x("x", "T", 4)
    graph = b.made(*(b.op("exp", b.op("mul", x, 2.0)) for _ in range(3)))
    merged = merge_duplicates(graph)
    assert ops(merged) == ["mul", "exp"] and len(set(merged.outputs)) == 1
    expect_same_meaning(graph, merged, 0.0)


def test_numbers_of_different_types_are_different() -> None:
    b = Unmerged()
    x = b.x("x", "T", 4)
    graph = b.made(*(b.op("mul", x, one) for one in (1, 1.0)), b.op("pow", x, 2), b.op("pow", x, 3))
    assert len(merge_duplicates(graph).nodes) == 4


def test_other_attributes_are_different() -> None:
    b = Unmerged()
    x = b.x("x", "T", 4)
    graph = b.made(b.slice(x, 1, 0, 2), b.slice(x, 1, 1, 3), b.slice(x, 1, 1, 3))
    assert len(merge_duplicates(graph).nodes) == 2


def test_all_outputs_and_probes_follow() -> None:
    b = Unmerged()
    x = b.x("x", "T", 4)
    first, second = (b.op("neg", x) for _ in range(2))
    graph = b.made(b.op("exp", first), b.op("exp", second), probes={"layer": second})
    merged = merge_duplicates(graph)
    assert merged.probes == {"layer": first} and ops(merged) == ["neg", "exp"]


def test_operators_with_several_outputs() -> None:
    b = Unmerged()
    x = b.x("x", "T", 4)
    pairs = []
    for _ in range(2):
        b._known.clear()
        pairs.append(b.add("topk", [x], k=2, dim=1, largest=True))
    graph = b.made(pairs[0][0], pairs[1][1])
    merged = merge_duplicates(graph)
    assert ops(merged) == ["topk"] and merged.outputs == pairs[0]
    expect_same_meaning(graph, merged, 0.0)
