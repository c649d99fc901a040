"""The rules of the normal form, each on a graph of a few nodes."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ingot.compiler.importer.builder import GraphBuilder
from ingot.compiler.importer.simplify import emit, emit_all
from ingot.compiler.ir.dump import dump
from ingot.compiler.ir.interpret import run
from ingot.compiler.ir.types import DType, TensorType
from ingot.compiler.ir.verify import verify
from ingot.compiler.weights.expr import literal, tensor


def f32(values: list[Any]) -> np.ndarray:
    return np.array(values, np.float32)



@pytest.fixture
def b() -> GraphBuilder:
    builder = GraphBuilder()
    builder.input("x", TensorType(("T", 4, 6)))
    return builder


def nodes(b: GraphBuilder, output: str) -> list[str]:
    """The nodes that are left, without names of values."""
    return [f"{n.op}{n.attrs.get('dims') or n.attrs.get('shape') or ''}" for n in verify(b.graph([output])).nodes]


def test_identities_add_nothing(b: GraphBuilder) -> None:
    y = emit(b, "reshape", ("x",), shape=("T", 4, 6))
    y = emit(b, "permute", (y,), dims=(0, 1, 2))
    y = emit(b, "slice", (y,), dim=2, start=0, stop=6, step=1)
    y = emit(b, "expand", (y,), shape=("T", 4, 6))
    y = emit(b, "cast", (y,), dtype=DType.F32)
    y = emit(b, "mul", (1.0, emit(b, "add", (y, 0.0))))
    assert emit(b, "cat", (emit(b, "div", (y, 1.0)),), dim=0) == "x"


def test_integers_stay_integers(b: GraphBuilder) -> None:
    b.input("i", TensorType(("T",), DType.I32))
    assert emit(b, "add", ("i", 0)) == "i" == emit(b, "mul", ("i", 1))
    assert b.types[emit(b, "div", ("i", 1))].dtype == DType.F32
    assert b.types[emit(b, "add", ("i", 0.0))].dtype == DType.F32


def test_views_of_views(b: GraphBuilder) -> None:
    y = emit(b, "reshape", (emit(b, "reshape", ("x",), shape=("T", 24)),), shape=("T", 2, 12))
    assert nodes(b, y) == ["reshape('T', 2, 12)"]
    y = emit(b, "permute", (emit(b, "permute", ("x",), dims=(1, 0, 2)),), dims=(1, 2, 0))
    assert nodes(b, y) == ["permute(0, 2, 1)"]
    assert emit(b, "permute", (emit(b, "permute", ("x",), dims=(2, 0, 1)),), dims=(1, 2, 0)) == "x"


def test_a_permute_that_moves_only_ones_is_a_reshape(b: GraphBuilder) -> None:
    y = emit(b, "permute", (emit(b, "reshape", ("x",), shape=(1, "T", 1, 24)),), dims=(2, 0, 3, 1))
    assert nodes(b, y) == ["reshape(1, 'T', 1, 24)", "permute(2, 0, 3, 1)"]
    y = emit(b, "permute", (emit(b, "reshape", ("x",), shape=(1, "T", 24)),), dims=(1, 0, 2))
    assert nodes(b, y) == ["reshape('T', 1, 24)"]


def test_equal_nodes_are_one(b: GraphBuilder) -> None:
    assert emit(b, "cos", ("x",)) == emit(b, "cos", ("x",))
    assert emit(b, "mul", ("x", 2.0)) != emit(b, "mul", ("x", True))


def test_permutes_meet_and_cancel_across_a_rotation(b: GraphBuilder) -> None:
    """As models do: heads first, rotate by a table [1, T, 6], back to tokens first."""
    b.input("table", TensorType(("T", 6)))
    heads = emit(b, "permute", ("x",), dims=(1, 0, 2))
    table = emit(b, "reshape", ("table",), shape=(1, "T", 6))
    half = emit(b, "neg", (emit(b, "slice", (heads,), dim=2, start=3, stop=6, step=1),))
    other = emit(b, "slice", (heads,), dim=2, start=0, stop=3, step=1)
    rotated = emit(b, "add", (emit(b, "mul", (heads, table)), emit(b, "cat", (half, other), dim=2)))
    y = emit(b, "permute", (rotated,), dims=(1, 0, 2))
    assert not any(name.startswith("permute") for name in nodes(b, y))
    x, values = np.arange(48, dtype=np.float32).reshape(2, 4, 6), np.arange(12, dtype=np.float32).reshape(2, 6)
    got = run(b.graph([y]), {"x": x, "table": values}, Nothing())[y]
    assert (got == x * values[:, None] + np.concatenate([-x[..., 3:], x[..., :3]], -1)).all()


class Nothing:
    def get(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        raise AssertionError(name)

    def shape(self, name: str) -> tuple[int, ...]:
        raise AssertionError(name)


@pytest.mark.parametrize(("op", "attrs"), [
    ("softmax", {"dim": 2}), ("cumsum", {"dim": 0}), ("reduce_mean", {"dims": (2,), "keepdim": True}),
    ("slice", {"dim": 0, "start": 1, "stop": 3, "step": 1}), ("expand", {"shape": (4, "T", 6)}),
    ("rms_norm", {"eps": 1e-5}), ("cast", {"dtype": DType.I32}), ("topk", {"k": 2, "dim": 0})])
def test_a_permute_sinks_and_the_meaning_stays(b: GraphBuilder, op: str, attrs: dict[str, object]) -> None:
    heads = emit(b, "permute", ("x",), dims=(1, 0, 2))
    results = emit_all(b, op, (heads,), **attrs)
    plain = GraphBuilder()
    plain.input("x", TensorType(("T", 4, 6)))
    expected = plain.add(op, plain.add("permute", ("x",), dims=(1, 0, 2)), **attrs)
    x = np.random.default_rng(0).standard_normal((3, 4, 6)).astype(np.float32)
    for got, want in zip(results, expected, strict=True):
        a, c = (run(g.graph([n]), {"x": x}, Nothing())[n] for g, n in ((b, got), (plain, want)))
        np.testing.assert_array_equal(a, c)
    assert results[0] == heads or nodes(b, results[0])[-1] == "permute(1, 0, 2)"


def test_views_of_constants_are_part_of_the_recipe(b: GraphBuilder) -> None:
    w = b.constant(tensor("w", (6, 8)), "w")
    y = emit(b, "linear", ("x", emit(b, "permute", (w,), dims=(1, 0))))
    graph = verify(b.graph([y]))
    assert [n.op for n in graph.nodes] == ["linear"]
    assert "const w.permute: f32[8, 6] = permute(w; dims=(1, 0))" in dump(graph)


def test_equal_recipes_are_one_constant(b: GraphBuilder) -> None:
    assert b.constant(tensor("w", (6, 8)), "lm_head") == b.constant(tensor("w", (6, 8)), "embedding") == "lm_head"


def test_uniform_values_become_literals(b: GraphBuilder) -> None:
    ones = emit(b, "full", (), shape=("T", 1, 6), value=1.0, dtype=DType.F32)
    assert emit(b, "mul", ("x", ones)) == "x"
    two = emit(b, "add", (ones, 1.0))
    y = emit(b, "mul", ("x", two))
    assert b.producers[y].inputs == ("x", 2.0)
    wide = emit(b, "full", (), shape=(2, "T", 4, 6), value=2.0, dtype=DType.F32)
    assert b.types[emit(b, "mul", ("x", wide))].shape == (2, "T", 4, 6)  # the shape of the result depends on it


def test_a_choice_that_is_made_is_taken(b: GraphBuilder) -> None:
    long, short = (b.constant(literal(f32([v, v, v, v, v, v])), name) for v, name in ((1, "long"), (2, "short")))
    longest = emit(b, "full", (), shape=(), value=127, dtype=DType.I32)
    assert emit(b, "where", (emit(b, "gt", (longest, 64)), long, short)) == long
    assert emit(b, "where", (emit(b, "gt", (longest, 128)), long, short)) == short
