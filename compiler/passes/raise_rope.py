"""Raise rotary position embeddings from their arithmetic, however it is written.

Models spell the rotation in many ways: slices and concatenations of halves, strided slices that are stacked, pairs of a
complex number, before or after a transpose. What they have in common is what each element of the result is. So the
arithmetic is evaluated, on a few tokens, over terms instead of numbers: sign · element of x · element of a table.

What is no rotation stays arithmetic, which the loop generator compiles: correct, a few launches more.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from ..ir.graph import Graph, Node, Operand, through_reshapes
from ..ir.interpret import run_node
from ..ir.op import OPS
from ..ir.types import concrete
from ..weights.expr import WeightExpr, literal
from .match import eliminate_dead_code, rebuilt

_TOKENS = 3
_VIEWS = ("reshape", "permute", "slice", "expand")
_WALKED = (*_VIEWS, "cat", "add", "sub", "mul", "neg")


def raise_rope(graph: Graph) -> Graph:
    """What a structured operator reads becomes rope(x, cos, sin), if each of its elements is

    x[d]·cos[d] ∓ x[partner of d]·sin[d] for d < R, and x[d] beyond, in heads [T, H, D] that share the factors.
    The partner is R/2 away (rotate-half) or the neighbour (interleaved).
    """
    reader = _Reader(graph)
    rotated: dict[str, list[Node]] = {}
    constants: dict[str, WeightExpr] = {}
    for node in graph.nodes:
        for value in node.values if OPS[node.op].kind == "structured" else ():
            # The arithmetic may stand below reshapes that only fit the reader.
            while value not in rotated:
                found = reader.rotation(value)
                if found is not None:
                    rotated[value] = found.nodes(graph, reader.producers[value], constants)
                elif (view := reader.producers.get(value)) is not None and view.op == "reshape":
                    value = view.values[0]
                else:
                    break
    nodes = [new for node in graph.nodes for new in rotated.get(node.outputs[0], [node])]
    return eliminate_dead_code(rebuilt(graph, nodes, constants=constants))


@dataclass(frozen=True)
class _Term:
    """sign · x · factor for each element of a value. x, factor: number of an element, see _Reader.anchor; 0: none."""

    sign: np.ndarray
    x: np.ndarray
    factor: np.ndarray

    def moved(self, move: Callable[[np.ndarray], np.ndarray]) -> _Term:
        return _Term(move(self.sign), move(self.x), move(self.factor))


@dataclass(frozen=True)
class _Columns:
    """Elements of the rows that tokens have in a value: the same of every row. columns: int array; stride: of rows."""

    value: str
    columns: np.ndarray
    stride: int


class _Reader:
    """What the elements of a graph's values are made of."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producers = graph.producers()
        self.anchors: list[str] = []
        self.of_positions = _of_positions(graph)

    def rotation(self, value: str) -> _Rotation | None:
        shape = [dim for dim in self.graph.types[value].shape if dim != 1]
        if len(shape) not in (2, 3) or shape[0] != "T" or not isinstance(shape[-1], int) \
                or value in self.of_positions or not self._meets_positions(value):
            return None
        terms = self._terms(value, {})
        if terms is None:
            return None
        heads = (_TOKENS, int(shape[1]) if len(shape) == 3 else 1, shape[-1])
        return _rotation(self, [term.moved(lambda a: a.reshape(heads)) for term in terms])

    def _meets_positions(self, value: Operand) -> bool:
        """Whether the walk down from the value comes to something that the positions alone decide."""
        stack: list[Operand] = [value]
        seen: set[Operand] = set()
        while stack:
            current = stack.pop()
            if current in self.of_positions:
                return True
            node = self.producers.get(current) if isinstance(current, str) else None
            if node is not None and node.op in _WALKED and current not in seen:
                seen.add(current)
                stack.extend(node.inputs)
        return False

    def _terms(self, operand: Operand, done: dict[str, list[_Term] | None]) -> list[_Term] | None:
        """None: not a sum of such terms."""
        if not isinstance(operand, str):
            return None
        if operand not in done:
            node = self.producers.get(operand)
            walked = node is not None and node.op in _WALKED and operand not in self.of_positions
            done[operand] = self._computed(node, done) if walked and node is not None else [self._anchor(operand)]
        return done[operand]

    def _anchor(self, value: str) -> _Term:
        """The elements of a value that is not looked into, numbered; those of all anchors are different.

        A reshape has the elements of what it reshapes, so that queries and keys get the same tables however they are
        shaped for them.
        """
        base = through_reshapes(value, self.producers)
        if base not in self.anchors:
            self.anchors.append(base)
        shape = concrete(self.graph.types[value].shape, {"T": _TOKENS, "L": _TOKENS})
        numbers = np.arange(np.prod(shape), dtype=np.int64).reshape(shape) + (self.anchors.index(base) + 1 << 40)
        ones, none = np.ones(shape, np.int8), np.zeros(shape, np.int64)
        return _Term(ones, none, numbers) if value in self.of_positions else _Term(ones, numbers, none)

    def _computed(self, node: Node, done: dict[str, list[_Term] | None]) -> list[_Term] | None:
        parts = [self._terms(operand, done) for operand in node.inputs]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts) or any(len(part) > 2 for part in known):
            return None
        if node.op in (*_VIEWS, "cat"):
            return [self._viewed(node, [_nth(part, n) for part in known]) for n in range(max(map(len, known)))]
        if node.op == "neg":
            return [replace(term, sign=-term.sign) for term in known[0]]
        shape = concrete(self.graph.types[node.output].shape, {"T": _TOKENS, "L": _TOKENS})
        left, right = ([term.moved(lambda a: np.broadcast_to(a, shape)) for term in part] for part in known)
        if node.op == "mul":
            return _product(left, right)
        return left + [replace(term, sign=-term.sign) if node.op == "sub" else term for term in right]

    def _viewed(self, node: Node, terms: list[_Term]) -> _Term:
        def move(arrays: list[np.ndarray]) -> np.ndarray:
            return run_node(node, arrays, {"T": _TOKENS, "L": _TOKENS})[0]
        return _Term(move([t.sign for t in terms]), move([t.x for t in terms]), move([t.factor for t in terms]))

    def columns(self, numbers: np.ndarray) -> _Columns | None:
        """numbers [T, n]: elements of anchors -> where they are, if all tokens have the same of their own rows."""
        anchor = self.anchors[int(numbers[0, 0] >> 40) - 1]
        offsets = numbers - (self.anchors.index(anchor) + 1 << 40)
        outer = [dim for dim in self.graph.types[anchor].shape if dim != 1][:1]
        size = np.prod(concrete(self.graph.types[anchor].shape, {"T": _TOKENS}), dtype=int)
        stride = int(size) // _TOKENS
        rows = offsets - stride * np.arange(_TOKENS)[:, None]
        inside = (rows >= 0).all() and (rows < stride).all() and (rows == rows[0]).all()
        return _Columns(anchor, rows[0], stride) if inside and outer == ["T"] else None


