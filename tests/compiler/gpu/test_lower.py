"""Which launches a model becomes, for few and for many tokens."""
from __future__ import annotations

import pytest

from ingot.compiler.errors import CannotCompile
from ingot.compiler.gpu.lower import Request
from ingot.compiler.ir.types import DType
from tests.compiler.graphs import Builder
from tests.compiler.models import Layer, model

from .programs import lowered

LLAMA = [Layer(), Layer()]
GEMMA = [Layer(post_norm=True, qk_norm=True), Layer(post_norm=True, qk_norm=True)]
QUANTIZED = {"fp8": "h200", "int8": "a100", "w4a8": "a100"}


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize(("precision", "target"), [("bf16", "h200"), ("fp16", "a100"), ("fp32", "h200"),
                                                   ("int4", "l40s"), *QUANTIZED.items()])
def test_five_launches_a_layer_for_few_tokens(precision: str, target: str, tokens: int) -> None:
    """norm + qkv; rope, write and attention; output + residual; norm + gate and up; down + residual."""
    low = lowered(model(LLAMA), tokens, target, precision)
    per_layer = ["linear", "attention", "linear", "linear", "linear"]
    tables = ["loop", "loop"]
    names = [request.op for request in low.requests]
    assert names == ["embedding", "linear", *tables, *per_layer[1:], *per_layer, "loop", "linear", "sample"]


def test_launches_for_many_tokens() -> None:
    """The first norm is made with the embedding."""
    names = [request.op for request in lowered(model(LLAMA), 16, "h200", "bf16").requests]
    layer = ["rms_norm", "linear", "rope_kv_write", "attention", "linear", "rms_norm", "linear", "linear"]
    assert names == ["embedding", layer[1], "loop", "loop", *layer[2:], *layer, "loop", "rms_norm", "linear", "sample"]


@pytest.mark.parametrize(("precision", "target"), list(QUANTIZED.items()))
def test_what_is_quantized_apart_for_many_tokens(precision: str, target: str) -> None:
    """Norms and attention quantize what they write; only the gate's result takes a launch of its own."""
    low = lowered(model(LLAMA), 16, target, precision)
    names = [request.op for request in low.requests]
    layer = ["rms_norm", "linear", "rope_kv_write", "attention", "linear", "rms_norm", "linear", "quantize", "linear"]
    assert len(layer) <= 9
    assert names == ["embedding", layer[1], "loop", "loop", *layer[2:], *layer, "loop", "rms_norm", "linear", "sample"]


def test_norms_behind_blocks() -> None:
    """For few tokens the next matrix takes in the norm behind the block, the residual and its own norm."""
    few = [request.op for request in lowered(model(GEMMA), 4, "h200", "bf16").requests]
    layer = ["linear", "attention", "linear", "linear", "linear"]
    assert few == ["embedding", "linear", "loop", "loop", *layer[1:], *layer, "norm_add", "loop", "linear", "sample"]
    many = [request.op for request in lowered(model(GEMMA), 16, "h200", "fp8").requests]
    assert many.count("norm_add_norm") == 3 and many.count("norm_add") == 1


EXPERTS = [Layer(experts=True), Layer(experts=True)]


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize(("precision", "target"), [("bf16", "h200"), ("fp16", "a100"), ("fp32", "h200"),
                                                   ("int4", "l40s"), *QUANTIZED.items()])
def test_six_launches_a_layer_of_experts_for_few_tokens(precision: str, target: str, tokens: int) -> None:
    """norm + qkv; rope, write and attention; output + residual; norm, router and choice; norm + gate and up; down, sum
    over choices and residual."""
    names = [request.op for request in lowered(model(EXPERTS), tokens, target, precision).requests]
    layer = ["linear", "attention", "linear", "route", "expert_linear", "expert_linear"]
    assert names == ["embedding", layer[0], "loop", "loop", *layer[1:], *layer, "loop", "linear", "sample"]


@pytest.mark.parametrize(("precision", "target"), [("bf16", "h200"), *QUANTIZED.items()])
def test_launches_of_experts_for_many_tokens(precision: str, target: str) -> None:
    """The router takes in its norm, the sum over choices the norm behind it; both quantize what they write."""
    names = [request.op for request in lowered(model(EXPERTS), 16, target, precision).requests]
    quantize = ["quantize"] if precision != "bf16" else []
    layer = ["linear", "rope_kv_write", "attention", "linear", "route", "expert_linear", *quantize, "expert_linear",
             "combine"]
    assert len(layer) <= 9
    assert names == ["embedding", layer[0], "loop", "loop", *layer[1:], *layer, "loop", "rms_norm", "linear", "sample"]


def test_launches_of_experts_beside_shared_ones() -> None:
    """Of another width: the shared ones' matrix adds the residual, the sum over choices adds that."""
    graph = model([Layer(experts=True, shared=32)] * 2)
    few = [request.op for request in lowered(graph, 8, "h200", "bf16").requests]
    layer = ["linear", "attention", "linear", "route", "expert_linear", "linear", "linear", "expert_linear"]
    assert few == ["embedding", layer[0], "loop", "loop", *layer[1:], *layer, "loop", "linear", "sample"]
    many = [request.op for request in lowered(graph, 16, "h200", "bf16").requests]
    layer = ["linear", "rope_kv_write", "attention", "linear", "route", "expert_linear", "expert_linear", "linear",
             "linear", "combine"]
    assert many == ["embedding", layer[0], "loop", "loop", *layer[1:], *layer, "loop", "rms_norm", "linear", "sample"]


