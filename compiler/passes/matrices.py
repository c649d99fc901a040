"""The weight matrices of a graph: what users call them, and what each is for."""
from __future__ import annotations

from dataclasses import dataclass

from ..ir.graph import Graph, Node, through_reshapes
from ..weights.expr import WeightExpr

WEIGHT_INPUT = {"embedding": 0, "linear": 1, "expert_linear": 2}
"""Operator with a weight matrix -> which of its inputs that is."""


@dataclass(frozen=True)
class Matrix:
    """A constant weight, and the nodes that use it: more than one where a model ties its embedding to its head.

    names    of its layers, modules of the model: ("model.layers.0.mlp.down_proj",), ("lm_head", "model.embed_tokens");
             the parameter's, where that is another
    role     "head" (makes the logits), "router" (its output decides which experts run), "experts", "linear",
             "embedding"
    outputs  of the nodes
    """

    names: tuple[str, ...]
    role: str
    weight: WeightExpr
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the constants, as PackedWeight has them."""
        return tuple(dict.fromkeys(node.values[WEIGHT_INPUT[node.op]].removesuffix(".permute") for node in self.nodes))


def find_matrices(graph: Graph) -> list[Matrix]:
    """In the order in which they are first used."""
    found, heads = routers(graph), _heads(graph)
    nodes: dict[WeightExpr, list[Node]] = {}
    for node in graph.nodes:
        if node.op in WEIGHT_INPUT and (weight := graph.constants.get(node.values[WEIGHT_INPUT[node.op]])) is not None:
            nodes.setdefault(weight, []).append(node)
    return [_matrix(weight, users, found, heads) for weight, users in nodes.items()]


def _matrix(weight: WeightExpr, nodes: list[Node], routers: set[str], heads: set[str]) -> Matrix:
    """Several layers of one weight have one role: that which asks most of it."""
    roles = {_role(node, routers, heads) for node in nodes}
    role = next(role for role in ("router", "head", "experts", "linear", "embedding") if role in roles)
    names: list[str] = []
    for node in sorted(nodes, key=lambda node: node.op == "embedding"):
        parameter = node.values[WEIGHT_INPUT[node.op]].removesuffix(".permute").removesuffix(".weight")
        module = node.origin.partition(" (")[0]
        # The experts of a layer are several parameters of one module.
        names += [parameter] if node.op == "expert_linear" or not module else [module, parameter]
    return Matrix(tuple(dict.fromkeys(names)), role, weight, tuple(node.output for node in nodes), tuple(nodes))


def _role(node: Node, routers: set[str], heads: set[str]) -> str:
    if node.op != "linear":
        return "experts" if node.op == "expert_linear" else "embedding"
    return "router" if node.output in routers else "head" if node.output in heads else "linear"


def _heads(graph: Graph) -> set[str]:
    """Outputs of linear layers over gathered rows."""
    return {node.output for node in graph.nodes if node.op == "linear" and "L" in graph.types[node.output].shape}


def routers(graph: Graph) -> set[str]:
    """Values from which a topk is reached without passing another matrix."""
    producers, found = graph.producers(), set()
    stack = [value for node in graph.nodes if node.op in ("topk", "sort", "argmax") for value in node.values]
    while stack:
        value = stack.pop()
        node = producers.get(value)
        if value in found or node is None:
            continue
        found.add(value)
        if node.op not in WEIGHT_INPUT:
            stack.extend(node.values)
    return found


def shared_gates(graph: Graph) -> set[str]:
    """Outputs of matrices of one row beside routers: their sigmoid weighs an expert that all tokens go through."""
    found, producers = routers(graph), graph.producers()
    linears = [(node, through_reshapes(node.values[0], producers)) for node in graph.nodes if node.op == "linear"]
    beside = {x for node, x in linears if node.output in found}
    return {node.output for node, x in linears if x in beside and graph.types[node.output].shape[-1] == 1}
