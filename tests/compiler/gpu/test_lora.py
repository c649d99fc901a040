"""Launches for LoRA adapters: what steps without adapters take, and that nothing of theirs depends on the others."""
from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from ingot.compiler.gpu.emitters import EMITTERS
from ingot.compiler.gpu.lower import GpuLowering, Request
from ingot.compiler.gpu.storage import stored_types
from ingot.compiler.passes.add_lora import LoraRequest
from ingot.compiler.passes.pipeline import gpu_pipeline, run_passes
from ingot.compiler.plan.kv_cache import plan_kv_cache
from ingot.compiler.precision import find_precision
from ingot.compiler.weights.packed import WeightTable
from tests.compiler.models import Layer, model

from .programs import BLOCK_SIZE, LIMITS, gpu


def requests(layer: Layer, tokens: int, precision: str, lora: LoraRequest | None) -> list[Request]:
    """Of one bucket of a model with two such layers, each linear layer named after its weight."""
    graph = model([layer, layer])
    nodes = [replace(node, origin=f"{node.values[1].removesuffix('.weight')} (test)") if node.op == "linear" else node
             for node in graph.nodes]
    chosen = find_precision(precision, gpu("h200"))
    final = run_passes(graph.rebuilt(nodes), gpu_pipeline(chosen, chosen.kv, lora=lora))
    low = GpuLowering(
        graph=final, tokens=tokens, bindings={"T": tokens, "L": min(tokens, LIMITS["max_batch_size"])}, limits=LIMITS,
        weights=WeightTable(), kv=plan_kv_cache(final, BLOCK_SIZE, LIMITS["max_seq_len"]), gpu=gpu("h200"),
        floats=chosen.floats, stored=stored_types(final, chosen.floats), emitters=EMITTERS)
    low.emit_all()
    return [request for request in low.requests if isinstance(request, Request)]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("tokens", [4, 32])
@pytest.mark.parametrize("layer", [Layer(), Layer(post_norm=True), Layer(parallel=True)],
                         ids=["llama", "gemma", "parallel"])
def test_attention_with_room_has_no_launch_more(layer: Layer, tokens: int, precision: str) -> None:
    """Norms are still left to matrices, or give them their inputs quantized; adapters have norms of their own."""
    plain = requests(layer, tokens, precision, None)
    room = requests(layer, tokens, precision, LoraRequest(8, 2, ("q", "v")))
    without = Counter(request.op for request in room if not request.adapters)
    assert without == Counter(request.op for request in plain)
    assert {request.op for request in room if request.adapters} - {"rms_norm"} == {"lora_shrink", "lora_expand"}


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("tokens", [4, 32])
@pytest.mark.parametrize("layer", [Layer(), Layer(post_norm=True), Layer(parallel=True), Layer(late=True)],
                         ids=["llama", "gemma", "parallel", "late"])
def test_what_is_read_was_made(layer: Layer, tokens: int, precision: str) -> None:
    """In steps without adapters, by launches that those take; with adapters, after what it is made of."""
    room = requests(layer, tokens, precision, LoraRequest(8, 2))
    for chosen in ([request for request in room if not request.adapters], room):
        made: set[str] = set()
        for request in chosen:
            for name in ("x", "in0", "in1", "residual"):
                arg = request.args.get(name)
                assert arg is None or arg.kind != "value" or arg.name in made, f"{request.op} of {request.origin}"
            made |= {arg.name for arg in request.args.values() if arg.kind == "value"}
