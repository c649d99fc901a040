"""Raise rotary position embeddings from their arithmetic.

What no rule takes stays arithmetic, which the loop generator compiles: correct, a few launches more.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..ir.graph import Graph, Node, Operand
from ..ir.types import Dim, TensorType, product
from .match import Matcher, rewrite, typed


def raise_rope(graph: Graph) -> Graph:
    """x·cos + rotate_half(x)·sin -> rope(x, cos, sin), for heads [.., T, H, D] and factors that all heads share.

    Also for the form that computes both halves apart, and for a rotation of only the first elements of each head.
    """
    for rule in (_rotate_half, _two_halves, _partial):
        graph = rewrite(graph, rule)
    return graph


@dataclass(frozen=True)
class _Slice:
    source: Operand
    start: int
    stop: int


def _rotate_half(m: Matcher, node: Node) -> list[Node] | None:
    """add(mul(x, cos), mul(cat(neg(x[R/2:]), x[:R/2]), sin))"""
    if node.op != "add":
        return None
    for straight_value, turned_value in (node.inputs, node.inputs[::-1]):
        straight, turned = m.node(straight_value, "mul"), m.node(turned_value, "mul")
        if straight is None or turned is None:
            continue
        for partner, sin in (turned.inputs, turned.inputs[::-1]):
            x = _rotated(m, partner)
            for other, cos in (straight.inputs, straight.inputs[::-1]):
                if x is not None and other == x:
                    return _emit(m, node, x, cos, sin)
    return None


def _rotated(m: Matcher, value: Operand) -> str | None:
    """x if the value is cat(neg(x[R/2:]), x[:R/2]) over the last dimension."""
    cat = m.node(value, "cat")
    if cat is None or len(cat.inputs) != 2 or cat.attrs["dim"] != len(m.type(cat.output).shape) - 1:
        return None
    negated = m.node(cat.inputs[0], "neg")
    second, first = _last_slice(m, negated.inputs[0] if negated else None), _last_slice(m, cat.inputs[1])
    if first is None or second is None or first.source != second.source or not isinstance(first.source, str):
        return None
    width = int(m.type(first.source).shape[-1])
    halves = (first.start, first.stop, second.start, second.stop) == (0, width // 2, width // 2, width)
    return first.source if halves else None


def _two_halves(m: Matcher, node: Node) -> list[Node] | None:
    """cat(x1·cos - x2·sin, x2·cos + x1·sin) with x1, x2 the halves of x and factors [.., R/2]"""
    if node.op != "cat" or len(node.inputs) != 2 or node.attrs["dim"] != len(m.type(node.output).shape) - 1:
        return None
    difference, total = m.node(node.inputs[0], "sub"), m.node(node.inputs[1], "add")
    if difference is None or total is None:
        return None
    products = [m.node(value, "mul") for value in (*difference.inputs, *total.inputs)]
    if any(p is None for p in products):
        return None
    x1_cos, x2_sin, x2_cos, x1_sin = (p.inputs for p in products if p is not None)
    cos = next((c for c in x1_cos if c in x2_cos), None)
    sin = next((s for s in x2_sin if s in x1_sin), None)
    if not isinstance(cos, str) or not isinstance(sin, str) or cos == sin:
        return None
    x1, x2 = (_last_slice(m, _other(pair, factor)) for pair, factor in ((x1_cos, cos), (x2_sin, sin)))
    if x1 is None or x2 is None or x1.source != x2.source or not isinstance(x1.source, str) \
            or _other(x2_cos, cos) != _other(x2_sin, sin) or _other(x1_sin, sin) != _other(x1_cos, cos):
        return None
    width = int(m.type(x1.source).shape[-1])
    if (x1.start, x1.stop, x2.start, x2.stop) != (0, width // 2, width // 2, width):
        return None
    doubled = []
    for factor in (cos, sin):
        shape = m.type(factor).shape
        # Each layer makes its own; common subexpressions then become one.
        doubled.append((f"{node.output}.{factor}", factor, TensorType((*shape[:-1], 2 * int(shape[-1])))))
    return _emit(m, node, x1.source, doubled[0][0], doubled[1][0], doubled)


def _other(pair: tuple[Operand, ...], one: Operand) -> Operand:
    return pair[1] if pair[0] == one else pair[0]


def _last_slice(m: Matcher, value: Operand | None) -> _Slice | None:
    node = m.node(value, "slice") if value is not None else None
    if node is None or node.attrs["dim"] != len(m.type(node.output).shape) - 1 or node.attrs.get("step", 1) != 1:
        return None
    return _Slice(node.inputs[0], int(node.attrs["start"]), int(node.attrs["stop"]))


def _emit(m: Matcher, node: Node, x: str, cos: Operand, sin: Operand,
          doubled: Iterable[tuple[str, str, TensorType]] = ()) -> list[Node] | None:
    """rope on [T, H, D], with reshapes around it; None where the factors are not one row a token."""
    shape = m.type(x).shape
    new_types = {name: type_ for name, _, type_ in doubled}
    if not isinstance(cos, str) or not isinstance(sin, str) or len(shape) < 3:
        return None
    tokens, heads, width = _leading(shape), int(shape[-2]), int(shape[-1])
    for factor in (cos, sin):
        factor_shape = (new_types[factor] if factor in new_types else m.type(factor)).shape
        if product(factor_shape) != product((tokens, width)) or factor_shape[-1] != width \
                or (len(factor_shape) >= 2 and factor_shape[-2] != 1 and heads != 1):
            return None
    out = node.output
    nodes = [Node("cat", (source, source), (name,), {"dim": len(type_.shape) - 1}, node.origin)
             for name, source, type_ in doubled]
    heads_type, factor_type = TensorType((tokens, heads, width)), TensorType((tokens, width))
    flat = {x: f"{out}.x", cos: f"{out}.cos", sin: f"{out}.sin"}
    nodes += [Node("reshape", (source,), (name,), {"shape": (heads_type if source == x else factor_type).shape},
                   node.origin) for source, name in flat.items()]
    nodes.append(Node("rope", tuple(flat.values()), (f"{out}.rope",), {}, node.origin))
    nodes.append(Node("reshape", (f"{out}.rope",), (out,), {"shape": m.type(out).shape}, node.origin))
    types = {flat[x]: heads_type, flat[cos]: factor_type, flat[sin]: factor_type, f"{out}.rope": heads_type}
    nodes[-1] = typed(nodes[-1], **types, **new_types)
    return nodes


def _leading(shape: tuple[Dim, ...]) -> Dim:
    return product(shape[:-2])


def _partial(m: Matcher, node: Node) -> list[Node] | None:
    """cat(rope(x[.., :R]), x[.., R:]) -> rope(x) with factors [T, R]"""
    if node.op != "cat" or len(node.inputs) != 2 or node.attrs["dim"] != len(m.type(node.output).shape) - 1:
        return None
    rope = m.node(_through_reshapes(m, node.inputs[0]), "rope")
    rest = _last_slice(m, node.inputs[1])
    if rope is None or rest is None or m.uses(rope.output) != 1:
        return None
    turned = _last_slice(m, _through_reshapes(m, rope.inputs[0]))
    if turned is None or turned.source != rest.source or not isinstance(rest.source, str) \
            or (turned.start, turned.stop, rest.stop) != (0, rest.start, m.type(rest.source).shape[-1]):
        return None
    out, shape = node.output, m.type(rest.source).shape
    heads = TensorType((_leading(shape), *shape[-2:]))
    return [
        Node("reshape", (rest.source,), (f"{out}.x",), {"shape": heads.shape}, node.origin),
        Node("rope", (f"{out}.x", *rope.inputs[1:]), (f"{out}.rope",), rope.attrs, node.origin),
        typed(Node("reshape", (f"{out}.rope",), (out,), {"shape": m.type(out).shape}, node.origin),
              **{f"{out}.x": heads, f"{out}.rope": heads})]


def _through_reshapes(m: Matcher, value: Operand) -> Operand:
    while (node := m.node(value, "reshape")) is not None:
        value = node.inputs[0]
    return value
