"""Bring operators along one dimension into the form that kernels compute: along the last one, in memory."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..ir.graph import Graph, Node, Operand
from ..ir.types import DType
from ..ir.verify import operand_type
from .match import rebuilt

_ALONG = ("softmax", "cumsum", "sort", "topk", "argmax", "scatter")


def bring_last(graph: Graph) -> Graph:
    """op(x; dim) -> permute(op(permute(x); last dim)) for the operators whose kernels work on rows.

    Booleans and, for softmax, integers are cast before; a literal that is scattered becomes a value.
    """
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += _Replacement(graph, node).nodes() if node.op in _ALONG else [node]
    return rebuilt(graph, nodes)


@dataclass
class _Replacement:
    graph: Graph
    node: Node
    made: list[Node] = field(default_factory=list)

    def nodes(self) -> list[Node]:
        node = self.node
        rank, dim = len(self.graph.types[node.values[0]].shape), node.attrs["dim"]
        order = (*(axis for axis in range(rank) if axis != dim), dim)
        inputs = tuple(self._operand(operand, order) for operand in node.inputs)
        if dim == rank - 1:
            return [*self.made, Node(node.op, inputs, node.outputs, node.attrs, node.origin)]
        inner = tuple(f"{name}.last" for name in node.outputs)
        self.made.append(Node(node.op, inputs, inner, {**node.attrs, "dim": rank - 1}, node.origin))
        for name, output in zip(inner, node.outputs, strict=True):
            if len(self.graph.types[output].shape) < rank or node.attrs.get("keepdim"):
                self._add("reshape", name, output, shape=self.graph.types[output].shape)
            else:
                self._add("permute", name, output, dims=tuple(order.index(axis) for axis in range(rank)))
        return self.made

    def _operand(self, operand: Operand, order: tuple[int, ...]) -> Operand:
        if not isinstance(operand, str):
            operand = self._add("full", None, shape=(), value=operand, dtype=operand_type(operand, {}).dtype)
            wanted = self.graph.types[self.node.values[0]].dtype
            return operand if self.made[-1].attrs["dtype"] == wanted else self._add("cast", operand, dtype=wanted)
        type_ = self.graph.types[operand]
        wanted = DType.F32 if self.node.op == "softmax" else DType.I32
        if self.node.op != "scatter" and not type_.dtype.is_float and type_.dtype != wanted:
            operand = self._add("cast", operand, dtype=wanted)
        if type_.shape and order != tuple(range(len(order))):
            operand = self._add("permute", operand, dims=order)
        return operand

    def _add(self, op: str, operand: Operand | None, name: str | None = None, **attrs: Any) -> str:
        name = name or f"{self.node.outputs[0]}.in{len(self.made)}"
        self.made.append(Node(op, () if operand is None else (operand,), (name,), attrs, self.node.origin))
        return name
