"""Each operator of a final graph, lowered, compiled and run, against its reference."""
from __future__ import annotations

import pytest

from ingot.compiler.cpu.emitters import EMITTERS
from ingot.compiler.errors import CannotCompile
from ingot.compiler.ir.types import DType
from tests.compiler.cpu.bucket_runner import Lowered
from tests.compiler.graphs import Builder
from tests.plugins.native import HOST_ISAS, Library

I32 = DType.I32


def row(b: Builder, width: int, name: str = "row") -> str:
    """Values [T, width] in the arena."""
    return b.op("rms_norm", b.x(name, "T", width), b.weight(f"{name}.weight", width), eps=1e-6)


def heads(b: Builder, name: str, count: int, width: int = 8) -> str:
    return b.op("reshape", row(b, count * width, name), shape=("T", count, width))


def selections(b: Builder) -> list[str]:
    x, i = heads(b, "x", 3), b.op("mul", b.x("i", "T", 6, dtype=I32), 2)
    return [*b.add("topk", [x], k=3, dim=2, largest=True), *b.add("topk", [i], k=2, dim=1, largest=False),
            *b.add("sort", [x], dim=2, descending=True), *b.add("sort", [i], dim=1, descending=False),
            b.op("argmax", x, dim=2, keepdim=True), b.op("argmax", i, dim=1, keepdim=True),
            b.op("softmax", x, dim=2), b.op("cumsum", x, dim=2), b.op("cumsum", i, dim=1)]


def in_place(b: Builder) -> list[str]:
    return [b.op("softmax", row(b, 8, "a"), dim=1), b.op("cumsum", row(b, 8, "c"), dim=1)]


def scatters(b: Builder) -> list[str]:
    _, index = b.add("topk", [row(b, 6)], k=2, dim=1, largest=True)
    one = b.op("full", shape=(), value=1.0, dtype=DType.F32)
    return [b.op("scatter", b.op("full", shape=("T", 6), value=0.0, dtype=DType.F32), index, one, dim=1),
            b.op("scatter", row(b, 6, "x"), index, row(b, 4, "y"), dim=1)]


def products(b: Builder) -> list[str]:
    x, y = heads(b, "x", 3), b.op("reshape", row(b, 24, "y"), shape=("T", 8, 3))
    return [b.op("matmul", x, y), b.op("matmul", x, b.weight("w", 8, 5))]


def linears(b: Builder) -> list[str]:
    x = row(b, 40)
    return [b.op("linear", x, b.weight("a", 24, 40), scheme="fp32"),
            b.op("linear", x, b.weight("b", 24, 40), b.weight("bias", 24), scheme="bf16"),
            b.op("linear", b.slice(x, 1, 4, 36), b.weight("c", 24, 32), scheme="fp32"),
            b.op("linear", b.op("reshape", x, shape=("T", 5, 8)), b.weight("d", 6, 8), scheme="fp32"),
            b.op("linear", b.op("reshape", x, shape=("T", 4, 10)), b.weight("e", 6, 10), scheme="bf16")]


def quantized_linears(b: Builder) -> list[str]:
    x = row(b, 96)
    part = b.slice(x, 1, 32, 96)
    several = b.op("reshape", x, shape=("T", 3, 32))
    q = b.op("quantize", part, scheme="w4a8")
    return [b.op("linear", q, b.weight("a", 24, 64), scheme="w4a8"),
            b.op("linear", q, b.weight("b", 8, 64), b.weight("bias", 8), scheme="w4a8"),
            b.op("linear", b.op("quantize", several, scheme="int8"), b.weight("c", 24, 32), scheme="int8")]


def logits(b: Builder) -> str:
    rows = b.op("gather_rows", row(b, 32), b.x("logit_rows", "L", dtype=I32), dim=0)
    return b.op("linear", b.op("quantize", rows, scheme="int8"), b.weight("head", 40, 32), scheme="int8")


def experts(b: Builder) -> list[str]:
    _, ids = b.add("topk", [row(b, 4, "scores")], k=2, dim=1, largest=True)
    x = row(b, 32)
    up = b.op("expert_linear", x, ids, b.weight("up", 4, 48, 32), b.weight("bias", 4, 48), scheme="bf16")
    each = b.op("expert_linear", up, ids, b.weight("down", 4, 32, 48), scheme="fp32")
    q = b.op("quantize", x, scheme="w4a8")
    return [each, b.op("expert_linear", q, ids, b.weight("w", 4, 24, 32), scheme="w4a8")]


def embeddings(b: Builder) -> list[str]:
    ids = b.x("ids_below12", "T", dtype=I32)
    return [b.op("embedding", b.weight(scheme, 12, 32), b.op("reshape", ids, shape=(1, "T")), scheme=scheme)
            for scheme in ("fp32", "bf16", "int8", "w4a8")]


def norms(b: Builder) -> list[str]:
    x = row(b, 48)
    part, several = b.slice(x, 1, 8, 40), b.op("reshape", b.slice(x, 1, 16, 48), shape=("T", 4, 8))
    weight, bias = b.weight("w", 8), b.weight("bias", 8)
    return [b.op("rms_norm", part, eps=1e-5), b.op("layer_norm", part, eps=1e-5),
            b.op("rms_norm", several, weight, eps=1e-5), b.op("layer_norm", several, weight, bias, eps=1e-5)]


