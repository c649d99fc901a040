"""One order and one set of names for what a graph computes.

The order in which a model's code computes independent values may depend on anything: some iterate over sets, whose
order changes from process to process. An engine's bytes must not.
"""
from __future__ import annotations

from dataclasses import replace

from ..ir.graph import Graph, Node


def canonical(graph: Graph) -> Graph:
    """Nodes stand where the first value that needs them does, operands in their order; values are numbered v0, v1, …
    in that order. Constants keep their names, in the order of their first use."""
    order = _by_first_use(graph)
    names = {name: name for name in (*graph.inputs, *graph.constants)}
    for node in order:
        for value in node.outputs:
            names[value] = f"v{len(names) - len(graph.inputs) - len(graph.constants)}"
    nodes = [replace(node, inputs=tuple(names[i] if isinstance(i, str) else i for i in node.inputs),
                     outputs=tuple(names[value] for value in node.outputs)) for node in order]
    used = dict.fromkeys(value for node in nodes for value in node.values if value in graph.constants)
    kept = {**{name: graph.constants[name] for name in used}, **graph.constants}
    return Graph(graph.inputs, kept, tuple(nodes), tuple(names[value] for value in graph.outputs),
                 {names[value]: type_ for value, type_ in graph.types.items() if value in names},
                 {label: names[value] for label, value in graph.probes.items()})


def _by_first_use(graph: Graph) -> list[Node]:
    """Depth first from the outputs, then from what is only looked at."""
    producers, placed, order = graph.producers(), set[str](), list[Node]()
    for root in (*graph.outputs, *graph.probes.values()):
        stack = [(root, False)]
        while stack:
            value, ready = stack.pop()
            node = producers.get(value)
            if node is None or node.outputs[0] in placed:
                continue
            if ready:
                placed.add(node.outputs[0])
                order.append(node)
            else:
                stack.append((value, True))
                stack.extend((operand, False) for operand in reversed(node.values))
    return order
