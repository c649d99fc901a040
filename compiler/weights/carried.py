"""Weights that a checkpoint holds in the very numbers of a GPU format: taken over, not rounded again.

Whether that is so is told by the recipe alone: codes and scales (`dequantize`) under operators that only move elements,
where no scale of the format would have to stand for two of the checkpoint's.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ingot.plugins.linear.gpu_formats import FORMATS, Format
from ingot.plugins.linear.gpu_hold import holds

from ..ir.types import DType, TensorType
from .expr import WeightExpr

_CODES, _SCALES, _FACTOR = 1, 2, 3
"""Results of `dequantize` besides the weights."""


@dataclass(frozen=True)
class Carried:
    """All of the shape of the weight, [N, K] or [E, N, K], f32 but for integers.

    factor  one value for a matrix; None: it is chosen when the scales are known
    """

    codes: WeightExpr
    scales: WeightExpr
    factor: WeightExpr | None


@lru_cache(maxsize=4096)
def carried(expr: WeightExpr, format: str) -> Carried | None:
    """The parts of a weight whose numbers the format (key of FORMATS) holds as they are; None if it does not."""
    form = FORMATS[format]
    leaves = _leaves(expr)
    if not leaves or not holds(leaves[0].attr("kind"), form, expr.shape) or not _fits(expr, form):
        return None
    factor = _part(expr, _FACTOR) if leaves[0].attr("kind") == "nvfp4" else None
    return Carried(_part(expr, _CODES), _part(expr, _SCALES), factor)


def _leaves(expr: WeightExpr) -> list[WeightExpr]:
    """The `dequantize` in an expression; none if something else makes elements of it too, or their kinds differ."""
    found: dict[WeightExpr, None] = {}
    stack = [expr]
    while stack:
        part = stack.pop()
        if part.op == "dequantize":
            found[part] = None
        elif part.inputs:
            stack.extend(part.inputs)
        else:
            return []
    return list(found) if len({leaf.attr("kind") for leaf in found}) == 1 else []


def _fits(expr: WeightExpr, form: Format) -> bool:
    """Whether the format's scales, for `rows` x `columns` elements, find equal scales in the checkpoint everywhere, and
    each matrix one factor."""
    rows, columns = form.rows_per_scale, form.channels_per_scale
    rank = len(expr.shape)
    if expr.op == "dequantize":
        n, k = expr.shape[-2:]
        own_rows, own_columns = expr.attr("rows"), expr.attr("columns")
        return (own_rows >= n or own_rows % rows == 0) and (
            own_columns >= k or (bool(columns) and own_columns % columns == 0))
    if not all(_fits(inner, form) for inner in expr.inputs):
        return False
    match expr.op:
        case "cat":
            axis = int(expr.attr("dim")) % rank - rank
            sizes = [part.shape[axis] for part in expr.inputs]
            if axis == -2:
                return all(size % rows == 0 for size in sizes[:-1]) and _one_factor(expr)
            return axis < -2 or (columns > 0 and all(size % columns == 0 for size in sizes) and _one_factor(expr))
        case "slice":
            axis, size = int(expr.attr("dim")) % rank - rank, expr.inputs[0].shape[int(expr.attr("dim"))]
            step = {-2: rows, -1: columns or 1}.get(axis, 1)
            stop = int(expr.attr("stop"))
            return expr.attr("start") % step == 0 and (stop % step == 0 or stop == size) and expr.attr("step") == 1
        case "shard":
            step = {rank - 2: rows, rank - 1: columns or 1}.get(int(expr.attr("axis")), 1)
            return all(size // ways % step == 0 for size, ways in expr.attr("segments"))
        case "reshape":
            inner = expr.inputs[0].shape
            if len(inner) < 2 or rank < 2 or inner[-1] != expr.shape[-1]:
                return False
            return inner[-2] == expr.shape[-2] or (inner[-2] % rows == expr.shape[-2] % rows == 0 and _one_factor(expr))
        case "permute":
            return tuple(expr.attr("dims")[-2:]) == (rank - 2, rank - 1)
    return False


def _one_factor(expr: WeightExpr) -> bool:
    """Whether the parts that are joined within a matrix have the same factor; of experts each has its own."""
    def factors(part: WeightExpr) -> list[WeightExpr]:
        if part.op == "dequantize":
            return list(part.inputs[2:])
        return [factor for inner in part.inputs for factor in factors(inner)]

    found = [factors(part) for part in expr.inputs]
    if len(expr.shape) == 2:
        return len({factor for part in found for factor in part}) < 2
    return all(part == found[0] for part in found)


def _part(expr: WeightExpr, output: int) -> WeightExpr:
    """The codes, the scales or the factor alone."""
    if expr.op == "dequantize":
        dtype = expr.inputs[0].type.dtype if output == _CODES else DType.F32
        return replace(expr, output=output, type=TensorType(expr.shape, dtype))
    operands = tuple(_part(o, output) if isinstance(o, WeightExpr) else o for o in expr.operands)
    dtype = next(part.type.dtype for part in operands if isinstance(part, WeightExpr))
    return replace(expr, operands=operands, type=TensorType(expr.shape, dtype))
