"""Fuse the addition of a block's residual into the launch that makes the block's result."""
from __future__ import annotations

from dataclasses import replace

from ..ir.graph import Graph, Node, Operand
from .match import Matcher, rebuilt


def fuse_residual(graph: Graph) -> Graph:
    """add(linear(x, w), r) -> linear(x, w, r; residual), where nothing else reads the product.

    The product and the sum are rounded once, together, and the sum is what goes to memory.
    """
    m = Matcher(graph)
    fused: dict[str, Node] = {}
    gone: set[str] = set()
    for node in graph.nodes:
        found = m.summand(node, lambda product, other: _may_add(m, product, other, gone))
        if found is not None:
            product, other = found
            linear = m.node(product, "linear")
            assert linear is not None
            gone.add(linear.output)
            fused[node.output] = replace(linear, inputs=(*linear.inputs, other), outputs=node.outputs,
                                         attrs={**linear.attrs, "residual": True})
    return rebuilt(graph, [fused.get(node.outputs[0], node) for node in graph.nodes if node.outputs[0] not in gone])


def _may_add(m: Matcher, product: Operand, other: Operand, gone: set[str]) -> bool:
    linear = m.node(product, "linear")
    return linear is not None and linear.output not in gone and m.uses(linear.output) == 1 \
        and not linear.attrs.get("residual") and "scheme" in linear.attrs \
        and isinstance(other, str) and not m.is_constant(other) and other != product \
        and m.type(other).shape == m.type(product).shape
