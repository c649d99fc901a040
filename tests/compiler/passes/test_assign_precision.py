from __future__ import annotations

from ingot.compiler.ir.types import DType
from ingot.compiler.passes.assign_precision import assign_precision
from ingot.compiler.precision import Precision, Rule
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
