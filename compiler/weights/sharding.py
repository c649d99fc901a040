"""Constants of which each rank of a tensor-parallel engine holds a part.

An expression stays one for all ranks: `shard(w)` says how an axis is divided, `at_rank` gives the expression of one
rank's part. So graphs, kernels and plans are made once, whatever the number of ranks.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..ir.types import TensorType
from .expr import WeightExpr, apply, concat, elementwise, slice_


@dataclass(frozen=True)
class Segment:
    """A run of `size` elements of an axis in `ways` equal parts. With fewer ways than ranks, neighbours hold the same
    part: heads of keys and values of which there are fewer than ranks."""

    size: int
    ways: int

    @property
    def part(self) -> int:
        """Elements that a rank holds."""
        return self.size // self.ways

    def begin(self, rank: int, num_ranks: int) -> int:
        """Where a rank's part begins in the segment."""
        return rank * self.ways // num_ranks * self.part


def shard(expr: WeightExpr, axis: int, segments: Sequence[Segment], num_ranks: int) -> WeightExpr:
    """A rank's part of `expr`: of each segment of the axis its share, joined."""
    assert sum(segment.size for segment in segments) == expr.shape[axis], (expr.shape, axis, segments)
    shape = (*expr.shape[:axis], sum(segment.part for segment in segments), *expr.shape[axis + 1:])
    return apply("shard", (expr,), TensorType(shape, expr.type.dtype), axis=axis, ranks=num_ranks,
                 segments=tuple((segment.size, segment.ways) for segment in segments))


def on_first(expr: WeightExpr, num_ranks: int) -> WeightExpr:
    """`expr` on rank 0, zeros elsewhere: what is added before the ranks' results are summed."""
    return apply("on_first", (expr,), expr.type, ranks=num_ranks)


def num_ranks_of(expr: WeightExpr) -> int:
    """How many ranks hold different values; 1: all hold the same."""
    if expr.op in ("shard", "on_first"):
        return int(expr.attr("ranks"))
    return max(map(num_ranks_of, expr.inputs), default=1)


def is_sharded(expr: WeightExpr) -> bool:
    return num_ranks_of(expr) > 1


def at_rank(expr: WeightExpr, rank: int) -> WeightExpr:
    """The expression of one rank's value, over whole tensors of the checkpoint."""
    operands = tuple(at_rank(o, rank) if isinstance(o, WeightExpr) else o for o in expr.operands)
    if expr.op == "on_first":
        whole = operands[0]
        assert isinstance(whole, WeightExpr)
        return whole if rank == 0 else elementwise("mul", whole, 0.0)
    if expr.op == "shard":
        whole, axis, ranks = operands[0], expr.attr("axis"), expr.attr("ranks")
        assert isinstance(whole, WeightExpr) and rank < ranks, (expr, rank)
        parts, start = [], 0
        for segment in (Segment(*pair) for pair in expr.attr("segments")):
            begin = start + segment.begin(rank, ranks)
            parts.append(slice_(whole, axis, begin, begin + segment.part))
            start += segment.size
        return concat(parts, axis)
    return expr if operands == expr.operands else replace(expr, operands=operands)