def test_attention_without_a_rotation_writes_the_cache() -> None:
    """For few tokens; a cache that two layers read is written apart."""
    graph = model([Layer(rope=False)])
    few = [request.op for request in lowered(graph, 8, "h200", "bf16").requests]
    assert few[:4] == ["embedding", "linear", "attention", "linear"]
    many = [request.op for request in lowered(graph, 16, "h200", "bf16").requests]
    assert many[:5] == ["embedding", "linear", "kv_write", "attention", "linear"]
    b = Builder()
    b.x("positions", "T", dtype=DType.I32)
    q, k, v = (b.x(name, "T", 2, 16) for name in "qkv")
    y = b.op("attention", b.op("attention", q, k, v, slot=0, scale=0.3), k, v, slot=1, scale=0.3)
    low = lowered(b.made(b.op("linear", b.op("reshape", y, shape=("T", 32)), b.weight("w", 32, 32))), 8, "h200", "bf16")
    assert [request.op for request in low.requests][:3] == ["kv_write", "attention", "attention"]


def test_a_choice_of_another_kind() -> None:
    """Weights that no router gives: the choice stays arithmetic, and rows are sorted by a launch of their own."""
    b = Builder()
    b.x("positions", "T", dtype=DType.I32)
    x = b.x("x", "T", 32)
    _, chosen = b.add("topk", [b.op("linear", x, b.weight("router", 4, 32))], k=2, dim=1, largest=True)
    y = b.op("expert_linear", x, chosen, b.weight("up", 4, 64, 32))
    low = lowered(b.made(b.op("reduce_sum", y, dims=(1,), keepdim=False)), 1, "h200", "bf16")
    assert [request.op for request in low.requests][:4] == ["linear", "topk", "sort_by_expert", "expert_linear"]


def test_a_norm_that_others_read_is_launched() -> None:
    b = Builder()
    b.x("positions", "T", dtype=DType.I32)
    y = b.op("rms_norm", b.x("x", "T", 32), b.weight("norm", 32), eps=1e-6)
    logits = b.op("add", b.op("linear", y, b.weight("head", 32, 32)), y)
    low = lowered(b.made(logits), 1, "h200", "bf16")
    assert [request.op for request in low.requests][:2] == ["rms_norm", "linear"]


def test_values_are_held_in_the_type_of_the_precision() -> None:
    asked = [one for one in lowered(model(LLAMA), 16, "h200", "fp8").requests if isinstance(one, Request)]
    stored = {request.op: {kind for _, _, kind in request.writes.values()} for request in asked}
    assert stored["linear"] == {"f32"}  # the last one makes the logits
    assert stored["embedding"] == stored["attention"] == {"bf16"}
    tables = [request for request in asked if request.op == "loop"][:2]
    assert all(kind == "f32" for request in tables for _, _, kind in request.writes.values()), "cos and sin"


def test_weights_that_the_embedding_shares_are_stored_once() -> None:
    low = lowered(model(LLAMA), 1, "h200", "fp8")
    schemes = [entry.packing.scheme for entry in low.weights.entries.values()]
    assert schemes.count("fp8") == 8 and schemes.count("bf16") == 2 and set(schemes) == {"", "fp8", "bf16"}


@pytest.mark.parametrize(("precision", "kv", "target", "message"), [
    ("bf16", "fp32", "h200", "attention in bf16 over a KV cache in fp32"),
    ("bf16", "fp8", "a100", "fp8 needs sm_89 or newer, this is sm_80")])
def test_refusals_of_caches(precision: str, kv: str, target: str, message: str) -> None:
    with pytest.raises(CannotCompile, match=message):
        lowered(model(LLAMA), 16, target, precision, kv)


def test_a_scheme_that_takes_other_inputs_than_there_are() -> None:
    """Such as int4 × bf16 for a layer of an fp32 engine."""
    b = Builder()
    y = b.op("linear", b.x("x", "T", 32), b.weight("w", 32, 32))
    y = b.op("linear", y, b.weight("head", 32, 32))
    with pytest.raises(CannotCompile, match="linear in int4 takes its inputs in bf16; values of this engine are held"):
        lowered(b.made(y), 16, "h200", "fp32", scheme="int4")


def test_what_no_kernel_computes_is_named() -> None:
    b = Builder()
    x = b.x("x", "T", 32)
    heads = [b.op("reshape", b.op("linear", x, b.weight(part, 576, 32)), shape=("T", 1, 576)) for part in "qkv"]
    y = b.op("reshape", b.op("attention", *heads, slot=0, scale=1.0), shape=("T", 576))
    logits = b.op("linear", y, b.weight("head", 32, 576))
    with pytest.raises(CannotCompile, match=r"attention has no kernel on sm_90a: .*heads of 576 and 576 elements"):
        lowered(b.made(logits), 16, "h200", "bf16")
