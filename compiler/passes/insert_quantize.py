"""Make the quantization of activations a node of its own, shared by the layers that read the same input."""
from __future__ import annotations

from dataclasses import replace

from ingot.plugins.quantize.reference import row_bytes
from ingot.plugins.scheme import SCHEMES

from ..ir.graph import Graph, Node
from ..ir.types import DType, TensorType


def insert_quantize(graph: Graph) -> Graph:
    """linear(x, w; integer scheme) -> linear(quantize(x), w); expert_linear likewise."""
    nodes: list[Node] = []
    types: dict[str, TensorType] = {}
    quantized: dict[tuple[str, str], str] = {}
    for node in graph.nodes:
        scheme = SCHEMES[node.attrs.get("scheme", "fp32")]
        if node.op in ("linear", "expert_linear") and scheme.is_integer:
            x = node.values[0]
            key = x, scheme.name
            if key not in quantized:
                quantized[key] = name = f"{x}.{scheme.name}"
                shape = graph.types[x].shape
                types[name] = TensorType((*shape[:-1], row_bytes(int(shape[-1]), scheme)), DType.U8)
                nodes.append(Node("quantize", (x,), (name,), {"scheme": scheme.name}, node.origin))
            node = replace(node, inputs=(quantized[key], *node.inputs[1:]))
        nodes.append(node)
    return graph.rebuilt(nodes, types=types)
