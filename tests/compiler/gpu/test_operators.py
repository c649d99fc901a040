"""Operators that no pattern takes, odd shapes among them, and every router: whole programs in the interpreter."""
from __future__ import annotations

import pytest

from ingot.compiler.gpu.interpret import Interpreter
from ingot.compiler.ir.graph import Graph
from ingot.compiler.ir.types import DType
from ingot.compiler.precision import find_precision
from tests.compiler.graphs import Builder
from tests.compiler.passes.test_raise_moe import (
    CHOICES,
    EXPERTS,
    RAISED,
    Route,
    grouped,
    limited_by_a_threshold,
    of_the_chosen,
)

from .programs import exact, final, gpu, program
from .test_generate import errors

pytestmark = pytest.mark.usefixtures("uncompiled")

VOCAB, WIDTH = 64, 24


def begun(width: int = WIDTH) -> tuple[Builder, str]:
    """A model's inputs, and the hidden states after one attention."""
    b = Builder()
    ids = b.x("token_ids", "T", dtype=DType.I32)
    b.x("positions", "T", dtype=DType.I32)
    x = b.op("embedding", b.weight("embed", VOCAB, width), ids)
    q, k, v = (b.op("reshape", b.op("linear", x, b.weight(name, 32, width)), shape=("T", 2, 16)) for name in "qkv")
    y = b.op("attention", q, k, v, slot=0, scale=0.25)
    return b, b.op("add", x, b.op("linear", b.op("reshape", y, shape=("T", 32)), b.weight("o", width, 32)))


def ended(b: Builder, x: str) -> Graph:
    return b.made(b.op("linear", x, b.weight("head", VOCAB, int(b.types[x].shape[-1]))))


def selection(b: Builder, x: str) -> str:
    """Everything along the last dimension, of values and of what it chooses."""
    share = b.op("softmax", x, dim=1)
    best, at = b.add("topk", [x], k=5, dim=1, largest=True)
    low, _ = b.add("topk", [x], k=3, dim=1, largest=False)
    ordered, places = b.add("sort", [x], dim=1, descending=True)
    sums = b.op("cumsum", b.op("mul", x, 0.1), dim=1)
    counts = b.op("cumsum", b.op("cast", b.op("gt", x, 0.0), dtype=DType.I32), dim=1)
    first = b.op("argmax", x, dim=1, keepdim=True)
    kept = b.op("scatter", b.op("mul", x, 0.0), at, best, dim=1)
    marked = b.op("scatter", share, first, 2.0, dim=1)
    back = b.op("gather", ordered, places, dim=1)
    parts = [share, best, low, sums, b.op("cast", counts, dtype=DType.F32), kept, marked, back]
    return b.op("cat", *parts, dim=1)


def across(b: Builder, x: str) -> str:
    """Along another dimension than the last, and in rows of tokens and heads."""
    heads = b.op("reshape", x, shape=("T", 4, 6))
    share = b.op("softmax", heads, dim=1)
    best, _ = b.add("topk", [heads], k=2, dim=1, largest=True)
    parts = [b.op("reshape", value, shape=("T", width)) for value, width in ((share, 24), (best, 12))]
    return b.op("cat", *parts, dim=1)


def products(b: Builder, x: str) -> str:
    """Of activations: a matrix a token, broadcast over heads, and tokens as rows."""
    heads = b.op("reshape", x, shape=("T", 4, 6))
    pairs = b.op("matmul", heads, b.op("permute", heads, dims=(0, 2, 1)))
    mixed = b.op("matmul", pairs, heads)
    table = b.op("tanh", b.weight("table", 2, WIDTH, 8))
    rows = b.op("matmul", b.op("reshape", x, shape=(1, "T", WIDTH)), table)
    rows = b.op("reshape", b.op("permute", rows, dims=(1, 0, 2)), shape=("T", 16))
    return b.op("cat", b.op("reshape", mixed, shape=("T", 24)), rows, dim=1)


def narrow_matrices(b: Builder, x: str) -> str:
    """Of three and of six channels: no multiple of 16 bytes."""
    small = b.op("linear", x, b.weight("down", 3, WIDTH))
    wide = b.op("linear", b.op("tanh", small), b.weight("up", 6, 3), b.weight("up_bias", 6))
    return b.op("cat", b.op("linear", wide, b.weight("out", 8, 6)), x, dim=1)


