"""Add what stands beside a mixture of experts to the residual first, and the experts' sum last."""
from __future__ import annotations

from ..ir.graph import Graph, Node, Operand
from .match import Matcher, eliminate_dead_code, rebuilt


def add_experts_last(graph: Graph) -> Graph:
    """add(r, add(experts, shared)) -> add(experts, add(r, shared)), where nothing else reads the inner sum.

    Each sum is then the epilogue of a launch that there is anyway: the first that of the shared experts' matrix, the
    second that of the sum over a token's choices, which can take in the norm behind it as well.
    """
    m = Matcher(graph)
    kept = {*graph.outputs, *graph.probes.values()}
    placed: dict[str, list[Node]] = {}  # output of an outer sum -> what takes its place
    for outer in graph.nodes:
        found = _parts(m, outer, kept) if outer.op == "add" else None
        if found is not None:
            placed[outer.output] = _sums(m, outer, *found)
    if not placed:
        return graph
    return eliminate_dead_code(rebuilt(graph, [new for node in graph.nodes
                                               for new in placed.get(node.outputs[0], [node])]))


def _sums(m: Matcher, outer: Node, residual: Operand, experts: Operand, shared: Operand) -> list[Node]:
    """In the shape of the inner sum, so that no reshape stands behind the matrices."""
    shape, name, origin = m.type(experts).shape, outer.output, outer.origin
    if shape == m.type(residual).shape:
        return [Node("add", (residual, shared), (f"{name}.first",), {}, origin),
                Node("add", (experts, f"{name}.first"), outer.outputs, {}, origin)]
    return [Node("reshape", (residual,), (f"{name}.flat",), {"shape": shape}, origin),
            Node("add", (f"{name}.flat", shared), (f"{name}.first",), {}, origin),
            Node("add", (experts, f"{name}.first"), (f"{name}.last",), {}, origin),
            Node("reshape", (f"{name}.last",), outer.outputs, {"shape": m.type(name).shape}, origin)]


def _parts(m: Matcher, outer: Node, kept: set[str]) -> tuple[Operand, Operand, Operand] | None:
    """(residual, experts, shared)"""
    for value, residual in (outer.inputs, outer.inputs[::-1]):
        inner = _read_once(m, value, kept)
        if inner is None or m.is_constant(residual) or m.type(residual) != m.type(outer.output):
            continue
        for experts, shared in (inner.inputs, inner.inputs[::-1]):
            if _sums_experts(m, experts) and m.type(shared) == m.type(experts) == m.type(inner.output):
                return residual, experts, shared
    return None


def _read_once(m: Matcher, value: Operand, kept: set[str]) -> Node | None:
    """The sum that a value is, or is a reshape of, if nothing else reads it."""
    node = m.node(value, "add", "reshape")
    while node is not None and m.uses(node.output) == 1 and node.output not in kept:
        if node.op == "add":
            return node
        node = m.node(node.inputs[0], "add", "reshape")
    return None


def _sums_experts(m: Matcher, value: Operand) -> bool:
    total = m.node(m.through_reshapes(value), "reduce_sum")
    product = m.node(total.inputs[0], "mul") if total else None
    return product is not None and any(m.node(factor, "expert_linear") for factor in product.inputs)
