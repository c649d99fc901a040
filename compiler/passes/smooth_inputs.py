"""Give the inputs of quantized matrices scales that calibration may choose: exact in the model, cheap in a step.

    linear(x, w)  ->  linear(x / s, w * s)

The division goes into what makes x: the weight of a norm; the rows of the other factor of a gated MLP; the rows that
make the values of attention. So nothing is added to a step, and where nothing is chosen s is one. AWQ (Lin et al. 2023)
and SmoothQuant (Xiao et al. 2022) are such scales.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES
from ingot.plugins.scheme import SCHEMES

from ..ir.graph import Graph, Node
from ..weights.carried import carried
from ..weights.expr import WeightExpr, concat, elementwise, input_scale, reshape
from .match import rebuilt

SMOOTHED = ("w4a8", "int8_token", *(scheme.name for scheme in GPU_SCHEMES.values() if scheme.weights.bits == 4))
"""Schemes whose weights or inputs share scales between channels. Inputs of fp8 have a range of their own each."""

_EIGHT_BITS = ("e4m3", "int8")
_SCALED = {"dequantize", "repeat_rows", "repeat_columns"}
_PLAIN = {"tensor", "literal", "cat", "permute", "reshape", "slice", "cast", "add", "mul", "input_scale"}


def smooth_inputs(graph: Graph) -> Graph:
    """Only matrices of the checkpoint's own that are used once, and whose inputs only matrices read, and the low-rank
    products of adapters: those get x as it was, by a division that steps without adapters leave out."""
    consumers, producers = graph.consumers(), graph.producers()
    constants = dict(graph.constants)
    done: set[str] = set()
    restored: dict[str, Node] = {}  # output of a lora_shrink -> what makes its input
    for node in graph.nodes:
        x = node.values[0] if node.op == "linear" else ""
        if not x or node.attrs.get("scheme") not in SMOOTHED or x in done or x in graph.constants or x in graph.outputs:
            continue
        done.add(x)
        readers = [reader for reader in consumers[x] if reader.op != "lora_shrink"]
        if not all(reader.op == "linear" and _own(graph, consumers, reader.values[1]) and x not in reader.values[1:]
                   for reader in readers):
            continue
        name, width = node.values[1].removesuffix(".permute"), int(graph.types[x].shape[-1])
        found = _absorbed(graph, constants, consumers, producers, x, name, width)
        if found is None:
            continue
        changed, scale = found
        constants |= changed
        for reader in readers:
            constants[reader.values[1]] = elementwise("mul", constants[reader.values[1]], reshape(scale, (1, width)))
        for shrink in (reader for reader in consumers[x] if reader.op == "lora_shrink"):
            constants[f"{x}.scale"] = _inverse(scale)
            restored[shrink.output] = Node("div", (x, f"{x}.scale"), (f"{x}.unscaled",), {}, shrink.origin)
    nodes: list[Node] = []
    for node in graph.nodes:
        if (division := restored.get(node.outputs[0])) is not None:
            nodes.append(division)
            node = replace(node, inputs=(division.output, *node.inputs[1:]))
        nodes.append(node)
    return rebuilt(graph, nodes, constants=constants)


def _inverse(scale: WeightExpr) -> WeightExpr:
    """1 / scale, where that is an input scale, repeated for heads or not."""
    if scale.op == "input_scale":
        return input_scale(scale.attr("name"), scale.shape[0], scale.attr("head"), inverse=True)
    return replace(scale, operands=tuple(map(_inverse, scale.inputs)))


Consumers = Mapping[str, list[Node]]


def _absorbed(graph: Graph, constants: Mapping[str, WeightExpr], consumers: Consumers, producers: Mapping[str, Node],
              x: str, name: str, width: int) -> tuple[dict[str, WeightExpr], WeightExpr] | None:
    """(constants that take in the division, the scale of x's channels)."""
    node = producers.get(x)
    if node is not None and node.op in ("rms_norm", "layer_norm") and len(node.values) > 1:
        inverse = input_scale(name, width, inverse=True)
        if all(_own(graph, consumers, parameter) for parameter in node.values[1:]):
            return ({parameter: elementwise("mul", constants[parameter], inverse) for parameter in node.values[1:]},
                    input_scale(name, width))
    elif node is not None and node.op == "mul":
        inverse = input_scale(name, width, inverse=True)
        for factor in reversed(node.values):
            matrix = producers.get(factor)
            if matrix is not None and matrix.op == "linear" and len(consumers[factor]) == 1 \
                    and len(set(node.values)) > 1 and _takes_rows(graph, consumers, matrix, width):
                return _divided(constants, matrix, inverse), input_scale(name, width)
    elif node is not None and (attention := _through(producers, consumers, x)) is not None \
            and attention.op == "attention":
        return _values(graph, constants, consumers, producers, attention, name, width)
    return None


def _values(graph: Graph, constants: Mapping[str, WeightExpr], consumers: Consumers, producers: Mapping[str, Node],
            attention: Node, name: str, width: int) -> tuple[dict[str, WeightExpr], WeightExpr] | None:
    """Heads that share values share scales: [Hkv, D] is repeated for the queries' heads."""
    value = attention.values[2]
    matrix = producers.get(value)
    if len(consumers[value]) == 1 and matrix is not None and matrix.op == "reshape":
        matrix = _through(producers, consumers, value)
    _, kv_heads, head = graph.types[value].shape
    rows = int(kv_heads) * int(head)
    if matrix is None or matrix.op != "linear" or not _takes_rows(graph, consumers, matrix, rows) \
            or len(consumers[matrix.output]) != 1 or len(consumers[value]) != 1 or width % rows:
        return None
    scale = input_scale(name, rows, int(head))
    one = reshape(scale, (int(kv_heads), 1, int(head)))
    full = reshape(concat([one] * (width // rows), 1), (width,))
    return _divided(constants, matrix, input_scale(name, rows, int(head), inverse=True)), full


def _divided(constants: Mapping[str, WeightExpr], matrix: Node, inverse: WeightExpr) -> dict[str, WeightExpr]:
    weight, *bias = matrix.values[1:]
    found = {weight: elementwise("mul", constants[weight], reshape(inverse, (inverse.shape[0], 1)))}
    return found | {part: elementwise("mul", constants[part], inverse) for part in bias}


def _takes_rows(graph: Graph, consumers: Consumers, matrix: Node, rows: int) -> bool:
    return all(_own(graph, consumers, part) for part in matrix.values[1:]) \
        and graph.constants[matrix.values[1]].shape[0] == rows


def _own(graph: Graph, consumers: Consumers, name: str) -> bool:
    """A constant that one node reads, made of what the checkpoint holds as floats, or as eight bits that the node's
    scheme does not hold as they are."""
    if name not in graph.constants or len(consumers[name]) != 1:
        return False
    whole, scheme = graph.constants[name], consumers[name][0].attrs.get("scheme", "")
    plain = set(_PLAIN) if _keeps(scheme, whole) else _PLAIN | _SCALED
    stack = [whole]
    while stack:
        expr = stack.pop()
        if expr.op not in plain or (expr.op == "dequantize" and expr.attr("kind") not in _EIGHT_BITS):
            return False
        stack.extend(expr.inputs)
    return True


def _keeps(scheme: str, weight: WeightExpr) -> bool:
    """Whether a scheme may hold the numbers of a quantized weight as they are."""
    if scheme in GPU_SCHEMES and scheme not in SCHEMES:
        return carried(weight, GPU_SCHEMES[scheme].format) is not None
    return scheme not in SCHEMES or SCHEMES[scheme].weight_bits == 8


def _through(producers: Mapping[str, Node], consumers: Consumers, value: str) -> Node | None:
    """What the value is a reshape of, where nothing else reads what lies between."""
    node = producers.get(value)
    while node is not None and node.op == "reshape":
        value = node.values[0]
        if len(consumers[value]) != 1:
            return None
        node = producers.get(value)
    return node
