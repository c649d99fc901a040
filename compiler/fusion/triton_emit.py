"""Triton source for a loop node: one module for each distinct loop, compiled as the kernels of plugins/ are."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ingot.plugins.gpu.generated import module_name
from ingot.plugins.gpu.kernel import SIZES, Candidate, Candidates, Cost, GpuKernel, GpuLaunch, Parameter, symbol

from ..ir.graph import Node
from ..ir.types import Dim, DType, TensorType, concrete, product, split_dim
from .expr import Expr, index, terms
from .triton_expr import ELEMENTS, Operand, Statements, imports, is_wide, kind_of, rows_in_triton

_TILE = 1024
"""Elements of a block's tile: 16 bytes of bf16 for each of 128 threads."""

_LANES = 16
"""A reduction over at least so many neighbours in memory is done across the threads of a block."""

_MAX_PADDING = 1.125
_UNROLLED = 16
"""Elements of a reduction that are written out one after the other."""

_SHOWN = 300
"""Characters of the expression in the module's first line."""

_BYTES = {"fp32": 4, "i32": 4, "bf16": 2, "fp16": 2}


def candidates(node: Node, inputs: Sequence[Operand], output: str, bindings: Mapping[str, int]) -> Candidates:
    """The launch of a loop node.

    inputs    what node.values are, row-major without gaps
    output    element type that the result is stored in, of triton_expr.ELEMENTS; floats are rounded to nearest
    bindings  the largest "T" and "L" of the token bucket

    Parameters: in<n> for each input that is read, out, and sizes if an extent is symbolic. The result must not lie in
    the memory of an input. Reductions are taken in a fixed order.
    """
    shape, dtype, reduce, expr = (node.attrs[name] for name in ("shape", "dtype", "reduce", "expr"))
    loop = _Loop(tuple(shape), dtype, expr, reduce, inputs, output, bindings)
    text = loop.text()
    module, parameters = module_name(text), loop.parameters()
    name = symbol("loop", module.rpartition(".")[2], f"{loop.tile_rows}x{loop.tile_columns}",
                  *(str(kind)[1:] for _, kind in parameters))
    kernel = GpuKernel(name, module, "loop", parameters, (("ROWS", loop.tile_rows), ("COLUMNS", loop.tile_columns)),
                       loop.num_warps, 1, source=text)
    name = f"loop {reduce[0]}" if reduce else "loop"
    return Candidates((Candidate(name, (GpuLaunch(kernel, loop.grid()),), loop.cost()),))


