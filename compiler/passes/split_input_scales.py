"""Keep weights of a quantized checkpoint on their grid: scales of inputs become a multiplication of the inputs."""
from __future__ import annotations

from dataclasses import replace

from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES
from ingot.plugins.scheme import SCHEMES

from ..ir.graph import Graph, Node
from ..precision import weight_bits
from ..weights.carried import carried
from ..weights.expr import WeightExpr, elementwise, reshape
from .match import Matcher, rebuilt


def split_input_scales(graph: Graph) -> Graph:
    """linear(x, scale_columns(w, s)) -> linear(mul(x, s), w) where the layer's scheme holds w as it is; and where x is
    made by a norm and read so alone, its weight takes s in: norm(.., v) * s -> norm(.., v * s).

    Elsewhere the scales stay in the weights, which is as exact and costs nothing in a step.
    """
    constants: dict[str, WeightExpr] = {}
    scaled: dict[tuple[str, WeightExpr], str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        weight = graph.constants.get(node.values[1]) if node.op == "linear" else None
        if weight is not None and weight.op == "scale_columns" and "scheme" in node.attrs \
                and _holds(node.attrs["scheme"], weight):
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
    return _into_norms(rebuilt(graph, nodes, constants=constants), set(scaled.values()))


def _holds(scheme: str, weight: WeightExpr) -> bool:
    plain = weight.inputs[0]
    if scheme not in SCHEMES and plain.op == "dequantize":
        return carried(plain, GPU_SCHEMES[scheme].format) is not None
    return weight_bits(scheme) == weight.attr("bits")


def _into_norms(graph: Graph, products: set[str]) -> Graph:
    """products: values that are inputs times a constant scale."""
    m, constants = Matcher(graph), dict[str, WeightExpr]()
    norms: dict[str, Node] = {}
    for node in graph.nodes:
        norm = m.node(node.inputs[0], "rms_norm", "layer_norm") if node.outputs[0] in products else None
        if norm is None or len(norm.values) < 2 or m.uses(norm.output) != 1 \
                or any(m.uses(value) != 1 or not m.is_constant(value) for value in norm.values[1:]):
            continue
        scale = graph.constants[str(node.inputs[1])]
        for value in norm.values[1:]:
            constants[f"{value}.scaled"] = elementwise("mul", graph.constants[value], scale)
        inputs = (norm.inputs[0], *(f"{value}.scaled" for value in norm.values[1:]))
        norms[norm.output] = replace(norm, inputs=inputs, outputs=node.outputs)
    gone = {norm.outputs[0] for norm in norms.values()}
    nodes = [norms.get(node.outputs[0], node) for node in graph.nodes if node.outputs[0] not in gone]
    return rebuilt(graph, nodes, constants=constants)