def _of_positions(graph: Graph) -> set[str]:
    """Values that the positions of the tokens alone decide: the angles, their sines and cosines."""
    found = {"positions"} & set(graph.inputs)
    for node in graph.nodes:
        if node.values and all(v in found or v in graph.constants for v in node.values) and found & {*node.values}:
            found.update(node.outputs)
    return found


def _nth(terms: list[_Term], n: int) -> _Term:
    """A part of a concatenation that has fewer terms than others gets terms of nothing."""
    return terms[n] if n < len(terms) else terms[0].moved(np.zeros_like)


def _product(left: list[_Term], right: list[_Term]) -> list[_Term] | None:
    """Of sums of elements of x, and one table."""
    if len(left) == 1 and not left[0].x.any():
        left, right = right, left
    if len(right) != 1 or right[0].x.any() or any(term.factor.any() for term in left):
        return None
    table, = right
    return [_Term(term.sign * table.sign, term.x, np.where(term.x > 0, table.factor, 0)) for term in left]


@dataclass(frozen=True)
class _Rotation:
    """x: all elements of a token, head by head; cos, sin: R columns each."""

    x: _Columns
    cos: _Columns
    sin: _Columns
    heads: int
    interleaved: bool

    def nodes(self, graph: Graph, replaced: Node, constants: dict[str, WeightExpr]) -> list[Node]:
        """rope, and the views around it that make it take the place of a node. May add to `constants`."""
        out, width = replaced.output, len(self.x.columns) // self.heads
        made = _Made(out, replaced.origin)
        x = made.heads(self.x, self.heads, width)
        tables = [made.table(columns, constants) for columns in (self.cos, self.sin)]
        attrs = {"interleaved": True} if self.interleaved else {}
        made.nodes += [Node("rope", (x, *tables), (f"{out}.rope",), attrs, replaced.origin),
                       Node("reshape", (f"{out}.rope",), (out,), {"shape": graph.types[out].shape}, replaced.origin)]
        return made.nodes


