"""Fuse the gate of an MLP into the matrix that makes both of its factors."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..ir.graph import Graph, Node, Operand
from ..weights.expr import WeightExpr, concat, permute, reshape, slice_
from .match import Matcher, eliminate_dead_code, rebuilt

_MATRICES = {"linear": 1, "expert_linear": 2}
"""Operator -> which operand is the matrix; the operand behind it is the bias."""


def fuse_gate(graph: Graph) -> Graph:
    """y = linear(x, [a; b]); mul(act(y[a]), y[b])  ->  linear(x, [a; b]; gated=act). expert_linear likewise.

    Also, of even features a and odd ones b, min(y[a], 7) * sigmoid(1.702 min(y[a], 7)) * (clamp(y[b], -7, 7) + 1): the
    activation "clamped_swiglu". Where nothing else reads the halves. A kernel finishes both in registers: they never
    go to memory.
    """
    m = Matcher(graph)
    constants: dict[str, WeightExpr] = {}
    nodes = [_gated(m, node, constants) or _clamped(m, node, constants) or node for node in graph.nodes]
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
            inputs = _reordered(m, matrix, constants, "swapped", _swapped)
        return replace(matrix, inputs=inputs, outputs=node.outputs, attrs={**matrix.attrs, "gated": _name(activated)},
                       origin=matrix.origin)
    return None


def _clamped(m: Matcher, node: Node, constants: dict[str, WeightExpr]) -> Node | None:
    if node.op != "mul":
        return None
    for first, second in (node.inputs, node.inputs[::-1]):
        other, glu = _plus(m, first, "add", 1.0), m.node(second, "mul")
        other = _plus(m, other, "minimum", 7.0)
        other = _plus(m, other, "maximum", -7.0)
        if other is None or glu is None:
            continue
        for gate, sigmoid in (glu.inputs, glu.inputs[::-1]):
            scaled = m.node(sigmoid, "sigmoid")
            if scaled is None or _plus(m, scaled.inputs[0], "mul", 1.702) != gate or m.uses(str(gate)) != 2:
                continue
            halves = [_strided(m, half) for half in (_plus(m, gate, "minimum", 7.0), other)]
            if halves[0] is None or halves[1] is None or halves[0][0] is not halves[1][0] \
                    or (halves[0][1], halves[1][1]) != (0, 1):
                continue
            matrix = halves[0][0]
            if m.uses(matrix.output) != 2 or "gated" in matrix.attrs:
                continue
            return replace(matrix, inputs=_reordered(m, matrix, constants, "apart", _apart), outputs=node.outputs,
                           attrs={**matrix.attrs, "gated": "clamped_swiglu"})
    return None


def _plus(m: Matcher, value: Operand | None, op: str, number: float) -> Operand | None:
    """x of op(x, number)."""
    node = m.node(value, op)
    if node is None:
        return None
    x, other = node.inputs if m.number(node.inputs[1]) is not None else node.inputs[::-1]
    found = m.number(other)
    return x if found is not None and abs(found - number) < 1e-6 else None


def _strided(m: Matcher, value: Operand | None) -> tuple[Node, int] | None:
    """(matrix, 0 or 1) if the value is the even or the odd features of a matrix, and read once."""
    half = m.node(value, "slice")
    if half is None or m.uses(half.output) != 1:
        return None
    matrix = m.node(half.inputs[0], *_MATRICES)
    shape = m.type(half.inputs[0]).shape
    width, start = int(shape[-1]), half.attrs["start"]
    if matrix is None or half.attrs["dim"] != len(shape) - 1 or half.attrs.get("step", 1) != 2 or width % 2 \
            or start not in (0, 1) or half.attrs["stop"] < width - 1 + start:
        return None
    return matrix, int(start)


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


def _reordered(m: Matcher, matrix: Node, constants: dict[str, WeightExpr], name: str,
               reorder: Callable[[WeightExpr, int], WeightExpr]) -> tuple[Operand, ...]:
    """The matrix' operands with its features in another order. reorder: of an expression, along one axis."""
    inputs = list(matrix.inputs)
    for number in range(_MATRICES[matrix.op], len(inputs)):
        value = str(inputs[number])
        expr = m.graph.constants[value]
        constants[f"{value}.{name}"] = reorder(expr, len(expr.shape) - (2 if number == _MATRICES[matrix.op] else 1))
        inputs[number] = f"{value}.{name}"
    return tuple(inputs)


def _swapped(expr: WeightExpr, axis: int) -> WeightExpr:
    """The upper half first."""
    half = expr.shape[axis] // 2
    return concat([slice_(expr, axis, half, 2 * half), slice_(expr, axis, 0, half)], axis)


def _apart(expr: WeightExpr, axis: int) -> WeightExpr:
    """The even ones, then the odd ones."""
    shape, rank = expr.shape, len(expr.shape)
    pairs = reshape(expr, (*shape[:axis], shape[axis] // 2, 2, *shape[axis + 1:]))
    turned = permute(pairs, (*range(axis), axis + 1, axis, *range(axis + 2, rank + 1)))
    return reshape(turned, shape)


def _name(activated: Node) -> str:
    return "gelu_tanh" if activated.attrs.get("approximate") == "tanh" else activated.op
