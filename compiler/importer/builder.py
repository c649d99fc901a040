"""Collects the nodes of a graph while it is converted, with types inferred as they are added.

Views of constants become part of the constant's recipe, and what is no work at all (an identity, a view of a view)
adds no node, so that the graph of every model starts out in one normal form (simplify.py holds the rules).
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..ir.graph import Graph, Node, Operand
from ..ir.registry import OPS
from ..ir.types import TensorType
from ..ir.verify import infer_types, operand_type
from ..weights.expr import WeightExpr, apply

_FOLDED = ("reshape", "permute", "slice", "cat", "cast")
"""Operators that move a constant's elements without computing."""


class GraphBuilder:
    """fold_all: everything is a constant; every operator becomes part of a recipe and no node is made."""

    def __init__(self, fold_all: bool = False) -> None:
        self.fold_all = fold_all
        self.types: dict[str, TensorType] = {}
        self.constants: dict[str, WeightExpr] = {}
        self.producers: dict[str, Node] = {}
        self.probes: dict[str, str] = {}
        self.origin = ""
        self._inputs: list[str] = []
        self._nodes: list[Node] = []
        self._names_of_constants: dict[WeightExpr, str] = {}
        self._known: dict[Any, tuple[str, ...]] = {}

    def input(self, name: str, type_: TensorType) -> str:
        self._inputs.append(name)
        self.types[name] = type_
        return name

    def constant(self, expr: WeightExpr, name: str) -> str:
        """The constant's name; equal recipes (tied weights) are one constant, named by the first."""
        if expr in self._names_of_constants:
            return self._names_of_constants[expr]
        unique, number = name, 1
        while unique in self.types:
            number += 1
            unique = f"{name}.{number}"
        self._names_of_constants[expr] = unique
        self.constants[unique] = expr
        self.types[unique] = expr.type
        return unique

    def add(self, op: str, inputs: Sequence[Operand], **attrs: Any) -> tuple[str, ...]:
        """A node as it is given, or the equal one that is there already; the names of its outputs."""
        key = (op, tuple((type(i), i) for i in inputs), tuple(attrs.items()))
        if key in self._known:
            return self._known[key]
        node = Node(op, tuple(inputs), (), attrs, self.origin)
        types = infer_types(node, self.types)
        if self.fold_all or (op in _FOLDED and node.values and all(v in self.constants for v in node.values)):
            return tuple(self._fold(node, type_, i) for i, type_ in enumerate(types))
        outputs = tuple(f"v{len(self.producers) + i}" for i in range(len(types)))
        node = Node(op, node.inputs, outputs, attrs, self.origin)
        self._nodes.append(node)
        for name, type_ in zip(outputs, types, strict=True):
            self.types[name] = type_
            self.producers[name] = node
        self._known[key] = outputs
        return outputs

    def _fold(self, node: Node, type_: TensorType, output: int) -> str:
        operands = [self.constants[i] if isinstance(i, str) else i for i in node.inputs]
        expr = apply(node.op, operands, type_, output, **node.attrs)
        return self.constant(expr, f"{node.values[0]}.{node.op}" if node.values else node.op)

    def produced_by(self, value: Operand, op: str) -> Node | None:
        """The node that makes a value, if it is that operator."""
        node = self.producers.get(value) if isinstance(value, str) else None
        return node if node is not None and node.op == op else None

    def type_of(self, operand: Operand) -> TensorType:
        return operand_type(operand, self.types)

    def graph(self, outputs: Sequence[str]) -> Graph:
        """The graph without the nodes that no output needs."""
        needed = set(outputs)
        nodes: list[Node] = []
        for node in reversed(self._nodes):
            if needed.intersection(node.outputs):
                nodes.append(node)
                needed.update(node.values)
        nodes.reverse()
        defined = {*self._inputs, *(name for node in nodes for name in node.outputs)}
        used = defined | needed
        return Graph(tuple(self._inputs), {n: e for n, e in self.constants.items() if n in needed}, tuple(nodes),
                     tuple(outputs), {n: t for n, t in self.types.items() if n in used},
                     {label: value for label, value in self.probes.items() if value in defined})


def is_elementwise(op: str) -> bool:
    return OPS[op].kind == "elementwise"

