from __future__ import annotations

from dataclasses import replace

import pytest

from ingot.compiler.ir.graph import Graph
from ingot.compiler.ir.types import DType
from ingot.compiler.passes.split_input_scales import split_input_scales
from ingot.compiler.weights.expr import dequantize, reshape, scale_columns, tensor
from tests.compiler.graphs import Builder, expect_same_meaning, ops


def scaled(scheme: str, bits: int, *names: str) -> Graph:
    """linear layers of one input whose weights hold the scales of their inputs; equal ones."""
    b = Builder()
    x = b.x("x", "T", 32)
    outputs = [b.op("linear", x, b.weight(name, 4, 32), scheme=scheme) for name in names]
    b.weight("s", 32)
    graph = b.made(*outputs)
    scales = reshape(tensor("s", (32,)), (1, 32))
    constants = {name: scale_columns(graph.constants[name], scales, bits) for name in names}
    return replace(graph, constants={**graph.constants, **constants})


@pytest.mark.parametrize(("scheme", "bits"), [("w4a8", 4), ("int8", 8)])
def test_a_weight_that_the_scheme_holds_keeps_its_grid(scheme: str, bits: int) -> None:
    """The inputs are multiplied once for all layers whose scales are the same tensor."""
    graph = scaled(scheme, bits, "a", "b")
    split = split_input_scales(graph)
    assert ops(split) == ["mul", "linear", "linear"]
    assert [split.constants[node.values[1]] for node in split.nodes[1:]] == [tensor("a", (4, 32)), tensor("b", (4, 32))]
    assert split.constants[split.nodes[0].values[1]] == tensor("s", (32,))


@pytest.mark.parametrize(("scheme", "bits"), [("fp32", 4), ("bf16", 8), ("w4a8", 8), ("int8", 4), ("w4a8", 0)])
def test_elsewhere_the_scales_stay_in_the_weight(scheme: str, bits: int) -> None:
    graph = scaled(scheme, bits, "a")
    assert split_input_scales(graph) == graph


def test_the_meaning_stays() -> None:
    graph = scaled("int8", 8, "a", "b")
    plain = [replace(node, attrs={}) for node in graph.nodes]
    split = split_input_scales(graph)
    expect_same_meaning(graph.rebuilt(plain), split.rebuilt([replace(n, attrs={}) for n in split.nodes]))


@pytest.mark.parametrize("also_read", [False, True])
def test_a_norm_takes_the_scales_in(also_read: bool) -> None:
    """Where nothing else reads what it makes."""
    b = Builder()
    x = b.op("rms_norm", b.x("x", "T", 32), b.weight("v", 32), eps=1e-6)
    outputs = [b.op("linear", x, b.weight(name, 4, 32), scheme="int8") for name in "ab"]
    b.weight("s", 32)
    graph = b.made(*outputs, *([b.op("neg", x)] if also_read else []))
    scales = reshape(tensor("s", (32,)), (1, 32))
    constants = {name: scale_columns(graph.constants[name], scales, 8) for name in "ab"}
    graph = replace(graph, constants={**graph.constants, **constants})
    split = split_input_scales(graph)
    assert ops(split) == (["rms_norm", "mul", "linear", "linear", "neg"] if also_read else
                          ["rms_norm", "linear", "linear"])
    expect_same_meaning(graph.rebuilt([replace(node, attrs={name: value for name, value in node.attrs.items()
                                                            if name != "scheme"}) for node in graph.nodes]),
                        split.rebuilt([replace(node, attrs={name: value for name, value in node.attrs.items()
                                                            if name != "scheme"}) for node in split.nodes]))


@pytest.mark.parametrize(("scheme", "kept"), [("int8_token", True), ("fp8", False), ("bf16", False)])
def test_gpus_multiply_inputs_of_what_they_hold(scheme: str, kept: bool) -> None:
    graph = scaled(scheme, 8, "a")
    codes = dequantize(tensor("a", (4, 32), DType.I32), tensor("z", (4, 1)), "int8", 1, 32)
    weight = scale_columns(codes, graph.constants["a"].inputs[1], 8)
    graph = replace(graph, constants={**graph.constants, "a": weight})
    assert ("mul" in ops(split_input_scales(graph))) == kept
