"""A graph as JSON and back: equal graphs, and equal dumps. For the build cache."""
from __future__ import annotations

import json
from typing import Any

from ..weights.expr import WeightExpr, attr_from_json, attr_to_json
from .graph import Graph, Node
from .types import DType, TensorType


def graph_to_json(graph: Graph) -> bytes:
    return json.dumps({
        "inputs": graph.inputs, "outputs": graph.outputs, "probes": dict(graph.probes),
        "types": {name: [*type_.shape, type_.dtype.value] for name, type_ in graph.types.items()},
        "constants": {name: expr.to_json() for name, expr in graph.constants.items()},
        "nodes": [[node.op, node.inputs, node.outputs, {k: attr_to_json(v) for k, v in node.attrs.items()}, node.origin]
                  for node in graph.nodes],
    }, separators=(",", ":")).encode()


def graph_from_json(data: bytes) -> Graph:
    entries: dict[str, Any] = json.loads(data)
    nodes = tuple(Node(op, tuple(inputs), tuple(outputs), {k: attr_from_json(v) for k, v in attrs.items()}, origin)
                  for op, inputs, outputs, attrs, origin in entries["nodes"])
    types = {name: TensorType(tuple(shape), DType(dtype)) for name, (*shape, dtype) in entries["types"].items()}
    constants = {name: WeightExpr.from_json(expr) for name, expr in entries["constants"].items()}
    return Graph(tuple(entries["inputs"]), constants, nodes, tuple(entries["outputs"]), types, entries["probes"])
