"""Scales of inputs: whatever is chosen, the model stays what it is, and a step does nothing more."""
from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest

from ingot.compiler.ir.graph import Graph
from ingot.compiler.ir.interpret import run
from ingot.compiler.ir.ops_lora import ADAPTERS, SLOTS
from ingot.compiler.passes.add_lora import LoraRequest, add_lora, lora_room
from ingot.compiler.passes.merge_linears import merge_linears
from ingot.compiler.passes.merge_lora import merge_lora
from ingot.compiler.passes.pipeline import gpu_pipeline, run_passes
from ingot.compiler.passes.smooth_inputs import smooth_inputs
from ingot.compiler.precision import GPU_PRECISIONS
from ingot.compiler.weights.expr import WeightExpr, input_scales
from tests.compiler.adapters import RandomAdapter
from tests.compiler.graphs import Builder, Weights, compare, random_inputs
from tests.compiler.models import Layer, model, random_model


class RandomScales(Weights):
    """Powers of two, different for each name."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.of = {part.attr("name"): part for expr in graph.constants.values() for part in input_scales(expr)}

    def input_scale(self, name: str) -> np.ndarray:
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        return np.exp2(rng.integers(-3, 4, self.of[name].shape)).astype(np.float32)


def before_scales(graph: Graph) -> Graph:
    passes = gpu_pipeline(GPU_PRECISIONS["int4"], "fp32")
    return run_passes(graph, passes[:[name for name, _ in passes].index("smooth_inputs")])


def unquantized(graph: Graph) -> Graph:
    """The same with all matrices in float32: rounding would hide what scales do."""
    return graph.rebuilt([node.with_attrs(scheme="fp32") if "scheme" in node.attrs else node for node in graph.nodes])


def scales(graph: Graph) -> set[WeightExpr]:
    return {part for expr in graph.constants.values() for part in input_scales(expr)}


@pytest.mark.parametrize("seed", range(12))
def test_models_keep_their_meaning(seed: int) -> None:
    before = before_scales(random_model(seed))
    after = smooth_inputs(before)
    assert [node.op for node in after.nodes] == [node.op for node in before.nodes]
    inputs, source = random_inputs(before, 5), RandomScales(after)
    compare(run(unquantized(after), inputs, source), run(unquantized(before), inputs, source), 1e-5, f"seed {seed}")


def test_which_inputs_of_a_layer_get_scales() -> None:
    """q, k, v by the norm; o by the rows of v; gate and up by the norm; down by the rows of up; the head is bf16."""
    found = scales(smooth_inputs(before_scales(model([Layer()]))))
    assert {part.attr("name").split(".")[2] for part in found} == {"q", "o", "gate", "down"}
    assert {(part.attr("name").split(".")[2], part.shape) for part in found if part.attr("head")} == {("o", (16,))}


def test_what_something_else_reads_is_left_alone() -> None:
    """The norm's result goes to a sum as well; the weight is used twice."""
    b = Builder()
    x = b.x("x", "T", 128)
    y = b.op("rms_norm", x, b.weight("norm", 128), eps=1e-6)
    out = b.op("linear", y, b.weight("w", 128, 128), scheme="int4")
    graph = b.made(b.op("add", out, y))
    assert not scales(smooth_inputs(graph))
    b = Builder()
    x = b.x("x", "T", 128)
    y, w = b.op("rms_norm", x, b.weight("norm", 128), eps=1e-6), b.weight("w", 128, 128)
    graph = b.made(b.op("linear", b.op("linear", y, w, scheme="int4"), w, scheme="int4"))
    assert not scales(smooth_inputs(graph))


def with_room(graph: Graph) -> Graph:
    """Room for adapters on every linear layer, each named after its weight."""
    named = [replace(node, origin=f"{node.values[1].removesuffix('.weight')} (test)") if node.op == "linear" else node
             for node in graph.nodes]
    return add_lora(graph.rebuilt(named), LoraRequest(4, 1))


@pytest.mark.parametrize("seed", range(12))
def test_adapters_get_inputs_as_they_were(seed: int) -> None:
    """Whatever is chosen, and wherever the scales went."""
    before = with_room(before_scales(random_model(seed)))
    after = smooth_inputs(before)
    room = lora_room(before)
    assert room is not None
    inputs = random_inputs(before, 5)
    inputs[ADAPTERS] = np.array([0, 0, -1, 0, -1], np.int32)
    inputs[SLOTS] = RandomAdapter(room, seed, 4, scale=1.0).image()[None]
    source = RandomScales(after)
    wanted = run(unquantized(before), inputs, source)
    compare(run(unquantized(after), inputs, source), wanted, 1e-4, f"seed {seed}")
    merged = merge_lora(merge_linears(after))
    compare(run(unquantized(merged), inputs, source), wanted, 1e-4, f"seed {seed}, merged")


def test_which_inputs_of_a_layer_with_room_get_scales() -> None:
    """Those that norms make: what v and up give is changed by adapters behind the matrix."""
    found = scales(smooth_inputs(with_room(before_scales(model([Layer()])))))
    assert {part.attr("name").split(".")[2] for part in found} == {"q", "gate"}


@pytest.mark.parametrize("scheme", ["fp8", "bf16", "fp32"])
def test_what_has_no_shared_scale_needs_none(scheme: str) -> None:
    b = Builder()
    y = b.op("rms_norm", b.x("x", "T", 128), b.weight("norm", 128), eps=1e-6)
    assert not scales(smooth_inputs(b.made(b.op("linear", y, b.weight("w", 128, 128), scheme=scheme))))
