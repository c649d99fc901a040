"""Where a product of low rank is put onto linear layers, and what becomes of it when matrices merge."""
from __future__ import annotations

import numpy as np
import pytest

from ingot.compiler.ir.graph import Graph
from ingot.compiler.ir.interpret import run
from ingot.compiler.ir.ops_lora import ADAPTERS, SLOTS
from ingot.compiler.ir.verify import verify
from ingot.compiler.passes.add_lora import LoraRequest, add_lora, lora_room
from ingot.compiler.passes.fuse_residual import fuse_residual
from ingot.compiler.passes.merge_linears import merge_linears
from ingot.compiler.passes.merge_lora import add_residuals_first, merge_lora
from tests.compiler.adapters import RandomAdapter
from tests.compiler.graphs import Builder, Weights

TOKENS = 5


def block(*, residual: bool = False, scheme: str = "fp32") -> Graph:
    """q, k and v of one input, as the importer leaves them; with `residual`: another layer behind v, added to x."""
    b = Builder()
    x = b.x("x", 1, "T", 24)
    q, k, v = (_linear(b, x, name, width, scheme) for name, width in (("q", 16), ("k", 8), ("v", 8)))
    last = b.op("add", x, _linear(b, v, "o", 24, scheme)) if residual else b.op("neg", v)
    return b.made(b.op("neg", q), b.op("neg", k), last)


def _linear(b: Builder, x: str, name: str, width: int, scheme: str) -> str:
    weight = b.weight(f"attn.{name}.weight", width, int(b.types[x].shape[-1]))
    b.origin = f"attn.{name} (model.py:1)"
    return b.op("linear", x, weight, scheme=scheme)


def results(graph: Graph, plain: Graph, adapters: list[int]) -> list[np.ndarray]:
    """Of both graphs' outputs, the second one's with merged weights."""
    room = lora_room(graph)
    assert room is not None
    made = [RandomAdapter(room, seed, room.max_rank, scale=1.0) for seed in range(room.max_adapters)]
    rng = np.random.default_rng(0)
    inputs = {"x": rng.standard_normal((1, TOKENS, 24)).astype(np.float32), ADAPTERS: np.array(adapters, np.int32),
              SLOTS: np.stack([adapter.image() for adapter in made])}
    return [run(graph, inputs, Weights(plain))[name] for name in graph.outputs]


def merged(plain: Graph, room_of: Graph, slot: int) -> list[np.ndarray]:
    """Of the graph without room, the adapter of that slot added to its weights."""
    room = lora_room(room_of)
    assert room is not None
    deltas = RandomAdapter(room, slot, room.max_rank, scale=1.0).deltas() if slot >= 0 else {}
    weights = Weights(plain)

    class Merged:
        def shape(self, name: str) -> tuple[int, ...]:
            return weights.shape(name)

        def get(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
            whole = weights.get(name) + deltas.get(name.removesuffix(".weight"), np.float32(0))
            return np.asarray(whole[begin:end], np.float32)

    inputs = {"x": np.random.default_rng(0).standard_normal((1, TOKENS, 24)).astype(np.float32)}
    return [run(plain, inputs, Merged())[name] for name in plain.outputs]


@pytest.mark.parametrize("modules", [(), ("q", "v"), ("attn.k", "o")])
def test_every_stage_means_merged_weights(modules: tuple[str, ...]) -> None:
    plain = block(residual=True)
    slots = [1, 1, -1, 0, -1]
    graph = add_lora(plain, LoraRequest(4, 2, modules))
    for apply in (merge_linears, merge_lora, add_residuals_first, fuse_residual, None):
        verify(graph)
        for number, got in enumerate(results(graph, plain, slots)):
            for slot in set(slots):
                rows = np.array(slots) == slot
                want = merged(plain, graph, slot)[number]
                np.testing.assert_allclose(got[:, rows], want[:, rows], rtol=2e-4, atol=2e-4)
        graph = apply(graph) if apply else graph


def test_one_shrink_and_one_expand_for_what_reads_the_same() -> None:
    graph = merge_lora(merge_linears(add_lora(block(), LoraRequest(4, 2))))
    assert [node.op for node in graph.nodes[:6]] == ["linear", "lora_shrink", "lora_expand", "slice", "slice", "slice"]
    expand = graph.nodes[2]
    assert [part[:3] for part in expand.attrs["parts"]] == [("attn.q", 0, 16), ("attn.k", 16, 8), ("attn.v", 24, 8)]
    assert [part[4] for part in expand.attrs["parts"]] == [0, 4, 8]


def test_a_module_without_room_is_a_slice_like_others() -> None:
    graph = merge_lora(merge_linears(add_lora(block(), LoraRequest(4, 2, ("v",)))))
    assert [node.op for node in graph.nodes[:6]] == ["linear", "lora_shrink", "lora_expand", "slice", "slice", "slice"]
    assert graph.nodes[2].attrs["parts"][0][:3] == ("attn.v", 24, 8)


def test_residuals_go_into_the_matrix() -> None:
    graph = merge_lora(merge_linears(add_lora(block(residual=True), LoraRequest(4, 2))))
    graph = fuse_residual(add_residuals_first(graph))
    assert "add" not in [node.op for node in graph.nodes]
    expand = graph.producers()[graph.outputs[-1]]
    assert expand.op == "lora_expand"
    assert graph.producers()[expand.values[0]].attrs["residual"]


def test_places_in_a_slot() -> None:
    room = lora_room(add_lora(block(residual=True), LoraRequest(3, 5)))
    assert room is not None and (room.max_rank, room.max_adapters) == (3, 5)
    # a of 3 x 24 bfloat16 takes 144 bytes, so 192; those of layers that read the same lie side by side.
    assert [(module.name, module.a) for module in room.modules] == [
        ("attn.q", 0), ("attn.k", 192), ("attn.v", 384), ("attn.o", 832)]
    assert [module.b for module in room.modules] == [576, 704, 768, 896]
    assert room.bytes_per_adapter == 1088
    room._check("room")
