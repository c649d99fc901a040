"""The meaning of a sharded graph: its ranks run side by side, node by node, and meet in collective operators."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..weights.evaluate import TensorSource, evaluate
from ..weights.sharding import at_rank
from .graph import Graph, Operand
from .interpret import bind_symbols, run_node
from .op import as_tuple
from .registry import OPS

COLLECTIVE = ("all_reduce", "all_gather")


def run_ranks(graph: Graph, inputs: Mapping[str, np.ndarray], checkpoint: TensorSource, num_ranks: int,
              ) -> list[dict[str, np.ndarray]]:
    """The values of the graph's outputs on each rank. inputs: the same for all."""
    bindings = bind_symbols(graph, inputs)
    last_use = {name: i for i, node in enumerate(graph.nodes) for name in node.values}
    ranks: list[dict[str, Any]] = [dict(inputs) for _ in range(num_ranks)]

    def value(rank: int, operand: Operand) -> Any:
        if not isinstance(operand, str):
            return operand
        if operand not in ranks[rank]:
            ranks[rank][operand] = evaluate(at_rank(graph.constants[operand], rank), checkpoint)
        return ranks[rank][operand]

    for number, node in enumerate(graph.nodes):
        if node.op in COLLECTIVE:
            parts = [value(rank, node.inputs[0]) for rank in range(num_ranks)]
            results = [as_tuple(OPS[node.op].reference(*parts, **node.attrs))] * num_ranks
        else:
            results = [run_node(node, [value(rank, operand) for operand in node.inputs], bindings)
                       for rank in range(num_ranks)]
        for rank, found in enumerate(results):
            ranks[rank].update(zip(node.outputs, found, strict=True))
            for name in {*node.values, *node.outputs}:
                if last_use.get(name, -1) <= number and name not in graph.outputs:
                    ranks[rank].pop(name, None)
    return [{name: value(rank, name) for name in graph.outputs} for rank in range(num_ranks)]
