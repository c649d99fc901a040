"""Fuse what stands between the q/k/v projection and attention into one launch."""
from __future__ import annotations

from dataclasses import dataclass

from ..ir.graph import Graph, Node, Operand
from ..ir.types import TensorType
from .match import Matcher, eliminate_dead_code


def fuse_rope_kv_write(graph: Graph) -> Graph:
    """q' = rope([norm] q), (k', v') = kv_write(rope([norm] k), v) -> (q', k', v') = rope_kv_write(q, k, v, …).

    Where q and k are rotated by the same factors and either both or neither are normalised head by head. The fused
    node stands where attention stood, so that all its inputs exist.
    """
    m = Matcher(graph)
    fused: dict[str, list[Node]] = {}  # output of the attention -> nodes before it
    gone: set[str] = set()
    types: dict[str, TensorType] = {}
    renamed: dict[str, str] = {}
    for node in graph.nodes:
        write = m.node(node.inputs[1], "kv_write") if node.op == "attention" else None
        # A cache that a later layer reads too is written by its first reader alone.
        if write is None or m.uses(write.outputs[0]) != 1 or not isinstance(node.inputs[0], str):
            continue
        q, k = _prepared(m, node.inputs[0]), _prepared(m, write.inputs[0])
        if q is None or k is None or (q.cos, q.sin, q.attrs) != (k.cos, k.sin, k.attrs) or q.eps != k.eps \
                or (q.norm is None) != (k.norm is None):
            continue
        shaped, inputs = [], []
        for source, like in ((q.source, node.inputs[0]), (k.source, write.values[0])):
            name = f"{node.output}.{'q' if not inputs else 'k'}"
            types[name] = m.type(like)
            shaped.append(Node("reshape", (source,), (name,), {"shape": m.type(like).shape}, node.origin))
            inputs.append(name)
        out = f"{node.output}.q_rope"
        types[out] = m.type(node.inputs[0])
        norms = () if q.norm is None or k.norm is None else (q.norm, k.norm)
        attrs = {**q.attrs, "slot": write.attrs["slot"], "dtype": write.attrs["dtype"]}
        if norms:
            attrs["eps"] = q.eps
        fused[node.output] = [*shaped, Node("rope_kv_write", (*inputs, write.inputs[1], q.cos, q.sin, *norms),
                                            (out, *write.outputs), attrs, node.origin)]
        gone.update(write.outputs)
        renamed[node.output] = out
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op == "kv_write" and node.outputs[0] in gone:
            continue
        if node.outputs[0] in fused:
            nodes.extend(fused[node.outputs[0]])
            node = Node(node.op, (renamed[node.outputs[0]], *node.inputs[1:]), node.outputs, node.attrs, node.origin)
        nodes.append(node)
    return eliminate_dead_code(graph.rebuilt(nodes, types=types))


@dataclass(frozen=True)
class _Prepared:
    """rope([rms_norm] source): where the values come from, and how they are prepared."""

    source: str
    cos: Operand
    sin: Operand
    attrs: dict[str, object]
    norm: str | None
    eps: float


def _prepared(m: Matcher, value: str) -> _Prepared | None:
    rope = m.node(_skip(m, value), "rope")
    if rope is None or m.uses(rope.output) != 1:
        return None
    source, cos, sin = rope.values
    inner = _skip(m, source)
    norm = m.node(inner, "rms_norm")
    if norm is not None and len(norm.values) == 2 and m.uses(norm.output) == 1 \
            and m.type(norm.output).shape[-1] == m.type(source).shape[-1]:
        return _Prepared(norm.values[0], cos, sin, dict(rope.attrs), norm.values[1], norm.attrs["eps"])
    return _Prepared(source, cos, sin, dict(rope.attrs), None, 0.0)


def _skip(m: Matcher, value: str) -> str:
    """What the value is a reshape of."""
    while (node := m.node(value, "reshape")) is not None:
        value = node.values[0]
    return value
