"""Proves that only attention mixes tokens.

The tokens of a step belong to many sequences and stand in any number of pieces, so every other operator must treat
each token by itself. The analysis follows, through the whole graph, the axis that counts tokens; what works along it
(a sum, a convolution written as slices, a product over it, a count of the tokens themselves) is refused.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..ir.graph import Graph, Node, Operand
from ..ir.types import Dim, split_dim
from .errors import ImportRefused


@dataclass(frozen=True)
class TokenAxis:
    """Index i of dimension `axis`, whose extent is before * T * after, is that of token i // after % T."""

    axis: int
    before: int = 1


class _Mixed(Exception):
    """What the operator does with the tokens."""


def check_token_axis(graph: Graph) -> None:
    """Raises ImportRefused that names operator, module and source line of the first node that mixes tokens."""
    axes: dict[str, TokenAxis | None] = {name: _input_axis(graph.types[name].shape) for name in graph.inputs}
    axes |= dict.fromkeys(graph.constants)
    for node in graph.nodes:
        try:
            for name in node.outputs:
                axes[name] = _Rules(graph, axes, node).axis()
        except _Mixed as reason:
            raise ImportRefused(f"{node.op}: {reason}; the tokens of a step belong to many sequences, and only "
                                f"attention knows which\n  in {node.origin}") from None


def _input_axis(shape: tuple[Dim, ...]) -> TokenAxis | None:
    return next((TokenAxis(i) for i, dim in enumerate(shape) if isinstance(dim, str)), None)


