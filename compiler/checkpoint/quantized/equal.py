"""Small tensors of a quantized checkpoint that hold the same values: layers that share them can be computed together.

Scales of inputs, and the factors of nvfp4, are stored with every layer, also where layers that read the same input have
the same ones. A graph in which such tensors have one name shows what belongs together.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ...ir.graph import Graph
from ...weights.expr import WeightExpr, substitute, tensor
from .read import read_quantized

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

_MOST_ELEMENTS = 1 << 20


def shareable(expr: WeightExpr) -> set[str]:
    """Tensors in a weight's recipe that scale its inputs, or all of it."""
    found: set[str] = set()
    stack = [expr]
    while stack:
        part = stack.pop()
        stack.extend(part.inputs)
        if part.op == "scale_columns":
            found.update(part.inputs[1].tensor_names())
        elif part.op == "dequantize" and len(part.inputs) > 2:
            found.update(part.inputs[2].tensor_names())
    return found


def equal_tensors(checkpoint: Checkpoint) -> dict[str, str]:
    """Such a tensor -> the first one, in the order of names, that has the same type, shape and bytes; only where that
    is another."""
    quantized = read_quantized(checkpoint)
    names = sorted({name for weight in quantized.weights.values() for name in shareable(weight.expr)}) \
        if quantized is not None else []
    first: dict[str, str] = {}
    found: dict[str, str] = {}
    for name in names:
        if math.prod(checkpoint.shape(name)) <= _MOST_ELEMENTS:
            same = first.setdefault(checkpoint.tensor_digest(name), name)
            if same != name:
                found[name] = same
    return found


def with_equal_tensors_shared(graph: Graph, equal: Mapping[str, str]) -> Graph:
    """equal: as equal_tensors gives it."""
    if not equal:
        return graph
    constants = {}
    for name, expr in graph.constants.items():
        shapes = {leaf.attr("name"): leaf for leaf in _leaves(expr)}
        constants[name] = substitute(expr, {leaf: tensor(equal[leaf], shapes[leaf].shape, shapes[leaf].type.dtype)
                                            for leaf in shapes if leaf in equal})
    return replace(graph, constants=constants)


def _leaves(expr: WeightExpr) -> list[WeightExpr]:
    if expr.op == "tensor":
        return [expr]
    return [leaf for inner in expr.inputs for leaf in _leaves(inner)]
