"""Graphs of small language models as they are imported: random kinds of layers."""
from __future__ import annotations

import random
from dataclasses import dataclass

from ingot.compiler.ir.graph import Graph
from ingot.compiler.ir.types import DType
from tests.compiler.graphs import Builder

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, EXPERTS = 32, 4, 2, 8, 48, 64, 4


@dataclass(frozen=True)
class Layer:
    """pre_norm, post_norm: before and after each part; with neither the layer has none.
    parallel: attention and MLP read the same, and are added together. qk_norm: of each head, before the rotation.
    experts: the MLP is chosen by a router; shared: with one beside it, so many channels wide, that all tokens go
    through; weighed: by a weight of its own. late: the layer's input is read once more by a linear layer at its end.
    """

    pre_norm: bool = True
    post_norm: bool = False
    parallel: bool = False
    qk_norm: bool = False
    rope: bool = True
    experts: bool = False
    shared: int = 0
    weighed: bool = False
    late: bool = False


def model(layers: list[Layer]) -> Graph:
    b = Builder()
    ids = b.x("token_ids", "T", dtype=DType.I32)
    b.x("positions", "T", dtype=DType.I32)
    x = b.op("embedding", b.weight("embed", VOCAB, WIDTH), b.op("reshape", ids, shape=(1, "T")))
    for number, layer in enumerate(layers):
        x = _layer(b, x, layer, f"layers.{number}")
        b.probes[f"layers.{number}"] = x
    logits = b.op("linear", _norm(b, x, "norm"), b.weight("head", VOCAB, WIDTH))
    return b.made(b.op("reshape", logits, shape=("T", VOCAB)))


def random_model(seed: int) -> Graph:
    rng = random.Random(seed)
    fields = ("pre_norm", "post_norm", "parallel", "qk_norm", "rope", "experts", "late")
    return model([Layer(**{field: rng.random() < 0.5 for field in fields}) for _ in range(rng.randint(1, 4))])


def _norm(b: Builder, x: str, name: str) -> str:
    """Spelled out."""
    dim = len(b.types[x].shape) - 1
    mean = b.op("reduce_mean", b.op("pow", x, 2), dims=(dim,), keepdim=True)
    scaled = b.op("mul", x, b.op("rsqrt", b.op("add", mean, 1e-6)))
    return b.op("mul", b.weight(f"{name}.weight", int(b.types[x].shape[-1])), scaled)


def _rotated(b: Builder, x: str) -> str:
    angle = b.op("mul", b.op("reshape", b.op("cast", "positions", dtype=DType.F32), shape=(1, "T", 1, 1)),
                 b.op("exp", b.op("arange", start=0, step=-0.5, length=HEAD_DIM, dtype=DType.F32)))
    turned = b.op("cat", b.op("neg", b.slice(x, 3, HEAD_DIM // 2, HEAD_DIM)), b.slice(x, 3, 0, HEAD_DIM // 2), dim=3)
    return b.op("add", b.op("mul", x, b.op("cos", angle)), b.op("mul", turned, b.op("sin", angle)))


def _linear(b: Builder, x: str, name: str, width: int) -> str:
    return b.op("linear", x, b.weight(f"{name}.weight", width, int(b.types[x].shape[-1])))


def _layer(b: Builder, x: str, layer: Layer, name: str) -> str:
    start = x
    attended = _attention(b, _norm(b, x, f"{name}.norm") if layer.pre_norm else x, layer, name)
    if layer.post_norm:
        attended = _norm(b, attended, f"{name}.attention_norm")
    middle = x if layer.parallel else b.op("add", x, attended)
    y = _norm(b, middle, f"{name}.mlp_norm") if layer.pre_norm else middle
    inner, y = y, _experts(b, y, name) if layer.experts else _mlp(b, y, name)
    if layer.shared:
        beside = _mlp(b, inner, f"{name}.shared", layer.shared)
        if layer.weighed:
            beside = b.op("mul", b.op("sigmoid", _linear(b, inner, f"{name}.weight", 1)), beside)
        y = b.op("add", y, beside)
    if layer.post_norm:
        y = _norm(b, y, f"{name}.post_norm")
    x = b.op("add", b.op("add", middle, attended) if layer.parallel else middle, y)
    if layer.late:
        x = b.op("add", x, b.op("mul", _linear(b, start, f"{name}.late", WIDTH), 0.1))
    return x


def _attention(b: Builder, x: str, layer: Layer, name: str) -> str:
    parts = []
    for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        y = b.op("reshape", _linear(b, x, f"{name}.{part}", heads * HEAD_DIM), shape=(1, "T", heads, HEAD_DIM))
        if layer.qk_norm and part != "v":
            y = _norm(b, y, f"{name}.{part}_norm")
        if layer.rope and part != "v":
            y = _rotated(b, y)
        parts.append(b.op("reshape", y, shape=("T", heads, HEAD_DIM)))
    slot = sum(node.op == "attention" for node in b.producers.values())
    y = b.op("attention", *parts, slot=slot, scale=0.3)
    return _linear(b, b.op("reshape", y, shape=(1, "T", HEADS * HEAD_DIM)), f"{name}.o", WIDTH)


def _mlp(b: Builder, x: str, name: str, inner: int = INNER) -> str:
    gate, up = (_linear(b, x, f"{name}.{part}", inner) for part in ("gate", "up"))
    return _linear(b, b.op("mul", b.op("silu", gate), up), f"{name}.down", WIDTH)


def _experts(b: Builder, x: str, name: str) -> str:
    flat = b.op("reshape", x, shape=("T", WIDTH))
    scores = b.op("softmax", _linear(b, flat, f"{name}.router", EXPERTS), dim=1)
    weights, chosen = b.add("topk", [scores], k=2, dim=1, largest=True)
    y = b.op("expert_linear", flat, chosen, b.weight(f"{name}.gate_up", EXPERTS, 2 * INNER, WIDTH))
    y = b.op("mul", b.op("silu", b.slice(y, 2, 0, INNER)), b.slice(y, 2, INNER, 2 * INNER))
    y = b.op("expert_linear", y, chosen, b.weight(f"{name}.down", EXPERTS, WIDTH, INNER))
    y = b.op("mul", y, b.op("reshape", weights, shape=("T", 2, 1)))
    return b.op("reshape", b.op("reduce_sum", y, dims=(1,), keepdim=False), shape=(1, "T", WIDTH))
