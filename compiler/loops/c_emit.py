"""C for a loop node: one function for each distinct loop."""
from __future__ import annotations

import hashlib
from dataclasses import dataclass

from ingot.plugins.constants import float_in_c, rows_in_c
from ingot.plugins.kernel import CpuKernel

from ..ir.graph import Node
from ..ir.types import Dim, DType, TensorType, product
from .expr import Expr, index, terms

C_TYPES = {DType.F32: "float", DType.I32: "int32_t", DType.BOOL: "uint8_t", DType.U8: "uint8_t", DType.I8: "int8_t"}
_LANES = 16
"""Partial sums of a reduction: one vector of the widest instruction set, so that the order of additions is the same
on all of them."""
_SPLIT_COLUMNS = 2048
"""From so many columns on, a step with fewer rows than workers divides the columns."""
_CALLS = {"exp": "ingot_expf", "expm1": "ingot_expm1f", "log": "ingot_logf", "log1p": "ingot_log1pf",
          "sin": "ingot_sinf", "cos": "ingot_cosf", "tanh": "ingot_tanhf", "erf": "ingot_erff",
          "sigmoid": "ingot_sigmoidf", "silu": "ingot_siluf", "softplus": "ingot_softplusf",
          "sqrt": "__builtin_sqrtf", "floor": "__builtin_floorf", "ceil": "__builtin_ceilf",
          "round": "__builtin_rintf", "trunc": "__builtin_truncf"}
_BINARY = {"add": "+", "sub": "-", "mul": "*", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
           "logical_and": "&&", "logical_or": "||"}
_START = {"sum": "0", "mean": "0", "prod": "1", "max": "-INFINITY", "min": "INFINITY"}


def emit(node: Node, inputs: list[TensorType]) -> CpuKernel:
    """args: the node's inputs in order, then its output."""
    shape, dtype, reduce = node.attrs["shape"], node.attrs["dtype"], node.attrs["reduce"]
    text = f"{node.attrs['expr']} {reduce} {shape} {dtype} {[str(t) for t in inputs]}"
    symbol = f"loop_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    body = _Emitter(tuple(shape), dtype, node.attrs["expr"], reduce, inputs).body()
    comment = str(node.attrs["expr"])
    shown = comment if len(comment) < 400 else comment[:400] + " …"
    prelude = f"/* {shape}: {reduce or ''} {shown} */".replace("*/ */", "*/")
    return CpuKernel(symbol, "cpu/simd.h", body, prelude)