def sums(b: Builder) -> list[str]:
    x, r, weight, bias = row(b, 32, "x"), row(b, 32, "r"), b.weight("w", 32), b.weight("bias", 32)
    y, s = b.add("add_rms_norm", [x, r, weight], eps=1e-5)
    z, t = b.add("add_layer_norm", [y, s, weight, bias], eps=1e-5)
    return [*b.add("add_rms_norm", [z, t], eps=1e-6), y]


def tables(b: Builder, width: int) -> tuple[str, str]:
    angles = b.op("mul", b.op("reshape", b.op("cast", b.x("positions", "T", dtype=I32), dtype=DType.F32),
                              shape=("T", 1)), b.weight("frequencies", width))
    return b.op("cos", angles), b.op("sin", angles)


def ropes(b: Builder) -> list[str]:
    cos, sin = tables(b, 6)
    part = b.op("reshape", b.slice(row(b, 40, "merged"), 1, 8, 24), shape=("T", 2, 8))
    return [b.op("rope", heads(b, "q", 3), cos, sin), b.op("rope", part, cos, sin, interleaved=True)]


def attention_of_one_projection(b: Builder) -> str:
    cos, sin = tables(b, 8)
    qkv = row(b, 64, "qkv")
    q, k, v = (b.op("reshape", b.slice(qkv, 1, begin, end), shape=("T", (end - begin) // 8, 8))
               for begin, end in ((0, 32), (32, 48), (48, 64)))
    q, k, v = b.add("rope_kv_write", [q, k, v, cos, sin, b.weight("qn", 8), b.weight("kn", 8)], slot=0, dtype=DType.F32,
                    eps=1e-5)
    return b.op("attention", q, k, v, slot=0, scale=0.4)


def attention_with_everything(b: Builder) -> list[str]:
    q, k, v = heads(b, "q", 4), heads(b, "k", 2), heads(b, "v", 2, 6)
    first = b.add("kv_write", [k, v], slot=0, dtype=DType.F32)
    second = b.add("kv_write", [k, k], slot=1, dtype=DType.BF16)
    strided = b.op("reshape", b.slice(row(b, 40, "wide"), 1, 8, 40), shape=("T", 4, 8))
    return [b.op("attention", q, *first, b.weight("sinks", 4), slot=0, scale=0.4, window=3),
            b.op("attention", strided, *second, slot=1, scale=0.4, softcap=5.0),
            b.op("attention", q, *first, slot=0, scale=0.2, chunk=4)]


def attention_of_8_bits(b: Builder) -> list[str]:
    """Two layers whose keys, values and scales lie beside each other. Queries of few tokens are rounded too."""
    cos, sin = tables(b, 8)
    q, k, v = b.add("rope_kv_write", [heads(b, "q", 4), heads(b, "k", 2), heads(b, "v", 2), cos, sin], slot=0,
                    dtype=DType.I8)
    cached = b.add("kv_write", [heads(b, "key", 3), heads(b, "value", 3, 6)], slot=1, dtype=DType.I8)
    return [b.op("attention", q, k, v, slot=0, scale=0.4),
            b.op("attention", heads(b, "query", 3), *cached, slot=1, scale=0.3, window=5)]


def views_of_constants(b: Builder) -> list[str]:
    table = b.weight("table", 4, 8)
    scaled = b.op("softmax", b.op("mul", row(b, 8), 2.0), dim=1)
    return [b.op("mul", b.x("x", "T", 2, 8), b.slice(table, 0, 1, 3)), scaled]


CASES = [(Lowered(build.__name__, build), tolerance) for build, tolerance in (
    (selections, 2e-6), (in_place, 2e-6), (scatters, 2e-6), (products, 2e-6), (linears, 5e-6),
    (quantized_linears, 1e-5), (logits, 1e-5), (experts, 1e-5), (embeddings, 1e-6), (norms, 5e-6), (sums, 5e-6),
    (ropes, 5e-6), (attention_of_one_projection, 5e-6), (attention_with_everything, 5e-6),
    (attention_of_8_bits, 5e-3),
    (views_of_constants, 2e-6))]


@pytest.fixture(scope="module", params=HOST_ISAS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    kernels = [kernel for case, _ in CASES for kernel in case.lower(request.param)]
    return Library(kernels, request.param, tmp_path_factory.mktemp("emitters"))


@pytest.mark.parametrize(("case", "tolerance"), CASES, ids=[case.name for case, _ in CASES])
def test_lowered_operators_are_their_references(case: Lowered, tolerance: float, library: Library) -> None:
    case.check(library, tolerance)


def test_every_emitter_is_tried() -> None:
    tried = {node.op for case, _ in CASES for node in case.graph.nodes}
    of_adapters = {"lora_shrink", "lora_expand"}  # with their slots, in tests/compiler/test_lora.py
    assert set(EMITTERS) - of_adapters <= tried


def test_what_no_kernel_takes_is_refused() -> None:
    two = Lowered("embedding", lambda b: b.op("embedding", b.weight("w", 8, 4), b.x("ids", "T", 2, dtype=I32)))
    with pytest.raises(CannotCompile, match="one id a token"):
        two.lower("x86-64-v3")
    index = Lowered("scatter", lambda b: b.op("scatter", heads(b, "x", 3), b.op(
        "argmax", heads(b, "y", 1), dim=2, keepdim=True), heads(b, "z", 3), dim=2))
    with pytest.raises(CannotCompile, match="the same rows"):
        index.lower("x86-64-v3")
