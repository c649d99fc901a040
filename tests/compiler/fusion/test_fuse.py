"""Which loops there are, and what stays a view."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ingot.compiler.errors import CannotCompile
from ingot.compiler.fusion.fuse import fuse_loops
from ingot.compiler.fusion.placement import MAX_EXPRESSION
from ingot.compiler.ir.graph import Graph, Node
from ingot.compiler.ir.interpret import run
from ingot.compiler.ir.types import DType, TensorType
from ingot.compiler.ir.verify import verify
from ingot.compiler.weights.expr import literal
from tests.compiler.graphs import Builder, Weights, compare, random_inputs


def fused(build: Callable[[Builder], list[str]], strided: tuple[str, ...] = (), probes: dict[str, str] | None = None,
          ) -> Graph:
    """`strided`: operators that take column ranges. The fused graph computes what the unfused one does."""
    builder = Builder()
    outputs = build(builder)
    builder.probes.update(probes or {})
    graph = verify(builder.graph(outputs))
    result = verify(fuse_loops(graph, lambda node, operand, type_: node.op in strided))
    inputs = random_inputs(graph, 3)
    compare(run(result, inputs, Weights()), run(graph, inputs, Weights()), 1e-6, "fused")
    return result


def made(graph: Graph, op: str) -> list[str]:
    return [node.output for node in graph.nodes if node.op == op]


def inputs_of(graph: Graph, op: str) -> list[tuple[object, ...]]:
    return [node.inputs for node in graph.nodes if node.op == op]


def softmax(b: Builder, x: str) -> str:
    return b.op("softmax", x, dim=len(b.types[x].shape) - 1)


def rms_norm(b: Builder, x: str) -> str:
    return b.op("rms_norm", x, eps=1e-6)


def test_a_chain_between_structured_operators_is_one_loop() -> None:
    def build(b: Builder) -> list[str]:
        y = softmax(b, b.x("x", "T", 8))
        return [softmax(b, b.op("mul", b.op("silu", b.slice(y, 1, 0, 4)), b.slice(y, 1, 4, 8)))]

    graph = fused(build)
    assert [node.op for node in graph.nodes] == ["softmax", "loop", "softmax"]


def test_reshapes_of_what_is_in_memory_are_free() -> None:
    def build(b: Builder) -> list[str]:
        y = softmax(b, b.x("x", "T", 8))
        return [b.op("reshape", softmax(b, b.op("reshape", y, shape=("T", 2, 4))), shape=("T", 8))]

    assert [node.op for node in fused(build).nodes] == ["softmax", "reshape", "softmax", "reshape"]


def slices_of_one(b: Builder) -> list[str]:
    y = softmax(b, b.x("x", "T", 12))
    first, second = b.slice(y, 1, 0, 4), b.op("reshape", b.slice(y, 1, 4, 12), shape=("T", 2, 4))
    return [rms_norm(b, first), rms_norm(b, second)]


def test_column_ranges_stay_views_for_readers_that_take_them() -> None:
    graph = fused(slices_of_one, ("rms_norm",))
    assert made(graph, "loop") == [] and len(made(graph, "slice")) == 2


def test_column_ranges_are_copied_for_readers_that_do_not() -> None:
    graph = fused(slices_of_one)
    assert len(made(graph, "loop")) == 2 and made(graph, "slice") == []


@pytest.mark.parametrize("strided_first", [True, False])
def test_a_slice_with_both_kinds_of_readers_is_copied_for_both(strided_first: bool) -> None:
    """A strided view in the memory of the whole must not be what the other reader gets."""
    def build(b: Builder) -> list[str]:
        part = b.slice(softmax(b, b.x("x", "T", 12)), 1, 4, 12)
        readers = [rms_norm, softmax] if strided_first else [softmax, rms_norm]
        return [reader(b, part) for reader in readers]

    graph = fused(build, ("rms_norm",))
    copy, = made(graph, "loop")
    assert made(graph, "slice") == []
    assert inputs_of(graph, "rms_norm") == [(copy,)] and inputs_of(graph, "softmax")[1] == (copy,)


@pytest.mark.parametrize(("start", "width", "kept"), [(8, 24, True), (4, 24, False), (8, 20, False)])
def test_ranges_that_begin_between_multiples_are_copied(start: int, width: int, kept: bool) -> None:
    builder = Builder()
    part = builder.slice(softmax(builder, builder.x("x", "T", width)), 1, start, width)
    graph = builder.graph([rms_norm(builder, part)])
    result = verify(fuse_loops(graph, lambda node, operand, type_: node.op == "rms_norm", multiple=8))
    assert bool(made(result, "slice")) == kept and bool(made(result, "loop")) != kept


def test_a_loop_reads_a_slice_through_its_index() -> None:
    def build(b: Builder) -> list[str]:
        part = b.slice(softmax(b, b.x("x", "T", 12)), 1, 4, 12)
        return [rms_norm(b, part), b.op("neg", part)]

    graph = fused(build, ("rms_norm",))
    loop, = (node for node in graph.nodes if node.op == "loop")
    assert str(loop.attrs["expr"]) == "neg(in0[i0, (i1 + 4)])"


def test_a_slice_of_a_computed_value_is_all_that_is_computed() -> None:
    def build(b: Builder) -> list[str]:
        return [rms_norm(b, b.slice(b.op("neg", b.x("x", "T", 12)), 1, 4, 12))]

    graph = fused(build, ("rms_norm",))
    assert [(node.op, node.attrs.get("shape")) for node in graph.nodes] == [("loop", ("T", 8)), ("rms_norm", None)]


def test_slices_of_a_value_that_is_computed_for_several_stay_views() -> None:
    def build(b: Builder) -> list[str]:
        y = b.op("minimum", b.x("x", "T", 12), 0.5)
        return [rms_norm(b, b.slice(y, 1, 0, 4)), rms_norm(b, b.slice(y, 1, 4, 12))]

    graph = fused(build, ("rms_norm",))
    assert len(made(graph, "loop")) == 1 and len(made(graph, "slice")) == 2


@pytest.mark.parametrize(("name", "view"), [
    ("a step", lambda b, y: b.slice(y, 1, 0, 12, 2)),
    ("the head dimension of several heads", lambda b, y: b.slice(b.op("reshape", y, shape=("T", 3, 4)), 2, 0, 2)),
    ("rows that a reshape takes apart", lambda b, y: b.op("reshape", b.slice(y, 1, 0, 8), shape=("2*T", 4)))])
def test_what_is_no_column_range_is_copied(name: str, view: Callable[[Builder, str], str]) -> None:
    graph = fused(lambda b: [rms_norm(b, view(b, softmax(b, b.x("x", "T", 12))))], ("rms_norm",))
    assert len(made(graph, "loop")) == 1, name


def test_what_one_loop_needs_twice_is_computed_there() -> None:
    def build(b: Builder) -> list[str]:
        y = b.op("exp", b.x("x", "T", 8))
        return [b.op("div", y, b.op("add", y, 1.0))]

    assert len(made(fused(build), "loop")) == 1


def test_what_two_loops_need_is_computed_once_if_it_is_dear() -> None:
    def build(b: Builder) -> list[str]:
        y = b.op("exp", b.x("x", "T", 8))
        return [softmax(b, b.op("add", y, 1.0)), softmax(b, b.op("mul", y, 2.0))]

    graph = fused(build)
    assert [str(node.attrs["expr"]) for node in graph.nodes if node.op == "loop"] == [
        "exp(in0[i0, i1])", "add(in0[i0, i1], 1.0)", "mul(in0[i0, i1], 2.0)"]


def test_what_two_loops_need_is_computed_twice_if_it_is_cheap() -> None:
    def build(b: Builder) -> list[str]:
        y = b.op("add", b.x("x", "T", 8), 1.0)
        return [softmax(b, b.op("neg", y)), softmax(b, b.op("mul", y, 2.0))]

    assert len(made(fused(build), "loop")) == 2


def test_halves_that_two_loops_need_are_computed_in_them() -> None:
    """Each element is needed once."""
    def build(b: Builder) -> list[str]:
        y = b.op("exp", b.x("x", "T", 8))
        return [softmax(b, b.slice(y, 1, 0, 4)), softmax(b, b.slice(y, 1, 4, 8))]

    assert len(made(fused(build), "loop")) == 2


def test_dear_values_that_all_heads_share_are_computed_once() -> None:
    def build(b: Builder) -> list[str]:
        angle = b.op("reshape", b.op("cos", b.x("angle", "T", 4)), shape=("T", 1, 4))
        return [b.op("mul", b.x("x", "T", 8, 4), angle)]

    assert len(made(fused(build), "loop")) == 2


def test_dear_values_of_a_row_are_computed_with_it() -> None:
    """The compiler moves them out of the loop over columns."""
    def build(b: Builder) -> list[str]:
        return [b.op("mul", b.x("x", "T", 64), b.op("rsqrt", b.x("scale", "T", 1)))]

    assert len(made(fused(build), "loop")) == 1


def test_long_chains_are_cut() -> None:
    def build(b: Builder) -> list[str]:
        x = b.x("x", "T", 4)
        for _ in range(MAX_EXPRESSION):
            x = b.op("mul", b.op("add", x, 0.5), 0.25)
        return [x]

    assert len(made(fused(build), "loop")) == 2


def test_many_readers_in_one_expression_do_not_explode() -> None:
    """x = x·x + x, twelve times: 2^12 loads if nothing were cut."""
    def build(b: Builder) -> list[str]:
        x = b.op("mul", b.x("x", "T", 4), 0.1)
        for _ in range(12):
            x = b.op("add", b.op("mul", x, x), x)
        return [x]

    graph = fused(build)
    assert max(len(node.attrs["expr"].walk()) for node in graph.nodes) < 10 * MAX_EXPRESSION


def test_constants_of_one_number_are_part_of_the_code() -> None:
    def build(b: Builder) -> list[str]:
        scale = b.constant(literal(np.array([[0.125]], np.float32)), "scale")
        table = b.constant(literal(np.array([1, 2, 3], np.float32)), "table")
        return [b.op("add", b.op("mul", b.x("x", "T", 3), scale), table)]

    graph = fused(build)
    loop, = graph.nodes
    assert str(loop.attrs["expr"]) == "add(mul(in0[i0, i1], 0.125), in1[i1])"
    assert list(graph.constants) == ["table"]


def test_probes_are_in_memory_and_move_below_reshapes() -> None:
    builder = Builder()
    y = builder.op("add", builder.x("x", "T", 8), 1.0)
    probed = builder.op("reshape", y, shape=("T", 2, 4))
    builder.probes["layer.0"] = probed
    out = builder.op("neg", probed)
    graph = verify(fuse_loops(builder.graph([out])))
    assert graph.probes == {"layer.0": y} and made(graph, "loop") == [y, out]


def test_an_output_that_is_a_slice_is_computed() -> None:
    graph = fused(lambda b: [b.slice(softmax(b, b.x("x", "T", 8)), 1, 2, 5)], ("rms_norm",))
    assert [node.op for node in graph.nodes] == ["softmax", "loop"]


def four(b: Builder) -> str:
    return b.op("full", shape=(2,), value=4, dtype=DType.I32)


@pytest.mark.parametrize(("build", "message"), [
    (lambda b: b.op("reduce_sum", b.x("x", "T", 3), dims=(0,), keepdim=False), "reduce_sum: a reduction over T"),
    (lambda b: b.op("cat", b.x("x", "T", 3), b.x("y", "T", 3), dim=0), "cat: a concatenation along T"),
    (lambda b: b.op("slice", b.x("x", "2*T", 3), dim=0, start="T", stop="2*T", step=1), "slice: a slice from T"),
    (lambda b: b.op("take", b.op("reshape", b.x("x", 4, "T"), shape=("4*T",)), four(b), dim=0),
     "reshape: a reshape that takes T")])
def test_refusals_name_operator_and_origin(build: Callable[[Builder], str], message: str) -> None:
    builder = Builder()
    builder.origin = "model.layers.3 (modeling_x.py:7)"
    value = build(builder)
    builder.origin = "elsewhere"
    with pytest.raises(CannotCompile) as caught:
        fuse_loops(builder.graph([builder.op("exp", value)]))
    assert message in str(caught.value) and "modeling_x.py:7" in str(caught.value)


def test_loops_name_the_origin_of_their_last_operator() -> None:
    builder = Builder()
    builder.origin = "model.layers.0.mlp"
    graph = fuse_loops(builder.graph([builder.op("neg", builder.x("x", "T"))]))
    assert graph.nodes == (Node("loop", ("x",), ("v0",), graph.nodes[0].attrs, "model.layers.0.mlp"),)
    assert graph.types["v0"] == TensorType(("T",), DType.F32)
