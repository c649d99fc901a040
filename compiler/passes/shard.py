"""Divide a graph among the ranks of a tensor-parallel engine (Shoeybi et al. 2019, "Megatron-LM").

Each rank holds a share of the heads and of the inner channels of every MLP and expert: the matrices that lead there are
cut by output channels, those that lead back by input channels, and the ranks' results are summed. All ranks run the
same graph on parts of the same shape; only their constants differ (weights/sharding.py).
"""
from __future__ import annotations

from dataclasses import replace

from ..ir.graph import Graph, Node
from ..ir.types import TensorType
from ..ir.verify import infer_types
from ..weights.expr import WeightExpr
from ..weights.sharding import Segment, on_first, shard
from .shard_region import CannotShard, Region, Split, column_split, weight_axes

_CARRIES_SUMS = ("reshape", "permute", "slice", "gather_rows", "neg", "reduce_sum")
"""A sum over ranks may be taken after these as well as before."""


def shard_graph(graph: Graph, num_ranks: int) -> Graph:
    """The graph of each of `num_ranks` ranks. What cannot be divided is computed on every rank.

    Heads of keys and values of which there are fewer than ranks are held by several. Raises CannotShard, with what is
    in the way, if nothing can be divided.
    """
    if num_ranks == 1:
        return graph
    region = Region.empty(graph, num_ranks)
    obstacles: list[str] = []
    for node in graph.nodes:
        if node.op == "attention":
            heads = Split(1, (Segment(int(graph.types[node.output].shape[1]), num_ranks),))
            region = _tried(region, node.output, heads, node, obstacles)
    for node in graph.nodes:
        axes = weight_axes(node, graph)
        if axes is None or node.output in region.kinds or _is_head(graph, node):
            continue
        k = int(graph.types[node.values[0]].shape[-1])
        split = Split(len(graph.types[node.values[0]].shape) - 1, (Segment(k, num_ranks),))
        region = _tried(region, node.values[0], split, node, [])
    if not region.kinds:
        raise CannotShard(f"this model cannot be divided among {num_ranks} ranks:\n  " + "\n  ".join(obstacles[:3]))
    return _Rewriting(graph, region, num_ranks).run()


def _tried(region: Region, value: str, split: Split, node: Node, obstacles: list[str]) -> Region:
    """The region grown from `value`, or as it was if that cannot be."""
    grown = region.copy()
    try:
        grown.grow(value, split)
    except CannotShard as error:
        obstacles.append(f"{node.origin}: {error}")
        return region
    return grown


def _is_head(graph: Graph, node: Node) -> bool:
    return "L" in graph.types[node.output].shape


class _Rewriting:
    """Writes the divided graph: parts of constants, local sizes, and sums where ranks meet."""

    def __init__(self, graph: Graph, region: Region, num_ranks: int) -> None:
        self.graph, self.region, self.num_ranks = graph, region, num_ranks
        self.nodes: list[Node] = []
        self.types: dict[str, TensorType] = dict(graph.types)
        self.constants: dict[str, WeightExpr] = {}
        self.partial: set[str] = set()
        self.summed: dict[str, str] = {}
        self.consumers = region.consumers
        self.probed = {*graph.probes.values(), *graph.outputs}

    def run(self) -> Graph:
        for value, split in self.region.splits.items():
            self.types[value] = split.local_type(self.graph.types[value])
        for node in self.graph.nodes:
            self._rewrite(node)
        probes = {label: self.summed.get(value, value) for label, value in self.graph.probes.items()}
        outputs = [self.summed.get(value, value) for value in self.graph.outputs]
        return self.graph.rebuilt(self.nodes, types=self.types, constants=self.constants, outputs=outputs,
                                  probes=probes)

    def _rewrite(self, node: Node) -> None:
        kind = self.region.kinds.get(node.outputs[0])
        if kind is None and weight_axes(node, self.graph) is not None and _is_head(self.graph, node) \
                and int(self.graph.types[node.output].shape[-1]) % self.num_ranks == 0:
            self._head(node)
            return
        carries = self._carries(node)
        inputs = [self._operand(node, position, carries) for position in range(len(node.inputs))]
        attrs = self.region.local_attrs(node)
        self.nodes.append(replace(node, inputs=tuple(inputs), attrs=attrs))
        if kind == "row" or carries:
            self._is_partial(node)

    def _operand(self, node: Node, position: int, carries: bool) -> str | int | float | bool:
        operand = node.inputs[position]
        if not isinstance(operand, str):
            return operand
        if operand in self.graph.constants:
            return self._constant(node, position, operand)
        return operand if carries else self.summed.get(operand, self._reduced(operand))

    def _constant(self, node: Node, position: int, name: str) -> str:
        expr = self.graph.constants[name]
        split = self.region.constant_split(node, position)
        if split is not None:
            name = f"{name}.part{split.axis}"
            self.constants[name] = shard(expr, split.axis, split.segments, self.num_ranks)
        elif self.region.kinds.get(node.outputs[0]) == "row" and self._is_bias(node, position):
            name = f"{name}.once"
            self.constants[name] = on_first(expr, self.num_ranks)
        else:
            return name
        self.types[name] = self.constants[name].type
        return name

    def _is_bias(self, node: Node, position: int) -> bool:
        axes = weight_axes(node, self.graph)
        return axes is not None and position > axes.position

    def _carries(self, node: Node) -> bool:
        """Whether the node's result is a sum over ranks that may be taken later."""
        partial = [value for value in node.values if value in self.partial]
        if not partial or any(len(self.consumers[value]) > 1 for value in partial):
            return False
        others = [value for value in node.values if value not in self.partial]
        if node.op in _CARRIES_SUMS:
            return True
        if node.op in ("add", "sub"):
            return len(partial) == len(node.inputs)
        if node.op == "mul":
            return len(partial) == 1 and not any(value in self.region.splits for value in others)
        return node.op == "div" and partial == [node.inputs[0]] and not any(v in self.region.splits for v in others)

    def _is_partial(self, node: Node) -> None:
        self.partial.add(node.output)
        if node.output in self.probed:
            self._reduced(node.output)

    def _reduced(self, value: str) -> str:
        """The sum of a value over the ranks, made once; the value itself where it is whole."""
        if value not in self.partial:
            return value
        self.summed[value] = name = f"{value}.sum"
        origin = next(node.origin for node in reversed(self.nodes) if value in node.outputs)
        self.nodes.append(Node("all_reduce", (value,), (name,), {"ranks": self.num_ranks}, origin))
        self.types[name] = self.types[value]
        return name

    def _head(self, node: Node) -> None:
        """Each rank computes the logits of a part of the vocabulary; all get all of them."""
        split = column_split(self.graph.types[node.output], self.num_ranks)
        axes = weight_axes(node, self.graph)
        assert axes is not None
        inputs: list[str | int | float | bool] = [self.summed.get(o, self._reduced(o)) if isinstance(o, str) else o
                                                  for o in node.inputs]
        for position, axis in ((axes.position, axes.rows), (axes.position + 1, axes.bias)):
            if position < len(node.inputs):
                name = str(node.inputs[position])
                inputs[position] = part = f"{name}.part{axis}"
                self.constants[part] = shard(self.graph.constants[name], axis, split.segments, self.num_ranks)
                self.types[part] = self.constants[part].type
        part = f"{node.output}.part"
        made = replace(node, inputs=tuple(inputs), outputs=(part,))
        self.types.update(zip(made.outputs, infer_types(made, self.types), strict=True))
        self.nodes += [made, Node("all_gather", (part,), node.outputs, {"ranks": self.num_ranks}, node.origin)]

