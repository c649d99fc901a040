from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ingot.compiler.ir.graph import Node
from ingot.compiler.ir.types import DType, TensorType
from ingot.compiler.passes.match import Matcher, eliminate_dead_code, rebuilt, rewrite
from ingot.compiler.weights.expr import literal, tensor
from tests.compiler.graphs import Builder, expect_same_meaning, ops


def relu_by_where(m: Matcher, node: Node) -> Sequence[Node] | None:
    if node.op != "maximum":
        return None
    x, floor = node.inputs
    name = f"{node.output}.above"
    return [Node("gt", (x, floor), (name,)), Node("where", (name, x, floor), node.outputs)]


def test_rules_replace_nodes_and_types_are_inferred() -> None:
    b = Builder()
    graph = b.made(b.op("neg", b.op("maximum", b.x("x", "T", 4), 0.0)))
    rewritten = rewrite(graph, relu_by_where)
    assert ops(rewritten) == ["gt", "where", "neg"]
    assert rewritten.types[rewritten.nodes[0].output] == TensorType(("T", 4), DType.BOOL)
    expect_same_meaning(graph, rewritten, 0.0)


def test_what_a_rule_makes_useless_goes() -> None:
    b = Builder()
    graph = b.made(b.op("add", b.op("exp", b.x("x", "T")), b.op("neg", "x")), probes={"exp": "v0"})

    def drop(m: Matcher, node: Node) -> Sequence[Node] | None:
        return [Node("neg", (node.inputs[1],), node.outputs)] if node.op == "add" else None

    rewritten = rewrite(graph, drop)
    assert ops(rewritten) == ["neg", "neg"] and rewritten.probes == {} and set(rewritten.types) == {"x", "v1", "v2"}


def test_dead_code_and_its_constants_go() -> None:
    b = Builder()
    x = b.x("x", "T", 4)
    kept, unused = b.op("neg", x), b.op("add", x, b.weight("w", 4))
    graph = b.made(kept, unused)
    live = eliminate_dead_code(graph.rebuilt(graph.nodes, outputs=[kept]))
    assert ops(live) == ["neg"] and not live.constants


def test_rebuilt_takes_new_inputs_and_constants() -> None:
    b = Builder()
    graph = b.made(b.op("neg", b.x("x", "T", 4)))
    nodes = [*graph.nodes, Node("add", (graph.outputs[0], "w"), ("sum",)), Node("mul", ("sum", "y"), ("out",))]
    made = rebuilt(graph, nodes, constants={"w": tensor("w", (4,))}, inputs={"y": TensorType((4,))}, outputs=["out"])
    assert made.inputs == ("x", "y") and made.types["out"] == TensorType(("T", 4)) and list(made.constants) == ["w"]


def test_matcher_finds_producers_and_counts_uses() -> None:
    b = Builder()
    x = b.x("x", "T", 4)
    y = b.op("exp", x)
    flat = b.op("reshape", b.op("reshape", y, shape=("T", 2, 2)), shape=("4*T",))
    m = Matcher(b.made(b.op("add", y, y), flat))
    assert m.node(y, "exp") is not None and m.node(y, "neg") is None and m.node(x) is None and m.node(2.0) is None
    assert m.uses(y) == 3 and m.uses(flat) == 1
    assert m.through_reshapes(flat) == y and m.through_reshapes(1.5) == 1.5


@pytest.mark.parametrize(("value", "expected"), [
    (np.array([0.25], np.float32), 0.25), (np.array([[3]], np.int32), 3.0), (np.array([1, 2], np.float32), None)])
def test_numbers(value: np.ndarray, expected: float | None) -> None:
    b = Builder()
    constant = b.constant(literal(value), "c")
    m = Matcher(b.made(b.op("mul", b.x("x", "T", 1), constant)))
    assert m.number(constant) == expected
    assert m.number(7) == 7.0 and m.number("x") is None


def test_a_tensor_of_the_checkpoint_is_no_number() -> None:
    b = Builder()
    weight = b.weight("w", 1)
    assert Matcher(b.made(b.op("mul", b.x("x", "T", 1), weight))).number(weight) is None
