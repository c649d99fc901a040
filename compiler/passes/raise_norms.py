"""Raise the arithmetic of normalisation layers to rms_norm and layer_norm."""
from __future__ import annotations

from dataclasses import replace

from ..ir.graph import Graph, Node, Operand
from .match import Matcher, rewrite


def raise_norms(graph: Graph) -> Graph:
    """x / sqrt(mean(x²) + eps) [· w] -> rms_norm(x[, w]);  the same of x - mean(x) -> layer_norm.

    Weights of the form 1 + w are folded into the constant before this pass; a weight [1, .., D] becomes [D] when
    constants are folded after it.
    """
    for rule in (_rms_norm, _norm_weight, _center, _norm_weight, _layer_norm_bias):
        graph = rewrite(graph, rule)
    return graph


def _rms_norm(m: Matcher, node: Node) -> list[Node] | None:
    """mul(x, rsqrt(mean(x²) + eps)), and its spellings with div, sqrt, reciprocal and pow(-0.5)."""
    if node.op == "mul":
        found = [(x, root) for x, scale in (node.inputs, node.inputs[::-1])
                 if (root := _inverse_root(m, scale)) is not None]
        if not found:
            return None
        x, root = found[0]
    elif node.op == "div" and (sqrt := m.node(node.inputs[1], "sqrt")):
        x, root = node.inputs[0], sqrt.inputs[0]
    else:
        return None
    eps_sum = m.node(root, "add")
    if eps_sum is None:
        return None
    parts = m.split(eps_sum, lambda operand: m.number(operand) is not None)
    if parts is None:
        return None
    eps, mean_value = m.number(parts[0]), parts[1]
    mean = m.node(mean_value, "reduce_mean")
    if mean is None or not _over_last_dim(m, mean) or not _is_square_of(m, mean.inputs[0], x):
        return None
    return [Node("rms_norm", (x,), node.outputs, {"eps": eps}, node.origin)]


def _inverse_root(m: Matcher, value: Operand) -> Operand | None:
    """v if the value is 1 / sqrt(v)."""
    if rsqrt := m.node(value, "rsqrt"):
        return rsqrt.inputs[0]
    if (power := m.node(value, "pow")) and m.number(power.inputs[1]) == -0.5:
        return power.inputs[0]
    if (inverse := m.node(value, "reciprocal")) and (sqrt := m.node(inverse.inputs[0], "sqrt")):
        return sqrt.inputs[0]
    if (quotient := m.node(value, "div")) and m.number(quotient.inputs[0]) == 1 \
            and (sqrt := m.node(quotient.inputs[1], "sqrt")):
        return sqrt.inputs[0]
    return None


def _is_square_of(m: Matcher, value: Operand, x: Operand) -> bool:
    power = m.node(value, "pow", "mul")
    if power is None or power.inputs[0] != x:
        return False
    return m.number(power.inputs[1]) == 2 if power.op == "pow" else power.inputs[1] == x


def _over_last_dim(m: Matcher, node: Node) -> bool:
    rank = len(m.type(node.inputs[0]).shape)
    return tuple(d % rank for d in node.attrs["dims"]) == (rank - 1,) and bool(node.attrs["keepdim"])


def _norm_weight(m: Matcher, node: Node) -> list[Node] | None:
    """norm(x) · w -> norm(x, w), where nothing else reads the unweighted norm."""
    if node.op != "mul":
        return None
    for weight, value in (node.inputs, node.inputs[::-1]):
        norm = m.node(value, "rms_norm", "layer_norm")
        if norm is not None and len(norm.inputs) == 1 and m.uses(norm.output) == 1 and m.is_row(weight, value):
            row, nodes = m.as_row(weight, node)
            return [*nodes, replace(norm, inputs=(norm.inputs[0], row), outputs=node.outputs)]
    return None


def _center(m: Matcher, node: Node) -> list[Node] | None:
    """rms_norm(x - mean(x)) -> layer_norm(x)"""
    if node.op != "rms_norm":
        return None
    centered = m.node(node.inputs[0], "sub")
    if centered is None:
        return None
    x, mean_value = centered.inputs
    mean = m.node(mean_value, "reduce_mean")
    if mean is None or mean.inputs[0] != x or not _over_last_dim(m, mean):
        return None
    return [replace(node, op="layer_norm", inputs=(x, *node.inputs[1:]))]


def _layer_norm_bias(m: Matcher, node: Node) -> list[Node] | None:
    """layer_norm(x, w) + b -> layer_norm(x, w, b)"""
    if node.op != "add":
        return None
    for bias, value in (node.inputs, node.inputs[::-1]):
        norm = m.node(value, "layer_norm")
        if norm is not None and len(norm.inputs) == 2 and m.uses(norm.output) == 1 and m.is_row(bias, value):
            row, nodes = m.as_row(bias, node)
            return [*nodes, replace(norm, inputs=(*norm.inputs, row), outputs=node.outputs)]
    return None
