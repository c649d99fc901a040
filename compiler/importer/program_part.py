"""Runs a part of a traced program with real tensors: masks, and what follows from constants alone."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

Leaf = Callable[[torch.fx.Node], Any]
"""The value of a node that is not to be computed from its operands, or NOT_A_LEAF. Raises for one that has none."""

NOT_A_LEAF = object()


def part_of(node: torch.fx.Node, stop: Callable[[torch.fx.Node], bool] = lambda _: False) -> list[torch.fx.Node]:
    """The nodes that a value depends on, in execution order; what lies above a node with stop(node) is left out."""
    needed: set[torch.fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in needed:
            needed.add(current)
            if not stop(current):
                stack.extend(current.all_input_nodes)
    return [n for n in node.graph.nodes if n in needed]


def run_part(part: list[torch.fx.Node], leaf: Leaf) -> Any:
    """The value of the last node of a part."""
    values: dict[torch.fx.Node, Any] = {}
    for node in part:
        value = leaf(node)
        if value is NOT_A_LEAF:
            if str(node.target) == "aten.sym_size.int":
                value = values[node.args[0]].shape[node.args[1]]
            else:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
                value = node.target(*args, **kwargs)
        values[node] = value
    return values[part[-1]]