@dataclass
class _Emitter:
    shape: tuple[Dim, ...]
    dtype: DType
    expr: Expr
    reduce: tuple[str, tuple[int, ...]] | None
    inputs: list[TensorType]

    def body(self) -> str:
        axes = [axis for axis, dim in enumerate(self.shape) if dim != 1]
        column = axes[-1] if axes else None
        rows = product(tuple(self.shape[axis] for axis in axes[:-1]))
        columns: Dim = self.shape[column] if column is not None else 1
        lines = [f"const {C_TYPES[t.dtype]} *in{n} = args[{n}];" for n, t in enumerate(self.inputs)]
        lines += [f"{C_TYPES[self.dtype]} *restrict out = args[{len(self.inputs)}];",
                  f"const int rows = {rows_in_c(rows)}, columns = {rows_in_c(columns)};",
                  "int row_begin, row_end, column_begin = 0, column_end = columns;"]
        if isinstance(columns, str) or columns >= _SPLIT_COLUMNS:
            lines += ["if (rows < num_workers) {",
                      "    row_begin = 0, row_end = rows;",
                      "    ingot_split((columns + 63) / 64, worker, num_workers, &column_begin, &column_end);",
                      "    column_begin *= 64;",
                      "    column_end = column_end * 64 < columns ? column_end * 64 : columns;",
                      "} else"]
        lines.append("ingot_split(rows, worker, num_workers, &row_begin, &row_end);")
        lines.append("for (int row = row_begin; row < row_end; row++) {")
        lines += [f"    {line}" for line in self._row_indices(axes[:-1])]
        lines.append(f"    {C_TYPES[self.dtype]} *restrict y = out + (size_t)row * columns;")
        for begin, end, expr in self._pieces(column, columns):
            lines += [f"    {line}" for line in self._columns(column, begin, end, expr)]
        return "\n".join([*lines, "}"])

    def _row_indices(self, axes: list[int]) -> list[str]:
        """The indices of the outer axes from the flat row."""
        lines, rest = [], "row"
        for axis in reversed(axes[1:]):
            size = rows_in_c(self.shape[axis])
            lines.append(f"const int i{axis} = {rest} % ({size});")
            rest = f"{rest} / ({size})"
        if axes:
            lines.append(f"const int i{axes[0]} = {rest};")
        return lines

    def _pieces(self, column: int | None, columns: Dim) -> list[tuple[str, str, Expr]]:
        """Column ranges in which no concatenation along the columns has to choose: (begin, end, expression)."""
        ends = {0} if self.reduce is None and isinstance(columns, int) else set()
        picks = [e for e in self.expr.walk() if e.op == "pick" and column is not None and _offset(e, column) is not None]
        for pick in picks if ends else []:
            offset = _offset(pick, column or 0) or 0
            ends.update(end - offset for end in pick.value if 0 < end - offset < int(columns))
        if len(ends) < 2:
            return [("column_begin", "column_end", self.expr)]
        marks = [*sorted(ends), int(columns)]
        return [(f"column_begin > {begin} ? column_begin : {begin}", f"column_end < {end} ? column_end : {end}",
                 _picked(self.expr, column or 0, begin)) for begin, end in zip(marks, marks[1:], strict=False)]

    def _columns(self, column: int | None, begin: str, end: str, expr: Expr) -> list[str]:
        name = f"i{column}" if column is not None else "c"
        head = f"for (int {name} = {begin}, end = {end}; {name} < end; {name}++)"
        if self.reduce is None:
            return [head, f"    y[{name}] = {self.c(expr)};"]
        kind, sizes = self.reduce
        axes = list(range(len(self.shape), len(self.shape) + len(sizes)))
        value_type = C_TYPES[self.dtype]
        start = _START[kind] if self.dtype == DType.F32 else {"max": "INT32_MIN", "min": "INT32_MAX"}.get(
            kind, _START[kind])
        inner, last = sizes[-1], f"i{axes[-1]}"
        outer = [f"for (int i{axis} = 0; i{axis} < {size}; i{axis}++)"
                 for axis, size in zip(axes[:-1], sizes[:-1], strict=True)]
        value, whole = self.c(expr), inner // _LANES * _LANES
        lines = [head + " {"]
        if whole and self._contiguous(expr, axes[-1]):
            lines += [f"    {value_type} acc[{_LANES}];",
                      f"    for (int j = 0; j < {_LANES}; j++) acc[j] = {start};",
                      *(f"    {line}" for line in outer), "    {",
                      f"    for (int base = 0; base < {whole}; base += {_LANES})",
                      f"        for (int j = 0; j < {_LANES}; j++) {{",
                      f"            const int {last} = base + j;",
                      f"            {_accumulate(kind, 'acc[j]', value)}",
                      "        }",
                      f"    for (int {last} = {whole}; {last} < {inner}; {last}++) "
                      f"{{ {_accumulate(kind, f'acc[{last} - {whole}]', value)} }}",
                      "    }",
                      f"    for (int half = {_LANES // 2}; half; half /= 2)",
                      f"        for (int j = 0; j < half; j++) {{ {_accumulate(kind, 'acc[j]', 'acc[j + half]')} }}",
                      f"    {value_type} total = acc[0];"]
        else:
            lines += [f"    {value_type} total = {start};", *(f"    {line}" for line in outer),
                      f"    for (int {last} = 0; {last} < {inner}; {last}++) "
                      f"{{ {_accumulate(kind, 'total', value)} }}"]
        count = 1
        for size in sizes:
            count *= size
        divided = f"total * {float_in_c(1 / count)}" if kind == "mean" else "total"
        return [*lines, f"    y[{name}] = {divided};", "}"]

    def _contiguous(self, expr: Expr, axis: int) -> bool:
        """Whether neighbours along the reduced axis are neighbours in memory, in one load at least."""
        return any(e.op == "load" and e.args and terms(e.args[-1])[0].get(index(axis)) == 1 for e in expr.walk())

    # --- expressions in C ---

    def c(self, e: Expr) -> str:
        match e.op:
            case "const":
                return _constant(e)
            case "index":
                return f"i{e.value}"
            case "load":
                return f"in{e.value}[{self._flat(e)}]"
            case "pick":
                text = self.c(e.args[-1])
                for end, part in reversed(list(zip(e.value, e.args[1:-1], strict=False))):
                    text = f"({self.c(e.args[0])} < {end} ? {self.c(part)} : {text})"
                return text
        a = [self.c(arg) for arg in e.args]
        integral = e.dtype != DType.F32
        if e.op in _BINARY:
            return f"({a[0]} {_BINARY[e.op]} {a[1]})"
        if e.op in _CALLS:
            return a[0] if integral else f"{_CALLS[e.op]}({a[0]})"
        match e.op:
            case "neg":
                return f"(-{a[0]})"
            case "abs":
                return f"__builtin_abs({a[0]})" if integral else f"__builtin_fabsf({a[0]})"
            case "logical_not":
                return f"(!{a[0]})"
            case "rsqrt":
                return f"(1.0f / __builtin_sqrtf({a[0]}))"
            case "reciprocal":
                return f"(1.0f / {a[0]})"
            case "sign":
                return f"(({a[0]} > 0) - ({a[0]} < 0))"
            case "gelu":
                return f"{'ingot_gelu_tanhf' if e.value == 'tanh' else 'ingot_geluf'}({a[0]})"
            case "div":
                return f"((float){a[0]} / (float){a[1]})"
            case "where":
                return f"({a[0]} ? {a[1]} : {a[2]})"
            case "cast":
                return f"({a[0]} != 0)" if e.value == DType.BOOL else f"(({C_TYPES[e.value]}){a[0]})"
            case "maximum" | "minimum":
                # NaN if either is: a comparison with NaN is false, and the last operand is then the sum, which is NaN.
                sign = ">" if e.op == "maximum" else "<"
                if integral:
                    return f"({a[0]} {sign} {a[1]} ? {a[0]} : {a[1]})"
                return f"({a[0]} {sign} {a[1]} ? (float){a[0]} : {a[1]} == {a[1]} && {a[0]} == {a[0]} ? {a[1]} : " \
                       f"{a[0]} + {a[1]})"
            case "floor_div":
                return self._floor_div(e, a)
            case "mod":
                if not integral:
                    return f"({a[0]} - {a[1]} * __builtin_floorf({a[0]} / {a[1]}))"
                if _positive(e):
                    return f"({a[0]} % {a[1]})"
                return f"((({a[0]}) % ({a[1]}) + ({a[1]})) % ({a[1]}))"
            case "pow":
                return self._pow(e, a)
        raise AssertionError(f"no C for {e.op}")

    def _floor_div(self, e: Expr, a: list[str]) -> str:
        if e.dtype == DType.F32:
            return f"__builtin_floorf({a[0]} / {a[1]})"
        if _positive(e):
            return f"({a[0]} / {a[1]})"
        return f"(({a[0]} - ((({a[0]}) % ({a[1]}) + ({a[1]})) % ({a[1]}))) / {a[1]})"

    def _pow(self, e: Expr, a: list[str]) -> str:
        exponent = e.args[1].value if e.args[1].op == "const" else None
        if exponent in (2, 3):
            return f"({' * '.join([a[0]] * int(exponent))})"
        if exponent == 0.5:
            return f"__builtin_sqrtf({a[0]})"
        if exponent == -0.5:
            return f"(1.0f / __builtin_sqrtf({a[0]}))"
        power = f"ingot_powf({a[0]}, {a[1]})"
        return f"((int32_t){power})" if e.dtype == DType.I32 else power

    def _flat(self, e: Expr) -> str:
        """The element number of a load in row-major order."""
        shape = self.inputs[e.value].shape
        text = ""
        for axis, at in enumerate(e.args):
            if shape[axis] == 1 and at.op == "const":
                continue
            text = f"({text}) * ({rows_in_c(shape[axis])}) + {self.c(at)}" if text else f"(ptrdiff_t){self.c(at)}"
        return text or "0"