def norms_of_heads(b: Builder, x: str) -> str:
    """Several rows a token, as a part of a wider row, and with what is added behind the norm."""
    heads = b.op("reshape", x, shape=("T", 3, 8))
    y = b.op("rms_norm", heads, b.weight("norm", 8), eps=1e-6)
    z = b.op("add", b.op("rms_norm", y, b.weight("after", 8), eps=1e-6), heads)
    part = b.op("layer_norm", b.slice(x, 1, 8, 24), b.weight("last", 16), b.weight("last_bias", 16), eps=1e-5)
    return b.op("cat", b.op("reshape", z, shape=("T", WIDTH)), part, dim=1)


@pytest.mark.parametrize("build", [selection, across, products, narrow_matrices, norms_of_heads],
                         ids=lambda build: build.__name__)
def test_what_no_pattern_takes(interpreter: Interpreter, build: object) -> None:
    assert callable(build)
    b, x = begun()
    y = build(b, x)
    width = int(b.types[y].shape[-1])
    graph = ended(b, b.op("linear", y, b.weight("back", 16, width)) if width % 4 else y)
    check(interpreter, graph)


def check(interpreter: Interpreter, graph: Graph, precision: str = "fp32", target: str = "h200") -> None:
    """All but the matrices of the precision is in float32."""
    chosen = exact(find_precision(precision, gpu(target)))
    made = program(graph, target, chosen)
    assert max(errors(graph, made, final(graph, chosen), interpreter)) < 1e-4


@pytest.mark.parametrize("route", [
    pytest.param(route, id=route.__name__, marks=[] if route in (of_the_chosen, grouped) else pytest.mark.slow)
    for route in (*(route for route, _ in RAISED), limited_by_a_threshold)])
def test_routers(interpreter: Interpreter, route: Route) -> None:
    check(interpreter, mixture(route, WIDTH, 16))


@pytest.mark.parametrize(("precision", "target"), [
    ("fp8", "h200"), ("nvfp4", "b200"), pytest.param("int8", "a100", marks=pytest.mark.slow),
    pytest.param("w4a8", "h200", marks=pytest.mark.slow), pytest.param("w4a8", "a100", marks=pytest.mark.slow)])
def test_quantized_experts(interpreter: Interpreter, precision: str, target: str) -> None:
    check(interpreter, mixture(of_the_chosen, 64, 32), precision, target)


def mixture(route: Route, width: int, inner: int) -> Graph:
    b, x = begun(width)
    weights, ids = route(b, b.op("linear", x, b.weight("router", EXPERTS, width)))
    y = b.op("expert_linear", x, ids, b.weight("gate_up", EXPERTS, 2 * inner, width),
             b.weight("up_bias", EXPERTS, 2 * inner))
    y = b.op("mul", b.op("silu", b.slice(y, 2, 0, inner)), b.slice(y, 2, inner, 2 * inner))
    y = b.op("expert_linear", y, ids, b.weight("down", EXPERTS, width, inner))
    y = b.op("mul", y, b.op("reshape", weights, shape=("T", CHOICES, 1)))
    return ended(b, b.op("add", x, b.op("reduce_sum", y, dims=(1,), keepdim=False)))


def test_experts_of_odd_width(interpreter: Interpreter) -> None:
    """Their matrices are looked up by the loop that multiplies with them."""
    b, x = begun()
    weights, ids = b.add("topk", [b.op("softmax", b.op("linear", x, b.weight("router", 5, WIDTH)), dim=1)], k=2, dim=1,
                         largest=True)
    y = b.op("expert_linear", x, ids, b.weight("up", 5, 7, WIDTH))
    y = b.op("expert_linear", b.op("tanh", y), ids, b.weight("down", 5, WIDTH, 7), b.weight("down_bias", 5, WIDTH))
    y = b.op("mul", y, b.op("reshape", weights, shape=("T", 2, 1)))
    check(interpreter, ended(b, b.op("reduce_sum", y, dims=(1,), keepdim=False)))
