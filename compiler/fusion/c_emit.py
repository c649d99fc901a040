"""C for a loop node: one function for each distinct loop."""
from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from itertools import pairwise

from ingot.plugins.constants import rows_in_c
from ingot.plugins.kernel import CpuKernel

from ..ir.graph import Node
from ..ir.types import Dim, DType, TensorType, product
from .c_expr import C_TYPES, in_c
from .expr import Expr, index, terms

_LANES = 16
"""Partial results of a reduction: one vector of the widest instruction set, so that the order of additions is the same
on all of them."""
_SHOWN = 300
"""Characters of the expression in the comment above the function."""


def emit(node: Node, inputs: list[TensorType]) -> CpuKernel:
    """args: the node's inputs in order, then its output."""
    shape, dtype, reduce, expr = (node.attrs[name] for name in ("shape", "dtype", "reduce", "expr"))
    text = f"{reduce[0]} over {list(reduce[1])} of {expr}" if reduce else str(expr)
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"
    comment = f"/* {TensorType(tuple(shape), dtype)} = {text} */"
    body = _Loop(tuple(shape), dtype, expr, reduce, inputs).body()
    digest = hashlib.sha256(f"{comment}{body}".encode()).hexdigest()[:16]
    return CpuKernel(f"loop_{digest}", "cpu/loop.h", body, comment)


def own_rows(node: Node, inputs: list[TensorType]) -> Dim:
    """The rows that the function walks, if they are of tokens or logits and each reads no more of such inputs than its
    own row; else "". As in Launch."""
    shape, dtype, reduce, expr = (node.attrs[name] for name in ("shape", "dtype", "reduce", "expr"))
    return _Loop(tuple(shape), dtype, expr, reduce, inputs).own_rows()


