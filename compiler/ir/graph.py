"""The graph: a flat, frozen list of nodes in single-assignment form.

It prints, diffs, hashes, serialises and memory-plans directly. Passes take a Graph and return a new one.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..weights.expr import WeightExpr
from .types import TensorType

Operand = str | int | float | bool
"""An input of a node: the name of a value, or a literal scalar."""


@dataclass(frozen=True)
class Node:
    """One operation.

    op       key into the operator registry (`op.OPS`): arity, type inference, numpy reference
    inputs   value names and literal scalars
    outputs  value names, each defined once in the graph
    attrs    everything else that the operator needs: hashable, printable
    origin   where it comes from: "model.layers.3.mlp (modeling_llama.py:172)"
    """

    op: str
    inputs: tuple[Operand, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""

    @property
    def output(self) -> str:
        assert len(self.outputs) == 1, f"{self.op} has {len(self.outputs)} outputs"
        return self.outputs[0]

    @property
    def values(self) -> tuple[str, ...]:
        """The inputs that are values, literals left out."""
        return tuple(i for i in self.inputs if isinstance(i, str))

    def with_attrs(self, **attrs: Any) -> Node:
        return replace(self, attrs={**self.attrs, **attrs})


@dataclass(frozen=True)
class Graph:
    """A step of the model over all its tokens.

    inputs     names of the step's inputs (token_ids i32[T], positions i32[T], …)
    constants  name -> recipe over the tensors of the checkpoint; evaluated while the engine is written
    nodes      in execution order
    outputs    names; the first is the logits
    types      the type of every value: inputs, constants, node outputs
    probes     label (module path of a layer) -> value; for the comparison with the reference
    """

    inputs: tuple[str, ...]
    constants: Mapping[str, WeightExpr]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    types: Mapping[str, TensorType]
    probes: Mapping[str, str] = field(default_factory=dict)

    def producers(self) -> dict[str, Node]:
        return {name: node for node in self.nodes for name in node.outputs}

    def consumers(self) -> dict[str, list[Node]]:
        """Value -> the nodes that read it, a node once. Graph outputs are not consumers: look at `outputs`."""
        users: dict[str, list[Node]] = {name: [] for name in self.types}
        for node in self.nodes:
            for name in dict.fromkeys(node.values):
                users[name].append(node)
        return users

    def rebuilt(self, nodes: Iterable[Node], *, types: Mapping[str, TensorType] | None = None,
                constants: Mapping[str, WeightExpr] | None = None, outputs: Sequence[str] | None = None,
                inputs: Sequence[str] | None = None, probes: Mapping[str, str] | None = None) -> Graph:
        """A graph with other nodes; types and constants that nothing refers to any more are dropped."""
        nodes = tuple(nodes)
        outputs = tuple(outputs if outputs is not None else self.outputs)
        inputs = tuple(inputs if inputs is not None else self.inputs)
        types = {**self.types, **(types or {})}
        constants = {**self.constants, **(constants or {})}
        used = {*outputs, *inputs}
        for node in nodes:
            used.update(node.values)
            used.update(node.outputs)
        return Graph(inputs, {n: c for n, c in constants.items() if n in used}, nodes, outputs,
                     {n: t for n, t in types.items() if n in used},
                     {label: v for label, v in (probes if probes is not None else self.probes).items() if v in used})


class Renamer:
    """Value -> value substitution that follows chains; what a rewriting pass collects while it walks the nodes."""

    def __init__(self) -> None:
        self._map: dict[str, Operand] = {}

    def set(self, old: str, new: Operand) -> None:
        self._map[old] = new

    def __call__(self, operand: Operand) -> Operand:
        while isinstance(operand, str) and operand in self._map:
            operand = self._map[operand]
        return operand

    def node(self, node: Node) -> Node:
        return replace(node, inputs=tuple(self(i) for i in node.inputs))

    def name(self, value: str) -> str:
        renamed = self(value)
        assert isinstance(renamed, str)
        return renamed


def through_reshapes(value: str, producers: Mapping[str, Node]) -> str:
    """What the value is a reshape of: the same elements in the same order."""
    while (node := producers.get(value)) is not None and node.op == "reshape":
        value = node.values[0]
    return value
