"""Write the scheme of every matrix into the graph."""
from __future__ import annotations

from ..ir.graph import Graph
from ..precision import Precision

_ROLES = {"linear": "linear", "expert_linear": "experts", "embedding": "embedding"}


def assign_precision(graph: Graph, precision: Precision) -> Graph:
    """linear, expert_linear and embedding nodes with constant weights get attrs["scheme"].

    A linear layer is the head if its rows are the gathered ones, a router if its output leads to a topk. An embedding
    that is the head's own weight takes the head's scheme, so that the two are stored once.
    """
    routers, heads = _routers(graph), _heads(graph)
    head_weights = {graph.constants[node.values[1]] for node in graph.nodes
                    if node.op == "linear" and node.output in heads and node.values[1] in graph.constants}
    nodes = []
    for node in graph.nodes:
        if node.op in _ROLES:
            weight = node.values[{"embedding": 0, "linear": 1, "expert_linear": 2}[node.op]]
            role = _ROLES[node.op]
            if node.op == "linear":
                role = "router" if node.output in routers else "head" if node.output in heads else role
            elif node.op == "embedding" and graph.constants.get(weight) in head_weights:
                role = "head"
            if weight in graph.constants:
                node = node.with_attrs(scheme=precision.scheme(role))
        nodes.append(node)
    return graph.rebuilt(nodes)


def _heads(graph: Graph) -> set[str]:
    """Outputs of linear layers over gathered rows."""
    return {node.output for node in graph.nodes if node.op == "linear" and "L" in graph.types[node.output].shape}


def _routers(graph: Graph) -> set[str]:
    """Values from which a topk is reached without passing another matrix."""
    producers, found = graph.producers(), set()
    stack = [value for node in graph.nodes if node.op in ("topk", "sort", "argmax") for value in node.values]
    while stack:
        value = stack.pop()
        node = producers.get(value)
        if value in found or node is None:
            continue
        found.add(value)
        if node.op not in _ROLES:
            stack.extend(node.values)
    return found
