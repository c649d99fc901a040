"""Keep weights of a quantized checkpoint on their grid: scales of inputs become a multiplication of the inputs."""
from __future__ import annotations

from ..ir.graph import Graph, Node
from ..precision import weight_bits
from ..weights.expr import WeightExpr, reshape
from .match import rebuilt


def split_input_scales(graph: Graph) -> Graph:
    """linear(x, scale_columns(w, s)) -> linear(mul(x, s), w) where the layer's scheme has as many bits as w's grid.

    Elsewhere the scales stay in the weights, which is as exact and costs nothing in a step.
    """
    constants: dict[str, WeightExpr] = {}
    scaled: dict[tuple[str, WeightExpr], str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        weight = graph.constants.get(node.values[1]) if node.op == "linear" else None
        if weight is not None and weight.op == "scale_columns" and "scheme" in node.attrs \
                and weight_bits(node.attrs["scheme"]) == weight.attr("bits"):
            plain, scale = weight.inputs
            x, name = node.values[0], node.values[1]
            if (x, scale) not in scaled:
                constants[f"{name}.input_scale"] = reshape(scale, (scale.shape[1],))
                scaled[x, scale] = f"{node.output}.scaled_input"
                nodes.append(Node("mul", (x, f"{name}.input_scale"), (scaled[x, scale],), {}, node.origin))
            constants[f"{name}.on_grid"] = plain
            inputs = (scaled[x, scale], f"{name}.on_grid", *node.inputs[2:])
            node = Node("linear", inputs, node.outputs, node.attrs, node.origin)
        nodes.append(node)
    return rebuilt(graph, nodes, constants=constants)
