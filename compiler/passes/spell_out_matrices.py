"""Write out the products that no matrix kernel of GPUs takes, so that loops compute them."""
from __future__ import annotations

from ingot.plugins.linear.gpu_schemes import GPU_SCHEMES
from ingot.plugins.linear.tactics import has_aligned_rows

from ..ir.graph import Graph, Node, Operand
from ..ir.types import Dim
from .match import rebuilt


def spell_out_matrices(graph: Graph) -> Graph:
    """linear(x, w) -> reduce_sum(x * w), and expert_linear likewise, where rows of w do not begin at multiples of 16
    bytes: matrices of a few channels, or an odd number of them. Their weights stay float32."""
    nodes: list[Node] = []
    for node in graph.nodes:
        scheme = GPU_SCHEMES.get(node.attrs.get("scheme", "")) if node.op in ("linear", "expert_linear") else None
        if scheme is None or has_aligned_rows(scheme.format, scheme.activation, _channels(graph, node)):
            nodes.append(node)
        else:
            nodes += _Product(graph, node).nodes()
    return rebuilt(graph, nodes)


def _channels(graph: Graph, node: Node) -> int:
    return int(graph.types[node.values[1 if node.op == "linear" else 2]].shape[-1])


class _Product:
    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph, self.node, self.made = graph, node, list[Node]()

    def nodes(self) -> list[Node]:
        """x [.., 1, K] * w [N, K], or the matrices [.., N, K] of the chosen experts, summed over K; the bias."""
        node, types = self.node, self.graph.types
        chosen = node.op == "expert_linear"
        x, *ids, w = node.values[:3 if chosen else 2]
        bias = node.values[3:] if chosen else node.values[2:]
        out, channels = types[node.output].shape, _channels(self.graph, node)
        matrix: Operand = self._add("take", w, ids[0], dim=0) if chosen else w
        rows: tuple[Dim, ...] = types[x].shape[:-1]
        if chosen and len(rows) < len(out) - 1:
            rows = (*rows, 1)
        wide = self._add("mul", self._add("reshape", x, shape=(*rows, 1, channels)), matrix)
        total = self._add("reduce_sum", wide, dims=(len(out),), keepdim=False, output="" if bias else node.output)
        if bias:
            added = self._add("take", bias[0], ids[0], dim=0) if chosen else bias[0]
            self._add("add", total, added, output=node.output)
        return self.made

    def _add(self, op: str, *inputs: Operand, output: str = "", **attrs: object) -> str:
        name = output or f"{self.node.output}.product{len(self.made)}"
        self.made.append(Node(op, inputs, (name,), attrs, self.node.origin))
        return name