class _Rules:
    """The token axis of one node's outputs, from those of its operands."""

    def __init__(self, graph: Graph, axes: dict[str, TokenAxis | None], node: Node) -> None:
        self.graph, self.axes, self.node = graph, axes, node

    def axis(self) -> TokenAxis | None:
        rule: Callable[[], TokenAxis | None] | None = getattr(self, f"_{self.node.op}", None)
        if rule is not None:
            return rule()
        if self.node.op.startswith("reduce_"):
            return self._reduce()
        if self.node.op in ("softmax", "cumsum", "sort", "topk", "scatter", "cat", "slice"):
            return self._along_one_dim()
        if self.node.op in ("linear", "rms_norm", "layer_norm"):
            return self._over_last_dim()
        return self._broadcast()

    def _of(self, operand: Operand) -> TokenAxis | None:
        return self.axes[operand] if isinstance(operand, str) else None

    def _shape(self, operand: Operand) -> tuple[Dim, ...]:
        return self.graph.types[operand].shape if isinstance(operand, str) else ()

    def _broadcast(self) -> TokenAxis | None:
        """Operands are aligned at their last dimension."""
        rank = len(self._shape(self.node.outputs[0]))
        found = {TokenAxis(axis.axis + rank - len(self._shape(i)), axis.before)
                 for i in self.node.inputs if (axis := self._of(i)) is not None}
        if len(found) > 1:
            raise _Mixed("each token meets every other")
        return found.pop() if found else _input_axis(self._shape(self.node.outputs[0]))

    def _along_one_dim(self) -> TokenAxis | None:
        axis = self._broadcast()
        dim = self.node.attrs["dim"]
        if axis is not None and axis.axis == dim:
            whole = self.node.op == "slice" and self._shape(self.node.inputs[0]) == self._shape(self.node.output)
            if not whole:
                raise _Mixed("works along the tokens")
        return axis

    def _argmax(self) -> TokenAxis | None:
        return self._reduced((self.node.attrs["dim"],))

    def _reduce(self) -> TokenAxis | None:
        return self._reduced(self.node.attrs["dims"])

    def _reduced(self, dims: tuple[int, ...]) -> TokenAxis | None:
        axis = self._of(self.node.inputs[0])
        if axis is None:
            return None
        if axis.axis in dims:
            raise _Mixed("works along the tokens")
        gone = 0 if self.node.attrs["keepdim"] else sum(d < axis.axis for d in dims)
        return TokenAxis(axis.axis - gone, axis.before)

    def _over_last_dim(self) -> TokenAxis | None:
        x, *parameters = self.node.inputs
        axis = self._of(x)
        if any(self._of(p) is not None for p in parameters):
            raise _Mixed("has weights that depend on the tokens")
        if axis is not None and axis.axis == len(self._shape(x)) - 1:
            raise _Mixed("works along the tokens")
        return axis

    def _reshape(self) -> TokenAxis | None:
        axis = self._of(self.node.inputs[0])
        if axis is None:
            return None
        old, new = self._shape(self.node.inputs[0]), self._shape(self.node.output)
        outer = _product(old[:axis.axis]) * axis.before
        target = next(i for i, dim in enumerate(new) if isinstance(dim, str))
        before, rest = divmod(outer, _product(new[:target]))
        if rest or split_dim(new[target])[0] % before:
            raise _Mixed("lays tokens out anew, across their borders")
        return TokenAxis(target, before)

    def _permute(self) -> TokenAxis | None:
        axis = self._of(self.node.inputs[0])
        return axis and TokenAxis(self.node.attrs["dims"].index(axis.axis), axis.before)

    def _expand(self) -> TokenAxis | None:
        return self._broadcast()

    def _full(self) -> TokenAxis | None:
        return _input_axis(self._shape(self.node.output))

    def _arange(self) -> TokenAxis | None:
        if isinstance(self.node.attrs["length"], str):
            raise _Mixed("counts the tokens of the step instead of taking their positions")
        return None

    def _gather(self) -> TokenAxis | None:
        x, index = (self._of(i) for i in self.node.inputs)
        if x is not None and x != index:
            raise _Mixed("each token meets every other")
        if x is not None and x.axis == self.node.attrs["dim"]:
            raise _Mixed("looks tokens up among the tokens")
        return index

    def _embedding(self) -> TokenAxis | None:
        table, ids = self.node.inputs
        if self._of(table) is not None:
            raise _Mixed("looks tokens up among the tokens")
        return self._of(ids)

    def _take(self) -> TokenAxis | None:
        x, index = self.node.inputs
        axis, index_axis, dim = self._of(x), self._of(index), self.node.attrs["dim"]
        if axis is not None and (axis.axis == dim or index_axis is not None):
            raise _Mixed("looks tokens up among the tokens")
        if axis is not None:
            grown = len(self._shape(index)) - 1 if dim < axis.axis else 0
            return TokenAxis(axis.axis + grown, axis.before)
        return index_axis and TokenAxis(index_axis.axis + dim, index_axis.before)

    def _matmul(self) -> TokenAxis | None:
        a, b = self.node.inputs
        rank = len(self._shape(self.node.output))
        rows, columns = rank - 2, rank - 1
        found = set()
        for operand, contracted in ((a, columns), (b, rows)):
            axis = self._of(operand)
            if axis is not None:
                place = axis.axis + rank - len(self._shape(operand))
                if place == contracted:
                    raise _Mixed("sums over the tokens")
                found.add(TokenAxis(place, axis.before))
        if len(found) > 1:
            raise _Mixed("each token meets every other")
        return found.pop() if found else None

    def _attention(self) -> TokenAxis | None:
        if any(self._of(i) != TokenAxis(0) for i in self.node.inputs[:3]):
            raise _Mixed("attends along another axis than the tokens'")
        return TokenAxis(0)

    def _expert_linear(self) -> TokenAxis | None:
        x, ids, *weights = self.node.inputs
        if self._of(x) != TokenAxis(0) or self._of(ids) != TokenAxis(0) or any(map(self._of, weights)):
            raise _Mixed("routes along another axis than the tokens'")
        return TokenAxis(0)


def _product(dims: tuple[Dim, ...]) -> int:
    return math.prod(split_dim(dim)[0] for dim in dims)