@dataclass
class _Loop:
    """Blocks of a result's rows (the flattened outer axes) and columns (the last axis that is not 1).

    A reduction over neighbours in memory has rows alone; the columns of its tile are what is reduced.
    """

    shape: tuple[Dim, ...]
    dtype: DType
    expr: Expr
    reduce: tuple[str, tuple[int, ...]] | None
    inputs: Sequence[Operand]
    output: str
    bindings: Mapping[str, int]
    body: Statements = field(init=False)

    def __post_init__(self) -> None:
        kept = [axis for axis, dim in enumerate(self.shape) if dim != 1]
        rank = len(self.shape)
        self.reduced = list(range(rank, rank + len(self.reduce[1]))) if self.reduce else []
        sizes = self.reduce[1] if self.reduce else ()
        self.across = self.reduce is not None and self.reduce[0] != "prod" and sizes[-1] >= _LANES \
            and self._reads_neighbours()
        self.column = kept[-1] if kept and not self.across else None
        self.row_axes = kept if self.column is None else kept[:-1]
        self.rows = product(tuple(self.shape[axis] for axis in self.row_axes))
        self.columns: Dim = self.shape[self.column] if self.column is not None else 1
        width = math.prod(sizes) if self.across else self._bound(self.columns)
        self.tile_columns = _tile_columns(width, isinstance(self.columns, str))
        self.tile_rows = max(1, _TILE // self.tile_columns)
        if isinstance(self.rows, int):
            self.tile_rows = min(self.tile_rows, _power_of_two(self.rows))
        self.num_warps = min(4, max(1, self.tile_rows * self.tile_columns // 128))
        axes = dict.fromkeys(self.row_axes, "r") | ({} if self.column is None else {self.column: "c"})
        axes |= dict.fromkeys(self.reduced, "c" if self.across else "")
        self.body = Statements(self.inputs, self.bindings, axes, {"r": "row_inside", "c": "column_inside"})

    def text(self) -> str:
        """Of the module."""
        lines = self._reduction() if self.reduce else self._elements()
        symbols = sorted(self.body.symbols | {s for dim in (self.rows, self.columns) if (s := split_dim(dim)[1])})
        head = [f"{symbol} = tl.load(sizes + {SIZES[symbol]})" for symbol in symbols] + self._places()
        names = [*(f"in{number}" for number in sorted(self.body.loaded)), "out", *(["sizes"] if symbols else [])]
        functions = self.body.functions | ({"narrow"} if kind_of(self.dtype) == "float" else set())
        shown = f"{self.reduce[0]} over {list(self.reduce[1])} of {self.expr}" if self.reduce else str(self.expr)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]} ..."
        return "\n".join([
            f'"""{TensorType(self.shape, self.dtype)} = {shown}"""',
            "import triton", "import triton.language as tl", "", *imports(functions), "", "",
            "@triton.jit", f"def loop({', '.join(names)}, ROWS: tl.constexpr, COLUMNS: tl.constexpr):",
            *_indented([*head, *lines]), ""])

    def parameters(self) -> tuple[tuple[str, Parameter], ...]:
        """As text() has written them."""
        names = [(f"in{number}", f"*{ELEMENTS[self.inputs[number].element]}") for number in sorted(self.body.loaded)]
        symbolic = self.body.symbols or any(split_dim(dim)[1] for dim in (self.rows, self.columns))
        return (*names, ("out", f"*{ELEMENTS[self.output]}"), *([("sizes", "*i32")] if symbolic else []))

    def grid(self) -> tuple[int, int, int]:
        return -(-self._most_rows() // self.tile_rows), -(-self._bound(self.columns) // self.tile_columns), 1

    def cost(self) -> Cost:
        """Of each operand no more than one element for each element that is computed."""
        written = self._most_rows() * self._bound(self.columns)
        computed = written * math.prod(self.reduce[1] if self.reduce else ())
        read = sum(min(math.prod(concrete(operand.type.shape, dict(self.bindings))), computed)
                   * _BYTES.get(operand.element, 1) for operand in self.inputs)
        return Cost(read + written * _BYTES.get(self.output, 1), float(computed * len(self.expr.walk())))

    # --- the parts of the function ---

    def _places(self) -> list[str]:
        """Which rows and columns are the block's, and the indices of the axes."""
        lines = ["row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]",
                 f"row_inside = row < {rows_in_triton(self.rows)}"]
        rest = "row"
        for axis in reversed(self.row_axes[1:]):
            size = rows_in_triton(self.shape[axis])
            lines.append(f"i{axis} = {rest} % {size}")
            rest = f"{rest} // {size}"
        lines += [f"i{axis} = {rest}" for axis in self.row_axes[:1]]
        if not self.across:
            lines.append("column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]")
            lines.append(f"column_inside = column < {rows_in_triton(self.columns)}")
            if self.column is not None:
                lines.append(f"i{self.column} = column")
        return lines

    def _elements(self) -> list[str]:
        value = self.body.value(self.expr, kind_of(self.dtype))
        return [*self.body.lines, self._store(value)]

    def _reduction(self) -> list[str]:
        assert self.reduce is not None
        kind, sizes = self.reduce
        computed = "float" if self.dtype.is_float else "int"  # booleans are counted, or compared as 0 and 1
        value = self.body.value(self.expr, computed)
        self.body.functions |= {"maximum"} if kind == "max" else {"minimum"} if kind == "min" else set()
        type_ = "tl.float32" if computed == "float" else "tl.int32"
        start = f"total = tl.full((ROWS, COLUMNS), {_start(kind, computed)}, {type_})"
        count = math.prod(sizes)
        if self.across:
            step = [*self._reduced_indices("column", sizes), *self.body.lines,
                    _accumulate(kind, f"tl.where(column_inside, {value}, {_start(kind, computed)})")]
            loop = [f"for first in range(0, {count}, COLUMNS):",
                    *_indented(["column = first + tl.arange(0, COLUMNS)[None, :]",
                                f"column_inside = column < {count}", *step])]
            last = _across(kind, computed)
        else:
            step = [*self._reduced_indices("number", sizes), *self.body.lines, _accumulate(kind, value)]
            loop = [f"for turn in {'tl.static_range' if count <= _UNROLLED else 'range'}({count}):",
                    *_indented(["number = tl.full((1, 1), 0, tl.int32) + turn", *step])]
            last = []
        mean = [f"total = total / {count}.0"] if kind == "mean" else []
        if self.dtype == DType.BOOL:
            mean.append("total = total != 0")
        return [start, *loop, *last, *mean, self._store("total")]

    def _reduced_indices(self, flat: str, sizes: tuple[int, ...]) -> list[str]:
        lines = []
        for axis, size in reversed(list(zip(self.reduced[1:], sizes[1:], strict=True))):
            lines.append(f"i{axis} = {flat} % {size}")
            flat = f"{flat} // {size}"
        return [*lines, f"i{self.reduced[0]} = {flat}"]

    def _store(self, value: str) -> str:
        wide = is_wide(TensorType(self.shape), self.bindings)
        row = "row.to(tl.int64)" if wide else "row"
        place = row if self.across or self.columns == 1 else f"{row} * {rows_in_triton(self.columns)} + column"
        inside = "row_inside" if self.across or self.columns == 1 else "row_inside & column_inside"
        match kind_of(self.dtype):
            case "float":
                value = f"narrow({value}, out.dtype.element_ty)"
            case "bool":
                value = f"{value}.to(tl.uint8)"
            case _:
                value = f"{value}.to(out.dtype.element_ty)"
        return f"tl.store(out + {place}, {value}, mask={inside})"

    # --- what decides the form ---

    def _bound(self, dim: Dim) -> int:
        return concrete((dim,), dict(self.bindings))[0]

    def _most_rows(self) -> int:
        return self._bound(self.rows)

    def _reads_neighbours(self) -> bool:
        """Whether neighbours along the last reduced axis are neighbours in memory, in one load at least."""
        return any(e.op == "load" and e.args and terms(e.args[-1])[0].get(index(self.reduced[-1])) == 1
                   for e in self.expr.walk())


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _tile_columns(width: int, symbolic: bool) -> int:
    """The widest tile that leaves few of its columns empty. Where the width is symbolic, the same for all buckets."""
    if symbolic:
        return 128
    if width <= 128:
        return _power_of_two(width)
    least = min(-(-width // size) * size for size in (1024, 512, 256, 128))
    return next(size for size in (1024, 512, 256, 128) if -(-width // size) * size <= least * _MAX_PADDING)


def _start(kind: str, computed: str) -> str:
    if kind in ("sum", "mean", "prod"):
        return ("1" if kind == "prod" else "0") + (".0" if computed == "float" else "")
    if computed == "float":
        return 'float("-inf")' if kind == "max" else 'float("inf")'
    return "-2147483648" if kind == "max" else "2147483647"


def _accumulate(kind: str, value: str) -> str:
    """Maxima and minima are NaN if any value is."""
    if kind in ("sum", "mean", "prod"):
        return f"total = total {'*' if kind == 'prod' else '+'} {value}"
    return f"total = {kind}imum(total, {value})"


def _across(kind: str, computed: str) -> list[str]:
    """The columns of a total reduced to one."""
    if kind in ("sum", "mean"):
        return ["total = tl.sum(total, 1)[:, None]"]
    extreme = [f"extreme = tl.{kind}(total, 1)[:, None]"]
    if computed == "int":
        return [*extreme, "total = extreme"]
    return ["lost = tl.max((total != total).to(tl.int32), 1)[:, None] > 0", *extreme,
            'total = tl.where(lost, float("nan"), extreme)']


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
