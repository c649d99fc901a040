"""Recipes by tracing: what a function of transformers does to weights, followed once on shapes alone."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.proxy_tensor import make_fx

from ..weights.expr import WeightExpr
from . import aten_elementwise, aten_linear, aten_reduce, aten_views
from .builder import GraphBuilder
from .conversion import CONVERSIONS, Context, operator_name

# Their conversions are registered when they are imported.
__all__ = ["aten_elementwise", "aten_linear", "aten_reduce", "aten_views", "traced_recipes"]


def traced_recipes(function: Callable[..., list[torch.Tensor]], leaves: Sequence[WeightExpr]) -> list[WeightExpr]:
    """The results of function(*tensors) as recipes over the leaves. No memory is used: the tensors have no values.

    Raises what the function raises, and ImportRefused for an operator without conversion.
    """
    empty = [torch.empty(leaf.shape, device="meta", dtype=torch.float32 if leaf.type.dtype.is_float else torch.int64)
             for leaf in leaves]
    graph = make_fx(function)(*empty).graph
    context = Context(GraphBuilder(fold_all=True))
    values: dict[torch.fx.Node, Any] = {}
    remaining = list(leaves)
    for node in graph.nodes:
        context.node = node
        if node.op == "placeholder":
            values[node] = context.builder.constant(remaining.pop(0), node.name)
        elif node.op == "output":
            return [context.builder.constants[values[result]] for result in node.args[0]]
        elif operator_name(node) == "getitem":
            values[node] = values[node.args[0]][node.args[1]]
        elif operator_name(node) not in CONVERSIONS:
            raise context.refuse("this operator has no conversion")
        else:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
            values[node] = CONVERSIONS[operator_name(node)](context, node, *args, **kwargs)
    raise AssertionError("a traced function has an output")
