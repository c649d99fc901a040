"""What a reader of one layout gives, and the arithmetic that layouts share."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ingot.plugins.linear.gpu_formats import GROUPS, int4_format

from ...ir.types import DType
from ...weights.expr import (
    WeightExpr,
    decode,
    dequantize,
    elementwise,
    permute,
    repeat,
    reshape,
    scale_columns,
    tensor,
)
from ..errors import CheckpointError

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint


INPUT_SCALES, KV_SCALES = "static scales of activations", "scales of the KV cache"
"""What checkpoints may hold that no engine uses."""


@dataclass(frozen=True)
class QuantizedWeight:
    """expr      f32, as the model has it: [N, K], or [E, ...] of experts
    format    for people: "int4, groups of 128"
    scheme    key of plugins' SCHEMES that holds these numbers without rounding them again; "" if none does. Scales that
              are no float16 lose at most their last bits there
    groups    likewise the key of GPUs' gpu_formats.FORMATS for four-bit integers; see int4_groups
    """

    expr: WeightExpr
    format: str
    scheme: str = ""
    groups: str = ""


@dataclass
class Quantized:
    """method    for people: "GPTQ"
    weights   name that the weight would have in a checkpoint that is not quantized -> how it is made
    consumed  tensors that are parts of weights, or tell what an engine does not use; the importer does not see them
    unused    of INPUT_SCALES and KV_SCALES what the checkpoint holds
    notes     what else there is to say
    """

    method: str
    weights: dict[str, QuantizedWeight] = field(default_factory=dict)
    consumed: set[str] = field(default_factory=set)
    unused: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


class Tensors:
    """The tensors of a checkpoint as leaves of expressions; remembers which were asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.where = checkpoint, str(checkpoint.path)
        self.consumed: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.checkpoint

    def names(self, suffix: str) -> list[str]:
        """Of all tensors that end so, what stands before, in the order of their names."""
        return sorted(name.removesuffix(suffix) for name in self.checkpoint.names() if name.endswith(suffix))

    def dtype(self, name: str) -> str:
        return self.checkpoint.dtype(name)

    def leaf(self, name: str, rank: int | None = None) -> WeightExpr:
        """The tensor; integers as i32, floats as f32. Raises CheckpointError if it is missing or of another rank."""
        if name not in self:
            raise CheckpointError(f"{self.where}: there is no tensor {name}, which its layer's weight is made of")
        self.consumed.add(name)
        shape = self.checkpoint.shape(name)
        if rank is not None and len(shape) != rank:
            raise CheckpointError(f"{self.where}: tensor {name} has the shape {list(shape)}; expected {rank} "
                                  "dimensions")
        integer = self.dtype(name) in ("I64", "I32", "I16", "I8", "U8")
        return tensor(name, shape, DType.I32 if integer else DType.F32)

    def scales(self, name: str) -> WeightExpr:
        """As leaf, f32; bytes are exponents of two (e8m0)."""
        leaf = self.leaf(name)
        return decode("e8m0", leaf) if self.dtype(name) == "U8" else leaf

    def optional(self, name: str, rank: int | None = None) -> WeightExpr | None:
        return self.leaf(name, rank) if name in self else None

    def drop(self, suffixes: Iterable[str]) -> list[str]:
        """Consumes the tensors that end so without using them."""
        found = [name for name in self.checkpoint.names() if name.endswith(tuple(suffixes))]
        self.consumed.update(found)
        return found

    def misfit(self, weight: str, shape: tuple[int, ...], scale: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {scale} has the shape {list(self.checkpoint.shape(scale))}, which "
                               f"divides {weight} {list(shape)} neither into rows nor into groups nor into blocks")


@dataclass(frozen=True)
class Grid:
    """How scales lie over a weight [N, K]: each is for `rows` x `columns` elements."""

    rows: int
    columns: int

    def describe(self, n: int, k: int) -> str:
        if (self.rows, self.columns) == (n, k):
            return "one scale a tensor"
        if self.columns == k:
            return "one scale a row"
        return f"groups of {self.columns}" if self.rows == 1 else f"blocks of {self.rows}x{self.columns}"


def grid_of(shape: tuple[int, int], scales: tuple[int, ...], block: tuple[int, int] | None = None) -> Grid | None:
    """The grid of scales of that shape: (), (1,), (N,), (N, 1), (N, G), (R, C) or (R, 1, C, 1); None if it fits none.

    block: what the configuration says, for a last block that is smaller.
    """
    n, k = shape
    if all(d == 1 for d in scales):
        return Grid(n, k)
    # Blocks as [N / 128, 1, K / 128, 1].
    rows, columns = (scales[0], 1) if len(scales) == 1 else (scales[0], scales[2 if len(scales) == 4 else 1])
    if block is not None and (rows, columns) == (-(-n // block[0]), -(-k // block[1])):
        return Grid(*block)
    return Grid(n // rows, k // columns) if n % rows == 0 and k % columns == 0 else None


def scaled(values: WeightExpr, scales: WeightExpr, grid: Grid, kind: str = "", factor: WeightExpr | None = None,
           ) -> WeightExpr:
    """values [N, K] times scales over the grid -> f32 [N, K].

    kind    of numbers that the values are, where a GPU computes with such: see plugins.linear.gpu_hold.KINDS
    factor  [1, 1] of all scales
    """
    over = spread(scales, values.shape, grid)
    if not kind:
        return elementwise("mul", values, over if factor is None else elementwise("mul", over, factor))
    return dequantize(values, over, kind, grid.rows, grid.columns, factor)


def spread(scales: WeightExpr, shape: tuple[int, ...], grid: Grid) -> WeightExpr:
    """Scales as [N, K], [N, 1] or [1, 1]: a row or a column for each element that differs."""
    n, k = shape
    rows, columns = -(-n // grid.rows), -(-k // grid.columns)
    flat = reshape(scales, (rows, columns))
    if columns > 1:
        flat = repeat(flat, -1, grid.columns, k)
    return repeat(flat, 0, grid.rows, n) if rows > 1 else flat


def int4_groups(size: int, k: int, symmetric: bool) -> str:
    """The format of GPUs that holds integers of up to four bits with a scale for `size` of a row's k channels; "" where
    none does. symmetric: they are counted from the middle, 8 of 0 .. 15; else from zeros or minimums."""
    fitting = [group for group in GROUPS if size >= k or size % group == 0]
    return int4_format(max(fitting), not symmetric) if fitting else ""


def with_input_scale(weight: WeightExpr, scale: WeightExpr | None, bits: int) -> WeightExpr:
    """The weight of a layer whose inputs are multiplied by `scale` [K] first; None: they are not."""
    if scale is None:
        return weight
    return scale_columns(weight, reshape(scale, (1, weight.shape[1])), bits)


def transposed(expr: WeightExpr) -> WeightExpr:
    return permute(expr, (1, 0))