def _constant(e: Expr) -> str:
    if e.dtype == DType.F32:
        value = float(e.value)
        if value != value:
            return "NAN"
        if value in (float("inf"), float("-inf")):
            return "INFINITY" if value > 0 else "(-INFINITY)"
        return float_in_c(value)
    return f"({int(e.value)})" if int(e.value) < 0 else str(int(e.value))


def _accumulate(kind: str, total: str, value: str) -> str:
    if kind in ("sum", "mean"):
        return f"{total} += {value};"
    if kind == "prod":
        return f"{total} *= {value};"
    sign = ">" if kind == "max" else "<"
    return f"const __typeof__({total}) v = {value}; {total} = v {sign} {total} || v != v ? v : {total};"


def _positive(e: Expr) -> bool:
    """Index arithmetic, which knows no negative numbers."""
    return all(part.op in ("const", "index", "add", "mul", "floor_div", "mod") for part in e.walk()) \
        and all(part.op != "const" or part.value >= 0 for part in e.walk())


def _offset(pick: Expr, column: int) -> int | None:
    """c if the pick chooses by i_column + c."""
    atoms, constant = terms(pick.args[0])
    return constant if atoms == {index(column): 1} else None


def _picked(expr: Expr, column: int, begin: int) -> Expr:
    """The expression for columns from `begin` on, up to the next end of any pick."""
    def choose(e: Expr) -> Expr | None:
        if e.op != "pick":
            return None
        offset = _offset(e, column)
        if offset is None:
            return None
        number = next(n for n, end in enumerate(e.value) if begin + offset < end)
        return e.args[1 + number].mapped(choose)
    return expr.mapped(choose)