@dataclass
class _Loop:
    """A loop over rows (the flattened outer axes) around one over columns (the last axis that is not 1).

    A reduction over contiguous elements has rows alone, each reduced into lanes.
    """

    shape: tuple[Dim, ...]
    dtype: DType
    expr: Expr
    reduce: tuple[str, tuple[int, ...]] | None
    inputs: list[TensorType]

    def __post_init__(self) -> None:
        axes = [axis for axis, dim in enumerate(self.shape) if dim != 1]
        self.by_lanes = self.reduce is not None and self.reduce[1][-1] >= _LANES and self._reads_neighbours(
            len(self.shape) + len(self.reduce[1]) - 1)
        self.column = axes[-1] if axes and not self.by_lanes else None
        self.row_axes = axes if self.by_lanes else axes[:-1]

    @property
    def rows(self) -> Dim:
        return product(tuple(self.shape[axis] for axis in self.row_axes))

    def own_rows(self) -> Dim:
        loads = [e for e in self.expr.walk() if e.op == "load" and not all(
            isinstance(dim, int) for dim in self.inputs[e.value].shape)]
        return self.rows if not isinstance(self.rows, int) and all(map(self._is_own_row, loads)) else ""

    def _is_own_row(self, e: Expr) -> bool:
        """Whether the first indices of a load are those of the loop's row."""
        places = [(dim, at) for dim, at in zip(self.inputs[e.value].shape, e.args, strict=True) if dim != 1]
        return places[:len(self.row_axes)] == [(self.shape[axis], index(axis)) for axis in self.row_axes]

    def body(self) -> str:
        rows = self.rows
        columns: Dim = self.shape[self.column] if self.column is not None else 1
        lines = [f"const {C_TYPES[t.dtype]} *in{n} = args[{n}];" for n, t in enumerate(self.inputs)]
        lines += [f"{C_TYPES[self.dtype]} *restrict out = args[{len(self.inputs)}];",
                  f"const int rows = {rows_in_c(rows)}, columns = {rows_in_c(columns)};",
                  "const ingot_range range = ingot_split_grid(rows, columns, worker, num_workers);",
                  "for (int row = range.row_begin; row < range.row_end; row++) {",
                  *_indented(self._row_indices()),
                  f"    {C_TYPES[self.dtype]} *restrict y = out + (ptrdiff_t)row * columns;"]
        name = f"i{self.column}" if self.column is not None else "c"
        for begin, end, expr in self._pieces(columns):
            lines.append(f"    for (int {name} = {begin}, end = {end}; {name} < end; {name}++) {{")
            lines += _indented(_indented(self._element(expr, f"y[{name}]")))
            lines.append("    }")
        return "\n".join([*lines, "}"])

    def _row_indices(self) -> list[str]:
        """The indices of the row axes from the flat row."""
        lines, rest = [], "row"
        for axis in reversed(self.row_axes[1:]):
            size = rows_in_c(self.shape[axis])
            lines.append(f"const int i{axis} = {rest} % ({size});")
            rest = f"{rest} / ({size})"
        return [*lines, *(f"const int i{axis} = {rest};" for axis in self.row_axes[:1])]

    def _pieces(self, columns: Dim) -> list[tuple[str, str, Expr]]:
        """Column ranges in which no concatenation along the columns has to choose: (begin, end, expression)."""
        ends: set[int] = set()
        if self.column is not None and isinstance(columns, int):
            for part in self.expr.walk():
                if (offset := _offset(part, self.column)) is not None:
                    ends.update(end - offset for end in part.value if 0 < end - offset < columns)
        if not ends or self.column is None:
            return [("range.column_begin", "range.column_end", self.expr)]
        return [(f"ingot_maximumi(range.column_begin, {begin})", f"ingot_minimumi(range.column_end, {end})",
                 _picked(self.expr, self.column, begin)) for begin, end in pairwise([0, *sorted(ends), int(columns)])]

    def _element(self, expr: Expr, target: str) -> list[str]:
        value = in_c(expr, self.inputs)
        if self.reduce is None:
            return [f"{target} = {value};"]
        kind, sizes = self.reduce
        first = len(self.shape)
        outer = [f"for (int i{first + n} = 0; i{first + n} < {size}; i{first + n}++)"
                 for n, size in enumerate(sizes[:-1])]
        inner = f"i{first + len(sizes) - 1}"
        start = _start(kind, self.dtype)
        type_ = "int32_t" if self.dtype == DType.BOOL else C_TYPES[self.dtype]
        if self.by_lanes:
            lines = self._lanes(kind, value, type_, start, outer, inner, sizes[-1])
        else:
            lines = [f"{type_} total = {start};", *outer,
                     f"for (int {inner} = 0; {inner} < {sizes[-1]}; {inner}++) {_accumulate(kind, 'total', value)}"]
        divided = f" / {math.prod(sizes)}.0f" if kind == "mean" else ""
        return [*lines, f"{target} = total{divided};"]

    def _lanes(self, kind: str, value: str, type_: str, start: str, outer: list[str], inner: str, size: int,
               ) -> list[str]:
        whole = size // _LANES * _LANES
        tail = [f"for (int {inner} = {whole}; {inner} < {size}; {inner}++) "
                f"{_accumulate(kind, f'acc[{inner} - {whole}]', value)}"]
        return [f"{type_} acc[{_LANES}];",
                f"for (int j = 0; j < {_LANES}; j++) acc[j] = {start};",
                *outer, "{",
                f"    for (int base = 0; base < {whole}; base += {_LANES})",
                "        INGOT_LANES",
                f"        for (int j = 0; j < {_LANES}; j++) {{",
                f"            const int {inner} = base + j;",
                f"            {_accumulate(kind, 'acc[j]', value)}",
                "        }",
                *_indented(tail if whole < size else []), "}",
                f"for (int half = {_LANES // 2}; half; half /= 2)",
                f"    for (int j = 0; j < half; j++) {_accumulate(kind, 'acc[j]', 'acc[j + half]')}",
                f"{type_} total = acc[0];"]

    def _reads_neighbours(self, axis: int) -> bool:
        """Whether neighbours along the axis are neighbours in memory, in one load at least."""
        return any(e.op == "load" and e.args and terms(e.args[-1])[0].get(index(axis)) == 1 for e in self.expr.walk())


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _start(kind: str, dtype: DType) -> str:
    if kind in ("sum", "mean", "prod"):
        return "1" if kind == "prod" else "0"
    if dtype == DType.F32:
        return "-__builtin_inff()" if kind == "max" else "__builtin_inff()"
    return "INT32_MIN" if kind == "max" else "INT32_MAX"


def _accumulate(kind: str, total: str, value: str) -> str:
    """A statement. Maxima and minima are NaN if any value is."""
    if kind in ("sum", "mean", "prod"):
        return f"{{ {total} {'*' if kind == 'prod' else '+'}= {value}; }}"
    sign = ">" if kind == "max" else "<"
    return f"{{ const __typeof__({total}) v = {value}; {total} = v {sign} {total} || v != v ? v : {total}; }}"


def _offset(e: Expr, column: int) -> int | None:
    """c if the expression is a pick by i_column + c."""
    if e.op != "pick":
        return None
    atoms, constant = terms(e.args[0])
    return constant if atoms == {index(column): 1} else None


def _picked(expr: Expr, column: int, begin: int) -> Expr:
    """The expression for columns from `begin` on, up to the next end of any pick."""
    def choose(e: Expr) -> Expr | None:
        offset = _offset(e, column)
        if offset is None:
            return None
        number = next((n for n, end in enumerate(e.value) if begin + offset < end), len(e.value) - 1)
        return e.args[1 + number].mapped(choose)
    return expr.mapped(choose)
