"""The product of two activations on the CPU target."""
from __future__ import annotations

from dataclasses import dataclass

from ..constants import Rows, rows_in_c, symbol
from ..kernel import CpuKernel


@dataclass(frozen=True)
class Matmul:
    """numpy's matmul of a [.., M, K] and b [.., K, N], float32, the leading dimensions broadcast.

    Extents may be symbolic: "T", "L", "9*T". Strides in floats, one a dimension, may be too; None: no gaps.
    """

    a_shape: tuple[Rows, ...]
    b_shape: tuple[Rows, ...]
    a_strides: tuple[Rows, ...] | None = None
    b_strides: tuple[Rows, ...] | None = None

    def __post_init__(self) -> None:
        assert len(self.a_shape) >= 2 and len(self.b_shape) >= 2 and self.a_shape[-1] == self.b_shape[-2], self
        for a, b in zip(reversed(self.a_shape[:-2]), reversed(self.b_shape[:-2]), strict=False):
            assert a == b or 1 in (a, b), f"{self}: {a} and {b} do not broadcast"

    @property
    def batch(self) -> tuple[Rows, ...]:
        """The leading dimensions of the result."""
        rank = max(len(self.a_shape), len(self.b_shape)) - 2
        a, b = ((1,) * (rank + 2 - len(shape)) + shape[:-2] for shape in (self.a_shape, self.b_shape))
        return tuple(y if x == 1 else x for x, y in zip(a, b, strict=True))


def matmul(problem: Matmul) -> CpuKernel:
    """args: a, b, c f32 [.., M, N] without gaps."""
    p = problem
    rank = len(p.batch)
    a, b = _strides(p.a_shape, p.a_strides), _strides(p.b_shape, p.b_strides)
    lines = [f"const ingot_product s = {{.m = {rows_in_c(p.a_shape[-2])}, .n = {rows_in_c(p.b_shape[-1])}, "
             f".k = {rows_in_c(p.a_shape[-1])},",
             f"    .a_row = {a[-2]}, .a_col = {a[-1]}, .b_row = {b[-2]}, .b_col = {b[-1]}}};",
             f"const int items = ingot_matmul_items(s), batch = {' * '.join(map(_paren, p.batch)) or '1'};",
             "_Alignas(64) float panel[MATMUL_PANEL];",
             "int begin, end;",
             "ingot_split(batch * items, worker, num_workers, &begin, &end);",
             "for (int i = begin; i < end; i++) {",
             "    int matrix = i / items, rest = matrix;",
             "    const float *a = args[0], *b = args[1];"]
    for axis in reversed(range(rank)):
        extent = _paren(p.batch[axis])
        for name, shape, strides in (("a", p.a_shape, a), ("b", p.b_shape, b)):
            own = axis - rank + len(shape) - 2
            if own >= 0 and shape[own] != 1:
                lines.append(f"    {name} += rest % {extent} * {strides[own]};")
        if axis:
            lines.append(f"    rest /= {extent};")
    lines += ["    float *c = (float *)args[2] + (ptrdiff_t)matrix * s.m * s.n;",
              "    ingot_matmul_item(a, b, c, i % items, s, panel);", "}"]
    words = [*_words("a", p.a_shape, p.a_strides), *_words("b", p.b_shape, p.b_strides)]
    return CpuKernel(symbol("matmul", *words), "matmul/matmul.h", "\n".join(lines))


def _paren(extent: Rows) -> str:
    return str(extent) if isinstance(extent, int) else f"({rows_in_c(extent)})"


def _strides(shape: tuple[Rows, ...], given: tuple[Rows, ...] | None) -> list[str]:
    """In C, as ptrdiff_t."""
    if given is not None:
        assert len(given) == len(shape), (shape, given)
        return [f"(ptrdiff_t){_paren(stride)}" for stride in given]
    return [f"(ptrdiff_t){' * '.join(map(_paren, shape[axis + 1:])) or '1'}" for axis in range(len(shape))]


def _words(name: str, shape: tuple[Rows, ...], strides: tuple[Rows, ...] | None) -> list[Rows]:
    return [name, *shape, *(["s", *strides] if strides is not None else [])]
