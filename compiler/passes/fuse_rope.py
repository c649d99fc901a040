"""Fuse what stands between the q/k/v projection and attention into one launch."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..ir.graph import Graph, Node, Operand
from .match import Matcher, eliminate_dead_code, rebuilt


def fuse_rope_kv_write(graph: Graph) -> Graph:
    """q' = rope([norm] q), (k', v') = kv_write(rope([norm] k), v) -> (q', k', v') = rope_kv_write(q, k, v, …).

    Where q and k are rotated by the same factors and either both or neither are normalised head by head. The fused
    node stands where attention stood, so that all its inputs exist.
    """
    m = Matcher(graph)
    nodes: list[Node] = []
    gone: set[str] = set()
    for node in graph.nodes:
        write = m.node(node.inputs[1], "kv_write") if node.op == "attention" else None
        # A cache that a later layer reads too is written by its first reader alone.
        fused = _fused(m, node, write) if write is not None and m.uses(write.outputs[0]) == 1 else []
        if write is not None and fused:
            gone.add(write.outputs[0])
            node = replace(node, inputs=(fused[-1].outputs[0], *node.inputs[1:]))
        nodes += [*fused, node]
    return eliminate_dead_code(rebuilt(graph, [node for node in nodes if not (
        node.op == "kv_write" and node.outputs[0] in gone)]))


def _fused(m: Matcher, attention: Node, write: Node) -> list[Node]:
    """The nodes that take the place of those before an attention, rope_kv_write the last; none if they don't fit."""
    q, k = _prepared(m, attention.inputs[0]), _prepared(m, write.inputs[0])
    if q is None or k is None or (q.factors, q.attrs) != (k.factors, k.attrs) or (q.norm is None) != (k.norm is None):
        return []
    out, origin = attention.output, attention.origin
    shapes = m.type(attention.inputs[0]).shape, m.type(write.inputs[0]).shape
    heads = [Node("reshape", (part.source,), (f"{out}.{name}",), {"shape": shape}, origin)
             for name, part, shape in zip("qk", (q, k), shapes, strict=True)]
    norms = () if q.norm is None or k.norm is None else (q.norm, k.norm)
    attrs = {**q.attrs, "slot": write.attrs["slot"], "dtype": write.attrs["dtype"]}
    inputs = (heads[0].output, heads[1].output, write.inputs[1], *q.factors, *norms)
    return [*heads, Node("rope_kv_write", inputs, (f"{out}.q_rope", *write.outputs), attrs, origin)]


@dataclass(frozen=True)
class _Prepared:
    """rope([rms_norm] source): where the values come from, and how they are prepared. attrs: of both operators."""

    source: Operand
    factors: tuple[Operand, Operand]
    norm: Operand | None
    attrs: dict[str, Any]


def _prepared(m: Matcher, value: Operand) -> _Prepared | None:
    rope = m.node(m.through_reshapes(value), "rope")
    if rope is None or m.uses(rope.output) != 1:
        return None
    source, cos, sin = rope.inputs
    norm = m.node(m.through_reshapes(source), "rms_norm")
    if norm is not None and len(norm.inputs) == 2 and m.uses(norm.output) == 1 \
            and m.type(norm.output).shape[-1] == m.type(source).shape[-1]:
        return _Prepared(norm.inputs[0], (cos, sin), norm.inputs[1], {**rope.attrs, "eps": norm.attrs["eps"]})
    return _Prepared(source, (cos, sin), None, dict(rope.attrs))
