"""Room for LoRA adapters (Hu et al. 2021): each chosen linear layer gets the sum of a product of low rank.

    y = linear(x, w)  ->  y' = lora_expand(linear(x, w), lora_shrink(x))

Layers that read the same input share a shrink. The matrices lie in slots of the device's memory, and each token's
sequence says which (Punica, Chen et al. 2023; S-LoRA, Sheng et al. 2023).
"""
from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ingot.runtime.errors import RequestError
from ingot.runtime.lora import ALIGNMENT, ELEMENT_BYTES, LoraModule, LoraRoom

from ..ir.graph import Graph, Node, Renamer
from ..ir.ops_lora import ADAPTERS, SLOTS
from ..ir.types import DType, TensorType, product
from .match import rebuilt
from .matrices import Matrix, find_matrices

_APART = {"head": "the head", "embedding": "an embedding", "router": "a router", "experts": "a matrix of experts"}


@dataclass(frozen=True)
class LoraRequest:
    """Room that is asked for. modules: names of linear layers, whole or their last parts ("q_proj",
    "self_attn.q_proj"); none: all that adapters may change."""

    max_rank: int
    max_adapters: int
    modules: tuple[str, ...] = ()


def add_lora(graph: Graph, request: LoraRequest) -> Graph:
    """Room for every linear layer that the request names. Neither head, embeddings, routers nor experts have any.

    Raises RequestError for a name that no such layer has.
    """
    chosen = _chosen(graph, request)
    groups: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.outputs[0] in chosen:
            groups.setdefault(node.values[0], []).append(node)
    layout = _Layout(graph, request.max_rank)
    shrinks = {nodes[0].outputs[0]: layout.shrink(x, [(chosen[node.output], node) for node in nodes])
               for x, nodes in groups.items()}
    renamed = Renamer()
    nodes: list[Node] = []
    for node in graph.nodes:
        node = renamed.node(node)
        nodes.append(node)
        if node.outputs[0] in chosen:
            if node.outputs[0] in shrinks:
                nodes.append(renamed.node(shrinks[node.output]))
            nodes.append(layout.expand(node))
            renamed.set(node.output, nodes[-1].output)
    inputs = {ADAPTERS: TensorType(("T",), DType.I32),
              SLOTS: TensorType((request.max_adapters, layout.size), DType.U8)}
    probes = {label: renamed.name(value) for label, value in graph.probes.items()}
    return rebuilt(graph, nodes, inputs=inputs, probes=probes)


def lora_room(graph: Graph) -> LoraRoom | None:
    """What the manifest says of the room in a graph; None where there is none."""
    if SLOTS not in graph.inputs:
        return None
    inner: dict[str, tuple[int, int]] = {}
    outer: dict[str, tuple[int, int]] = {}
    rank = 0
    for node in graph.nodes:
        if node.op == "lora_shrink":
            rank = node.attrs["rank"]
            width = int(graph.types[node.values[0]].shape[-1])
            inner |= {name: (offset, width) for name, offset in node.attrs["modules"]}
        elif node.op == "lora_expand":
            outer |= {name: (offset, width) for name, _, width, offset, _ in node.attrs["parts"]}
    assert inner.keys() == outer.keys(), inner.keys() ^ outer.keys()
    modules = tuple(LoraModule(name, width, outer[name][1], offset, outer[name][0])
                    for name, (offset, width) in inner.items())
    count, size = map(int, graph.types[SLOTS].shape)
    return LoraRoom(rank, count, size, modules)


@dataclass
class _Layout:
    """Where matrices lie in a slot: of each group first all a, equally far apart, then all b. size: bytes so far."""

    graph: Graph
    rank: int
    size: int = 0

    def __post_init__(self) -> None:
        self._places: dict[str, tuple[str, int, int, str]] = {}

    def shrink(self, x: str, members: Sequence[tuple[str, Node]]) -> Node:
        """The node for linear layers that read x, given with their names; says where all of their matrices lie."""
        first, value = members[0][1], f"{x}.low_rank"
        modules = [(name, self._take(int(self.graph.types[x].shape[-1]))) for name, _ in members]
        for number, (name, node) in enumerate(members):
            width = int(self.graph.types[node.output].shape[-1])
            self._places[node.output] = name, self._take(width), number * self.rank, value
        attrs = {"rank": self.rank, "modules": tuple(modules)}
        return Node("lora_shrink", (x, ADAPTERS, SLOTS), (value,), attrs, first.origin)

    def expand(self, linear: Node) -> Node:
        name, offset, column, h = self._places[linear.output]
        width = int(self.graph.types[linear.output].shape[-1])
        attrs = {"rank": self.rank, "parts": ((name, 0, width, offset, column),)}
        return Node("lora_expand", (linear.output, h, ADAPTERS, SLOTS), (f"{linear.output}.adapted",), attrs,
                    linear.origin)

    def _take(self, features: int) -> int:
        begin = self.size
        self.size += -(-self.rank * features * ELEMENT_BYTES // ALIGNMENT) * ALIGNMENT
        return begin


def _chosen(graph: Graph, request: LoraRequest) -> dict[str, str]:
    """Output of a linear layer that gets room -> its name."""
    matrices = find_matrices(graph)
    able: dict[str, str] = {}
    for matrix in matrices:
        for node in matrix.nodes if matrix.role == "linear" else ():
            if (name := _module(graph, node)) is not None:
                able[node.output] = name
    times = Counter(able.values())  # a module that runs twice would need two places for its sums
    able = {output: name for output, name in able.items() if times[name] == 1}
    for wanted in request.modules:
        if not any(_is_called(name, wanted) for name in able.values()):
            raise _unknown(wanted, list(able.values()), matrices)
    chosen = {output: name for output, name in able.items()
              if not request.modules or any(_is_called(name, wanted) for wanted in request.modules)}
    if not chosen:
        raise RequestError("room for LoRA adapters is asked for, but no linear layer of this model can have any; leave "
                           "--lora-max-rank out")
    return chosen


def _module(graph: Graph, node: Node) -> str | None:
    """The module of the model that a node is, if adapters may change it: a row for each token, a weight of its own. Not
    one of a single output: a shared expert's gate, which launches compute with the router."""
    name = node.origin.partition(" (")[0]
    own = name and node.values[1].startswith(f"{name}.") and "scheme" in node.attrs
    *rows, width = graph.types[node.output].shape
    return name if own and product(tuple(rows)) == "T" and width != 1 and node.output not in graph.outputs else None


def _is_called(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith(f".{wanted}")


def _unknown(wanted: str, able: Sequence[str], matrices: Sequence[Matrix]) -> RequestError:
    for matrix in matrices:
        if matrix.role in _APART and any(_is_called(name, wanted) for name in matrix.names):
            return RequestError(f"--lora-modules {wanted}: {matrix.name} is {_APART[matrix.role]} of the model. There "
                                "is room for linear layers alone: neither for head, embeddings, routers nor experts")
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in able))
    near = difflib.get_close_matches(wanted, kinds, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]}?" if near else ""
    return RequestError(f"--lora-modules {wanted}: no linear layer of the model is called so.{hint}\n  It has: "
                        f"{', '.join(kinds)}; whole names such as {able[0] if able else 'none'} are names too")
