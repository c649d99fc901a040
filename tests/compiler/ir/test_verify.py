"""Every rule of a well-formed graph, broken once."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ingot.compiler.ir.dump import dump
from ingot.compiler.ir.graph import Graph, Node
from ingot.compiler.ir.interpret import run
from ingot.compiler.ir.types import DType, TensorType
from ingot.compiler.ir.verify import GraphError, verify
from ingot.compiler.weights.expr import concat, literal, tensor


def graph() -> Graph:
    """Two linear layers in one, halved."""
    w = concat([tensor("a", (2, 4)), tensor("b", (1, 4))], 0)
    nodes = (
        Node("reshape", ("x",), ("rows",), {"shape": ("T", 4)}, "model (modeling.py:1)"),
        Node("linear", ("rows", "w"), ("y",), {}, "model.proj (modeling.py:2)"),
        Node("mul", ("y", 0.5), ("out",), {}, "model (modeling.py:3)"),
    )
    types = {"x": TensorType(("4*T",)), "w": w.type, "rows": TensorType(("T", 4)), "y": TensorType(("T", 3)),
             "out": TensorType(("T", 3))}
    return Graph(("x",), {"w": w}, nodes, ("out",), types, {"model.proj": "y"})


class Source:
    tensors = {"a": np.eye(2, 4, dtype=np.float32), "b": np.ones((1, 4), np.float32)}  # noqa: RUF012

    def get(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        return self.tensors[name][begin:end]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape


def test_a_good_graph_passes_and_reads_well() -> None:
    assert verify(graph()) == graph()
    assert dump(graph()) == """\
input x: f32[4*T]
const w: f32[3, 4] = cat(a, b; dim=0)
rows: f32[T, 4] = reshape(x; shape=[T, 4])  # model (modeling.py:1)
y: f32[T, 3] = linear(rows, w)  # model.proj (modeling.py:2)
out: f32[T, 3] = mul(y, 0.5)  # model (modeling.py:3)
output out
probe model.proj = y
"""


def broken(**changes: object) -> Graph:
    return replace(graph(), **changes)  # type: ignore[arg-type]


def with_node(index: int, **changes: object) -> Graph:
    nodes = list(graph().nodes)
    nodes[index] = replace(nodes[index], **changes)  # type: ignore[arg-type]
    return broken(nodes=tuple(nodes))


@pytest.mark.parametrize(("bad", "message"), [
    (broken(nodes=graph().nodes[::-1]), "y is used before it is defined: out = mul"),
    (broken(nodes=(*graph().nodes, graph().nodes[1])), "y is defined twice"),
    (with_node(1, op="convolve"), "unknown operator"),
    (with_node(1, inputs=("rows",)), "linear takes 2 to 4 operands, got 1"),
    (with_node(1, inputs=("rows", "w", "rows")), r"bias f32\[T, 4\]"),
    (with_node(0, attrs={"shape": ("T", 5)}), "elements"),
    (broken(types={**graph().types, "y": TensorType(("T", 4))}), "recorded as f32.T, 4., inferred as f32.T, 3."),
    (broken(types={k: v for k, v in graph().types.items() if k != "y"}), "recorded as None"),
    (broken(types={**graph().types, "w": TensorType((4, 3))}), "constant w is recorded as"),
    (broken(constants={"x": literal(np.zeros(3, np.float32))}), "constant x has the name of an input"),
    (broken(outputs=("nothing",)), "output or probe nothing is not defined"),
    (broken(inputs=("x", "x")), "named twice"),
])
def test_a_broken_rule_names_the_node(bad: Graph, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        verify(bad)


def test_errors_name_the_origin() -> None:
    with pytest.raises(GraphError, match=r"from model\.proj \(modeling\.py:2\)"):
        verify(with_node(1, inputs=("rows", "w", "rows")))


def test_interpretation() -> None:
    values = run(graph(), {"x": np.arange(8, dtype=np.float32)}, Source(), keep=["rows"])
    assert set(values) == {"out", "rows"}
    assert values["out"].tolist() == [[0, 0.5, 3], [2, 2.5, 11]]


def test_the_interpreter_frees_what_is_not_needed_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    import weakref

    from ingot.compiler.ir import interpret
    alive: list[weakref.ref[np.ndarray]] = []
    real = interpret.run_node

    def watching(node: Node, operands: list[np.ndarray], bindings: dict[str, int]) -> tuple[np.ndarray, ...]:
        if node.op == "mul":
            assert alive[0]() is None, "rows outlived its last use"
        results = real(node, operands, bindings)
        alive.append(weakref.ref(results[0]))
        return results

    monkeypatch.setattr(interpret, "run_node", watching)
    run(graph(), {"x": np.ones(8, np.float32)}, Source())


def test_a_reference_that_gives_another_type_is_found() -> None:
    wrong = broken(types={**graph().types, "out": TensorType(("T", 3), DType.I32)})
    with pytest.raises(AssertionError, match=r"recorded i32\[T, 3\]"):
        run(wrong, {"x": np.ones(8, np.float32)}, Source())
