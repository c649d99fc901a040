"""Give every attention its place in the KV cache."""
from __future__ import annotations

from dataclasses import replace

from ..ir.graph import Graph, Node
from ..ir.types import DType
from .match import rebuilt


def place_kv(graph: Graph, kv_dtype: DType) -> Graph:
    """attention(q, k, v) -> (k', v') = kv_write(k, v; slot); attention(q, k', v'; slot).

    k' and v' lie in the cache, not in the arena; they carry the rounding to the cache's type. Attentions over the same
    k and v share a slot, written once. Slots are numbered in order of execution.
    """
    nodes: list[Node] = []
    slots: dict[tuple[str, str], tuple[int, str, str]] = {}
    for node in graph.nodes:
        if node.op != "attention":
            nodes.append(node)
            continue
        q, k, v, *sinks = node.values
        if (k, v) not in slots:
            slot = len(slots)
            cached_k, cached_v = f"kv{slot}.k", f"kv{slot}.v"
            nodes.append(Node("kv_write", (k, v), (cached_k, cached_v), {"slot": slot, "dtype": kv_dtype}, node.origin))
            slots[k, v] = slot, cached_k, cached_v
        slot, cached_k, cached_v = slots[k, v]
        nodes.append(replace(node, inputs=(q, cached_k, cached_v, *sinks), attrs={**node.attrs, "slot": slot}))
    return rebuilt(graph, nodes)
