from __future__ import annotations

from dataclasses import replace

import pytest

from ingot.compiler.ir.graph import Graph
from ingot.compiler.ir.types import DType
from ingot.compiler.passes.assign_precision import assign_precision
from ingot.compiler.passes.matrices import find_matrices
from ingot.compiler.precision import PRECISIONS, Precision, Rule, with_layers
from ingot.runtime.errors import RequestError
from tests.compiler.graphs import Builder

PRECISION = Precision("mixed", (Rule("router", "fp32"), Rule("head", "int8"), Rule("experts", "w4a8"),
                                Rule("embedding", "bf16"), Rule("*", "w4a8")), "bf16", "")


def schemes(b: Builder, *outputs: str) -> dict[str, str]:
    """Weight -> scheme."""
    graph = assign_precision(b.made(*outputs), PRECISION)
    return {value: node.attrs["scheme"] for node in graph.nodes if "scheme" in node.attrs for value in node.values
            if value in graph.constants and len(graph.types[value].shape) > 1}


def test_each_role_has_its_scheme() -> None:
    b = Builder()
    x = b.op("embedding", b.weight("embed", 32, 8), b.x("ids", "T", dtype=DType.I32))
    h = b.op("linear", x, b.weight("layer", 8, 8))
    scores = b.op("softmax", b.op("linear", h, b.weight("router", 4, 8)), dim=1)
    _, chosen = b.add("topk", [b.op("add", scores, b.weight("bias", 4))], k=2, dim=1, largest=True)
    y = b.op("reduce_sum", b.op("expert_linear", h, chosen, b.weight("experts", 4, 8, 8)), dims=(1,), keepdim=False)
    rows = b.op("gather_rows", y, b.x("logit_rows", "L", dtype=DType.I32), dim=0)
    logits = b.op("linear", rows, b.weight("head", 32, 8))
    assert schemes(b, logits) == {"embed": "bf16", "layer": "w4a8", "router": "fp32", "experts": "w4a8",
                                  "head": "int8"}


def test_tied_embedding_takes_the_heads_scheme() -> None:
    b = Builder()
    table = b.weight("table", 32, 8)
    x = b.op("embedding", table, b.x("ids", "T", dtype=DType.I32))
    other = b.op("embedding", b.weight("other", 32, 8), "ids")
    rows = b.op("gather_rows", b.op("add", x, other), b.x("logit_rows", "L", dtype=DType.I32), dim=0)
    assert schemes(b, b.op("linear", rows, table)) == {"table": "int8", "other": "bf16"}


def test_what_is_above_a_routers_input_is_no_router() -> None:
    b = Builder()
    h = b.op("linear", b.x("x", "T", 8), b.weight("layer", 8, 8))
    values, _ = b.add("topk", [b.op("linear", b.op("rms_norm", h, eps=1e-6), b.weight("router", 4, 8))], k=1, dim=1,
                      largest=True)
    assert schemes(b, values) == {"layer": "w4a8", "router": "fp32"}


def test_a_matrix_that_is_computed_has_no_scheme() -> None:
    b = Builder()
    graph = assign_precision(b.made(b.op("linear", b.x("x", "T", 8), b.x("w", 4, 8))), PRECISION)
    assert graph.nodes[0].attrs == {}


def two_layers() -> Graph:
    """model.0.up and model.0.down, model.1.gate (a router), a head that is the embedding's table."""
    b = Builder()
    table = b.weight("model.embed.weight", 32, 8)
    x = b.op("embedding", table, b.x("ids", "T", dtype=DType.I32))
    h = b.op("linear", b.op("linear", x, b.weight("model.0.up.weight", 8, 8)), b.weight("model.0.down.weight", 8, 8))
    _, chosen = b.add("topk", [b.op("linear", h, b.weight("model.1.gate.weight", 4, 8))], k=2, dim=1, largest=True)
    experts = b.op("expert_linear", h, chosen, b.weight("model.1.experts.up_proj", 4, 8, 8))
    y = b.op("reduce_sum", experts, dims=(1,), keepdim=False)
    logits = b.op("linear", b.op("gather_rows", y, b.x("logit_rows", "L", dtype=DType.I32), dim=0), table)
    return b.made(logits)


def named(layers: dict[str, str]) -> dict[str, str]:
    """Constant -> scheme, of a w4a8 engine with these layers."""
    graph = assign_precision(two_layers(), with_layers(PRECISIONS["w4a8"], layers))
    return {value.removeprefix("model.").removesuffix(".weight"): node.attrs["scheme"] for node in graph.nodes
            if "scheme" in node.attrs for value in node.values if value in graph.constants}


def test_layers_by_name_and_pattern() -> None:
    plain = {"embed": "int8g32", "0.up": "w4a8", "0.down": "w4a8", "1.gate": "fp32", "1.experts.up_proj": "w4a8"}
    assert named({}) == plain
    assert named({"model.0.*": "bf16"}) == plain | {"0.up": "bf16", "0.down": "bf16"}
    assert named({"model.embed": "w4a8"})["embed"] == "w4a8"


@pytest.mark.parametrize("turn", [1, -1], ids=["in this order", "in the other"])
def test_the_most_exact_pattern_decides(turn: int) -> None:
    layers = {"*": "int8", "model.0.*": "bf16", "model.0.down": "fp32", "*.experts.*": "bf16"}
    found = named(dict(list(layers.items())[::turn]))
    assert found == {"embed": "int8g32", "0.up": "bf16", "0.down": "fp32", "1.gate": "fp32",
                     "1.experts.up_proj": "bf16"}


def test_a_router_is_meant_by_its_name_alone() -> None:
    assert named({"model.1.*": "int8"})["1.gate"] == "fp32"
    assert named({"model.1.gate": "int8"})["1.gate"] == "int8g32"


def test_unknown_layers_and_precisions_are_told() -> None:
    with pytest.raises(RequestError, match=r"no layer of the model matches 'model.0.dwn'. Near it: model.0.down"):
        named({"model.0.dwn": "bf16"})
    with pytest.raises(RequestError, match=r"unknown precision 'int7'; known: fp32, bf16, int8"):
        named({"*": "int7"})


def test_numbers_stay_as_the_checkpoint_holds_them() -> None:
    """Rows of 8 bits with one scale each are no groups of 32; in four bits they are rounded all the same."""
    stored = {"model.0.up.weight": "int8", "model.0.down.weight": "w4a8"}
    graph = assign_precision(two_layers(), PRECISIONS["int8"], stored)
    found = {value: node.attrs["scheme"] for node in graph.nodes if node.op == "linear" for value in node.values[1:]}
    assert found["model.0.up.weight"] == "int8" and found["model.0.down.weight"] == "int8g32"
    graph = assign_precision(two_layers(), PRECISIONS["w4a8"], stored)
    assert {node.attrs["scheme"] for node in graph.nodes if node.op == "linear"} == {"w4a8", "int8g32", "fp32"}


def test_matrices_have_the_names_of_modules_and_parameters() -> None:
    graph = two_layers()
    head = replace(graph.nodes[-1], origin="lm_head (modeling.py:1)")
    found = {m.name: (m.names, m.role) for m in find_matrices(graph.rebuilt([*graph.nodes[:-1], head]))}
    assert found["lm_head"] == (("lm_head", "model.embed"), "head")
    assert found["model.1.experts.up_proj"] == (("model.1.experts.up_proj",), "experts")
    assert found["model.1.gate"][1] == "router" and found["model.0.up"][1] == "linear"
