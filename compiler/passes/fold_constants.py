"""Move arithmetic on constants out of the step and into the recipes of the constants."""
from __future__ import annotations

import math

from ..ir.graph import Graph
from ..weights.expr import WeightExpr, apply

MAX_GROWTH = 4
"""A fold that makes a constant this many times larger than what it is made of stays in the step (expand, outer
products): the engine would carry the copies."""


def fold_constants(graph: Graph) -> Graph:
    """Nodes whose inputs are constants or literals become weight expressions."""
    constants, nodes = dict(graph.constants), []
    for node in graph.nodes:
        types = [graph.types[name] for name in node.outputs]
        operands: list[WeightExpr | int | float | bool] = [
            constants[i] if isinstance(i, str) and i in constants else i  # type: ignore[misc]
            for i in node.inputs]
        foldable = all(not isinstance(operand, str) for operand in operands) \
            and all(isinstance(dim, int) for type_ in types for dim in type_.shape)
        if foldable:
            before = sum(operand.size_bytes for operand in operands if isinstance(operand, WeightExpr))
            after = sum(math.prod(int(d) for d in t.shape) * t.dtype.size_bytes for t in types)
            foldable = after <= max(MAX_GROWTH * before, 1 << 20)
        if not foldable:
            nodes.append(node)
            continue
        for number, (name, type_) in enumerate(zip(node.outputs, types, strict=True)):
            constants[name] = apply(node.op, operands, type_, number, **node.attrs)
    return graph.rebuilt(nodes, constants=constants)
