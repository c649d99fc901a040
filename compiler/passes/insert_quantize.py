"""Make the quantization of activations a node of its own, shared by the layers that read the same input."""
from __future__ import annotations

from dataclasses import replace

from ingot.plugins.scheme import SCHEMES

from ..ir.graph import Graph, Node
from .match import rebuilt


def insert_quantize(graph: Graph) -> Graph:
    """linear(x, w; integer scheme) -> linear(quantize(x), w); expert_linear likewise."""
    nodes: list[Node] = []
    quantized: dict[tuple[str, str], str] = {}
    for node in graph.nodes:
        scheme = SCHEMES[node.attrs.get("scheme", "fp32")]
        if node.op in ("linear", "expert_linear") and scheme.is_integer:
            x = node.values[0]
            key = x, scheme.name
            if key not in quantized:
                quantized[key] = name = f"{x}.{scheme.name}"
                nodes.append(Node("quantize", (x,), (name,), {"scheme": scheme.name}, node.origin))
            node = replace(node, inputs=(quantized[key], *node.inputs[1:]))
        nodes.append(node)
    return rebuilt(graph, nodes)
