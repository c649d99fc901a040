"""Index maps of views: from the index of an element of the view to its index in what is viewed."""
from __future__ import annotations

from collections.abc import Sequence

from ..ir.types import Dim, product, split_dim
from .expr import ZERO, Expr, Extents, add, const, floor_div, mod, times

Index = tuple[Expr, ...]


def broadcast_index(at: Index, shape: Sequence[Dim]) -> Index:
    """For an operand of that shape, broadcast to the rank of `at`."""
    at = at[len(at) - len(shape):]
    return tuple(ZERO if dim == 1 else i for i, dim in zip(at, shape, strict=True))


def permuted_index(at: Index, dims: Sequence[int]) -> Index:
    inner = [ZERO] * len(dims)
    for outer, dim in enumerate(dims):
        inner[dim] = at[outer]
    return tuple(inner)


def sliced_index(at: Index, dim: int, start: int, step: int) -> Index:
    return (*at[:dim], add(times(at[dim], step), const(start)), *at[dim + 1:])


def reshaped_index(at: Index, shape: Sequence[Dim], source: Sequence[Dim], extents: Extents) -> Index:
    """From a reshape's index to its source's, by groups of dimensions with equal products."""
    inner: list[Expr] = [ZERO] * len(source)
    for outer_axes, inner_axes in _groups(shape, source):
        flat = ZERO
        for axis in outer_axes:
            flat = at[axis] if flat == ZERO else add(times(flat, shape[axis], extents), at[axis])
        for position in range(len(inner_axes) - 1, -1, -1):
            axis = inner_axes[position]
            if position == 0:
                inner[axis] = flat
            else:
                inner[axis] = mod(flat, source[axis], extents)
                flat = floor_div(flat, source[axis], extents)
    return tuple(inner)


def _groups(outer: Sequence[Dim], inner: Sequence[Dim]) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of axes, extents of 1 left out, whose products agree, in order."""
    left, right = ([axis for axis, dim in enumerate(shape) if dim != 1] for shape in (outer, inner))
    groups, i, j = [], 0, 0
    while i < len(left) or j < len(right):
        taken_left, taken_right = left[i:i + 1], right[j:j + 1]
        i, j = i + 1, j + 1
        while not _equal([outer[a] for a in taken_left], [inner[a] for a in taken_right]):
            if i < len(left) and _smaller([outer[a] for a in taken_left], [inner[a] for a in taken_right]):
                taken_left.append(left[i])
                i += 1
            else:
                assert j < len(right), f"reshape from {list(inner)} to {list(outer)}"
                taken_right.append(right[j])
                j += 1
        groups.append((taken_left, taken_right))
    return groups


def _equal(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    return product(tuple(a)) == product(tuple(b))


def _smaller(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Whether the left run must grow: by its symbol first, then by its factor."""
    (left, left_symbol), (right, right_symbol) = split_dim(product(tuple(a))), split_dim(product(tuple(b)))
    if left_symbol != right_symbol:
        return left_symbol is None
    return left < right