@dataclass
class _Made:
    """Nodes that are added for one rotation."""

    stem: str
    origin: str
    nodes: list[Node] = field(default_factory=list)

    def add(self, op: str, *inputs: Operand, **attrs: object) -> str:
        name = f"{self.stem}.r{len(self.nodes)}"
        self.nodes.append(Node(op, inputs, (name,), attrs, self.origin))
        return name

    def heads(self, x: _Columns, heads: int, width: int) -> str:
        """x [T, H, D] out of rows of tokens: heads side by side, or at the same place of equal parts of the row."""
        first, last = int(x.columns[0]), int(x.columns[-1]) + 1
        if last - first == heads * width:
            value = self.add("reshape", x.value, shape=("T", x.stride))
            if last - first < x.stride:
                value = self.add("slice", value, dim=1, start=first, stop=last, step=1)
            return self.add("reshape", value, shape=("T", heads, width))
        value = self.add("reshape", x.value, shape=("T", heads, x.stride // heads))
        return self.add("slice", value, dim=2, start=first, stop=first + width, step=1)

    def table(self, table: _Columns, constants: dict[str, WeightExpr]) -> str:
        """Factors [T, R]."""
        value = self.add("reshape", table.value, shape=("T", table.stride))
        if np.array_equal(table.columns, np.arange(table.stride)):
            return value
        picks = literal(table.columns.astype(np.int32))
        name = f"rope.columns{len(constants)}"
        name = next((known for known, expr in constants.items() if expr == picks), name)
        constants[name] = picks
        return self.add("take", value, name, dim=1)


def _rotation(reader: _Reader, terms: list[_Term]) -> _Rotation | None:
    """The rotation that the elements [T, H, D] show."""
    present = np.array([term.sign != 0 for term in terms])
    pairs = present.sum(axis=0) == 2
    turned = pairs[0, 0]
    rotary = int(turned.sum())
    tokens, heads, width = pairs.shape
    if rotary == 0 or rotary % 2 or not turned[:rotary].all() or not (pairs == turned).all() \
            or not (present.sum(axis=0)[..., rotary:] == 1).all():
        return None
    # The first element is x[0]·cos[0] - x[partner]·sin[0]: its sign tells which term is which, and where x begins.
    signs, sources, factors = (np.array([getattr(term, name) for term in terms]) for name in ("sign", "x", "factor"))
    first = [n for n in range(len(terms)) if signs[n, 0, 0, 0] > 0]
    if len(first) != 1 or not sources[first[0]].all():
        return None
    begin = sources[first[0]][:, :, :1]
    own = present & (sources == begin + np.arange(width))
    other = present & ~own
    if not (own.sum(axis=0) == 1).all() or not (other.sum(axis=0) == pairs).all():
        return None
    own_sign, own_factor = ((array * own).sum(axis=0) for array in (signs, factors))
    sign, source, factor = ((array * other).sum(axis=0)[..., :rotary] for array in (signs, sources, factors))
    if not (own_sign == 1).all() or own_factor[..., rotary:].any() or not factor.all() \
            or not own_factor[..., :rotary].all():
        return None
    away = source - (begin + np.arange(rotary))
    interleaved = _is_partner(away, sign, np.arange(rotary) % 2 == 0, 1)
    if not interleaved and not _is_partner(away, sign, np.arange(rotary) < rotary // 2, rotary // 2):
        return None
    shared = all((table == table[:, :1]).all() for table in (own_factor, factor))
    x = reader.columns((begin + np.arange(width)).reshape(tokens, -1)) if shared else None
    cos, sin = (reader.columns(table[:, 0, :rotary]) if shared else None for table in (own_factor, factor))
    if x is None or cos is None or sin is None or not _in_heads(x, heads, width):
        return None
    return _Rotation(x, cos, sin, heads, interleaved)


def _is_partner(away: np.ndarray, sign: np.ndarray, is_first: np.ndarray, distance: int) -> bool:
    """Firsts of a pair: minus the element at +distance; seconds: plus the one at -distance."""
    return bool((away == np.where(is_first, distance, -distance)).all() and (sign == np.where(is_first, -1, 1)).all())


def _in_heads(x: _Columns, heads: int, width: int) -> bool:
    """Whether the rows of x hold heads side by side, or at the same place of equal parts."""
    columns = x.columns.reshape(heads, width)
    part = width if int(columns[-1, -1]) + 1 - int(columns[0, 0]) == heads * width else x.stride // heads
    return bool((columns == columns[0, 0] + part * np.arange(heads)[:, None] + np.arange(width)).all()) and (
        part == width or (x.stride % heads == 0 and int(columns[0, -1]) < part))
