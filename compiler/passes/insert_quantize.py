"""Make the quantization of activations a node of its own, shared by the layers that read the same input."""
from __future__ import annotations

from dataclasses import replace

from ingot.plugins.scheme import SCHEMES

from ..ir.graph import Graph, Node
from .match import rebuilt

MATRICES = ("linear", "expert_linear")


def insert_quantize(graph: Graph, pairs: bool = False) -> Graph:
    """linear(x, w; scheme of rounded inputs) -> linear(quantize(x), w); expert_linear likewise.

    pairs: the target multiplies pairs of bfloat16, so that matrices in bf16 get rounded inputs too.
    """
    nodes: list[Node] = []
    quantized: dict[tuple[str, str], str] = {}
    for node in graph.nodes:
        if pairs and node.op in MATRICES and node.attrs.get("scheme") == "bf16":
            node = node.with_attrs(scheme="bf16_pairs")
        scheme = SCHEMES[node.attrs.get("scheme", "fp32")]
        if node.op in MATRICES and scheme.rounds_inputs:
            x = node.values[0]
            key = x, scheme.name
            if key not in quantized:
                quantized[key] = name = f"{x}.{scheme.name}"
                nodes.append(Node("quantize", (x,), (name,), {"scheme": scheme.name}, node.origin))
            node = replace(node, inputs=(quantized[key], *node.inputs[1:]))
        nodes.append(node)
    return rebuilt(graph, nodes)
