"""Fuse the gate of an MLP into the matrix that makes both of its factors."""
from __future__ import annotations

from dataclasses import replace

from ..ir.graph import Graph, Node, Operand
from ..weights.expr import WeightExpr, concat, slice_
from .match import Matcher, eliminate_dead_code, rebuilt

_MATRICES = {"linear": 1, "expert_linear": 2}
"""Operator -> which operand is the matrix; the operand behind it is the bias."""


def fuse_gate(graph: Graph) -> Graph:
    """y = linear(x, [a; b]); mul(act(y[a]), y[b])  ->  linear(x, [a; b]; gated=act). expert_linear likewise.

    Where nothing else reads the halves. A kernel finishes both in registers: they never go to memory.
    """
    m = Matcher(graph)
    constants: dict[str, WeightExpr] = {}
    nodes = [_gated(m, node, constants) or node for node in graph.nodes]
    return eliminate_dead_code(rebuilt(graph, nodes, constants=constants))


def _gated(m: Matcher, node: Node, constants: dict[str, WeightExpr]) -> Node | None:
    if node.op != "mul":
        return None
    for first, second in (node.inputs, node.inputs[::-1]):
        activated = m.node(first, "silu", "gelu")
        if activated is None or m.uses(activated.output) != 1:
            continue
        gate, other = _half(m, activated.inputs[0]), _half(m, second)
        if gate is None or other is None or gate[0] is not other[0] or gate[1] == other[1]:
            continue
        matrix = gate[0]
        if m.uses(matrix.output) != 2 or "gated" in matrix.attrs \
                or m.type(node.output).shape != (*m.type(matrix.output).shape[:-1], m.type(node.output).shape[-1]):
            continue
        inputs = matrix.inputs
        if gate[1] != 0:
            inputs = _swapped(m, matrix, constants)
        return replace(matrix, inputs=inputs, outputs=node.outputs, attrs={**matrix.attrs, "gated": _name(activated)},
                       origin=matrix.origin)
    return None


def _half(m: Matcher, value: Operand) -> tuple[Node, int] | None:
    """(matrix, 0 or 1) if the value is the lower or the upper half of a matrix' features, and read once."""
    half = m.node(value, "slice")
    if half is None or m.uses(half.output) != 1:
        return None
    matrix = m.node(half.inputs[0], *_MATRICES)
    shape = m.type(half.inputs[0]).shape
    width = int(shape[-1])
    if matrix is None or half.attrs["dim"] != len(shape) - 1 or half.attrs.get("step", 1) != 1 or width % 2:
        return None
    ends = half.attrs["start"], half.attrs["stop"]
    return (matrix, 2 * ends[0] // width) if ends in ((0, width // 2), (width // 2, width)) else None


def _swapped(m: Matcher, matrix: Node, constants: dict[str, WeightExpr]) -> tuple[Operand, ...]:
    """The matrix' operands with the upper half of the features first."""
    inputs = list(matrix.inputs)
    for number in range(_MATRICES[matrix.op], len(inputs)):
        name = str(inputs[number])
        expr = m.graph.constants[name]
        axis = len(expr.shape) - (2 if number == _MATRICES[matrix.op] else 1)
        half = expr.shape[axis] // 2
        constants[f"{name}.swapped"] = concat([slice_(expr, axis, half, 2 * half), slice_(expr, axis, 0, half)], axis)
        inputs[number] = f"{name}.swapped"
    return tuple(inputs)


def _name(activated: Node) -> str:
    return "gelu_tanh" if activated.attrs.get("approximate") == "tanh" else activated.op
