"""Triton statements that compute loop expressions on a tile.

A tile has rows and columns. Each loop axis is an int32 variable i<n> of shape [ROWS, 1] or [1, COLUMNS], or a scalar;
arithmetic broadcasts them, so that what depends on rows alone is computed once a row. f32 of an expression is float32,
booleans are int1, all other integers int32. Every part is a statement, and equal parts are computed once.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..ir.types import Dim, DType, TensorType, concrete, split_dim
from .expr import Expr

ELEMENTS = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "i32": "i32", "i8": "i8", "u8": "u8", "bool": "u8"}
"""How a value may be stored -> Triton's name of the type."""

_FUNCTIONS = {
    "exp": "tl.exp", "log": "tl.log", "sin": "tl.sin", "cos": "tl.cos", "erf": "tl.erf", "sqrt": "tl.sqrt_rn",
    "rsqrt": "tl.rsqrt", "floor": "tl.floor", "ceil": "tl.ceil", "abs": "tl.abs", "round": "round_even",
    "floor_div": "floor_div", "pow": "power", **{name: name for name in (
        "expm1", "log1p", "tanh", "sigmoid", "silu", "softplus", "trunc", "sign", "maximum", "minimum", "mod")}}
_INTEGER_FUNCTIONS = {"abs": "tl.abs", "sign": "sign", "maximum": "maximum", "minimum": "minimum", "mod": "mod_int",
                      "floor_div": "floor_div_int", "pow": "power_int"}
_MODULES = {"narrow": "math"}
"""Where functions are that are not in ingot.plugins.gpu.functions."""

_BINARY = {"add": "+", "sub": "-", "mul": "*"}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_TRUTHS = {"add": "|", "logical_or": "|", "maximum": "|", "mul": "&", "logical_and": "&", "minimum": "&"}
_NOTHING_TO_ROUND = ("floor", "ceil", "round", "trunc")
_POWERS = {2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}", 0.5: "tl.sqrt_rn({0})", -0.5: "tl.rsqrt({0})", -1.0: "1.0 / {0}"}


@dataclass(frozen=True)
class Operand:
    """A value that a loop reads: its type in the graph, and the element type that it is stored in, of ELEMENTS."""

    type: TensorType
    element: str


def kind_of(dtype: DType) -> str:
    """"float", "int" or "bool": how a value is computed with."""
    return "float" if dtype.is_float else "bool" if dtype == DType.BOOL else "int"


def rows_in_triton(rows: Dim) -> str:
    """9*T -> (9 * T), T a variable."""
    factor, symbol = split_dim(rows)
    if symbol is None:
        return str(factor)
    return symbol if factor == 1 else f"({factor} * {symbol})"


def is_wide(type_: TensorType, bindings: Mapping[str, int]) -> bool:
    """Whether an element's number may exceed int32."""
    total = 1
    for extent in concrete(type_.shape, dict(bindings)):
        total *= extent
    return total >= 1 << 31


@dataclass(frozen=True)
class _Value:
    """text: a name or a literal; dims: the tile's dimensions that it has, of "rc"; None for a literal."""

    text: str
    dims: frozenset[str] | None

    @property
    def shape(self) -> frozenset[str]:
        return self.dims or frozenset()


@dataclass(frozen=True)
class Mask:
    """Where a part is wanted: a boolean variable, its dimensions, and the loop axes that it depends on."""

    name: str
    dims: frozenset[str]
    axes: frozenset[int]


@dataclass
class Statements:
    """axes: loop axis -> its dimension in the tile, "r" or "c", "" for a scalar.
    inside: dimension -> boolean variable that says which of its indices exist."""

    operands: Sequence[Operand]
    bindings: Mapping[str, int]
    axes: Mapping[int, str]
    inside: Mapping[str, str]
    lines: list[str] = field(default_factory=list)
    functions: set[str] = field(default_factory=set)
    loaded: set[int] = field(default_factory=set)
    symbols: set[str] = field(default_factory=set)
    _known: dict[tuple[Expr, tuple[Mask, ...]], _Value] = field(default_factory=dict)
    _texts: dict[str, _Value] = field(default_factory=dict)

    def value(self, e: Expr, kind: str) -> str:
        """Statements for an expression; the name of its value, of the given kind, which has .to and a shape."""
        return self._named(self._as(self._visit(e, ()), kind_of(e.dtype), kind), kind).text

    # --- parts ---

    def _visit(self, e: Expr, masks: tuple[Mask, ...]) -> _Value:
        key = e, masks if any(part.op == "load" for part in e.walk()) else ()
        if key not in self._known:
            self._known[key] = self._part(e, masks)
        return self._known[key]

    def _part(self, e: Expr, masks: tuple[Mask, ...]) -> _Value:
        match e.op:
            case "const":
                return _Value(_literal(e), None)
            case "index":
                return _Value(f"i{e.value}", frozenset(self.axes[e.value]))
            case "extent":
                self.symbols.add(e.value[0])
                return _Value(e.value[0], frozenset())
            case "load":
                return self._load(e, masks)
            case "pick":
                return self._pick(e, masks)
            case "cast":
                return self._cast(e, self._visit(e.args[0], masks))
        return self._operation(e, [self._visit(arg, masks) for arg in e.args])

    def _load(self, e: Expr, masks: tuple[Mask, ...]) -> _Value:
        operand = self.operands[e.value]
        self.loaded.add(e.value)
        place = self._flat(e, masks, operand.type)
        axes = {part.value for arg in e.args for part in arg.walk() if part.op == "index"}
        # What does not depend on a mask's axes lies inside of the operand wherever the mask is.
        masks = tuple(mask for mask in masks if mask.axes & axes)
        dims = place.shape.union(*(mask.dims for mask in masks))
        conditions = [self.inside[dim] for dim in sorted(dims, reverse=True) if dim in self.inside]
        conditions += [mask.name for mask in masks]
        text = f"in{e.value} + {place.text}"
        if dims != place.shape or (masks and not dims):
            text = f"{text} + tl.zeros({_tile(dims)}, tl.int32)"
        mask = f", mask={' & '.join(conditions)}, other=0" if conditions else ""
        loaded = f"tl.load({text}{mask})"
        match operand.element:
            case "bf16" | "fp16":
                loaded += ".to(tl.float32)"
            case "bool":
                loaded += " != 0"
            case "i8" | "u8":
                loaded += ".to(tl.int32)"
        return self._new(loaded, dims)

    def _flat(self, e: Expr, masks: tuple[Mask, ...], type_: TensorType) -> _Value:
        """The element number of a load in row-major order."""
        places = [(self._as(self._visit(at, masks), kind_of(at.dtype), "int"), dim)
                  for at, dim in zip(e.args, type_.shape, strict=True) if dim != 1]
        if not places:
            return _Value("0", None)
        for _, dim in places[1:]:
            self._use(dim)
        text, wide = "", is_wide(type_, self.bindings)
        if len(places) == 1 and not wide:
            return places[0][0]
        for place, dim in places:
            own = place.text
            if wide and place.dims is not None:
                own, wide = f"{own}.to(tl.int64)", False
            text = f"({text}) * {rows_in_triton(dim)} + {own}" if text else own
        if all(place.dims is None for place, _ in places) and not self.symbols:
            return _Value(text, None)
        return self._new(text, frozenset().union(*(place.shape for place, _ in places)))

    def _pick(self, e: Expr, masks: tuple[Mask, ...]) -> _Value:
        """Every part is computed everywhere, but loads only where it is picked."""
        where = self._named(self._visit(e.args[0], masks), "int")
        axes = frozenset(part.value for part in e.args[0].walk() if part.op == "index")
        kind, parts, begin = kind_of(e.dtype), e.args[1:], 0
        values, below = [], []
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            if not last:
                below.append(self._new(f"{where.text} < {e.value[number]}", where.shape))
            conditions = [self._new(f"{where.text} >= {begin}", where.shape).text] if number else []
            conditions += [] if last else [below[-1].text]
            mask = _Value(conditions[0], where.shape) if len(conditions) == 1 else self._new(
                " & ".join(conditions), where.shape)
            begin = e.value[number]
            found = self._visit(part, (*masks, Mask(mask.text, where.shape, axes)))
            values.append(self._as(found, kind_of(part.dtype), kind))
        result = values[-1]
        for condition, value in reversed(list(zip(below, values[:-1], strict=True))):
            if value.dims is None and result.dims is None:
                result = self._named(result, kind)
            result = self._new(f"tl.where({condition.text}, {value.text}, {result.text})",
                               condition.shape | value.shape | result.shape)
        return result

    def _cast(self, e: Expr, value: _Value) -> _Value:
        source, target = kind_of(e.args[0].dtype), kind_of(e.value)
        value = self._as(value, source, target)
        if e.value in (DType.BF16, DType.F16):
            self.functions.add("narrow")
            to = "tl.bfloat16" if e.value == DType.BF16 else "tl.float16"
            return self._new(f"narrow({self._named(value, target).text}, {to}).to(tl.float32)", value.shape)
        if e.value in (DType.U8, DType.I8) and source != "bool":
            to = "tl.uint8" if e.value == DType.U8 else "tl.int8"
            return self._new(f"{self._named(value, target).text}.to({to}).to(tl.int32)", value.shape)
        return value

    def _operation(self, e: Expr, values: list[_Value]) -> _Value:
        kind = kind_of(e.dtype)
        kinds = [kind_of(arg.dtype) for arg in e.args]
        dims = frozenset().union(*(value.shape for value in values))
        if e.op in _COMPARISONS:
            common = "float" if "float" in kinds else "int"
            a, b = self._operands(values, kinds, [common] * 2, literals=True)
            return self._new(f"{a} {_COMPARISONS[e.op]} {b}", dims)
        if e.op == "logical_not":
            return self._new(f"{self._operands(values, kinds, ['bool'])[0]} == 0", dims)
        if e.op == "where":
            c, a, b = self._operands(values, kinds, ["bool", kind, kind])
            return self._new(f"tl.where({c}, {a}, {b})", dims)
        if kind == "bool":
            a, b = self._operands(values, kinds, ["bool"] * 2)
            return self._new(f"{a} {_TRUTHS[e.op]} {b}", dims)
        operands = self._operands(values, kinds, [kind] * len(values), literals=e.op in (*_BINARY, "div"))
        return self._new(self._arithmetic(e, kind, operands), dims)

    def _arithmetic(self, e: Expr, kind: str, operands: list[str]) -> str:
        if e.op in _BINARY:
            return f"{operands[0]} {_BINARY[e.op]} {operands[1]}"
        match e.op:
            case "neg":
                return f"-{operands[0]}"
            case "div":
                return f"{operands[0]} / {operands[1]}"
            case "reciprocal":
                return f"1.0 / {operands[0]}"
            case "gelu":
                return self._call("gelu_tanh" if e.value == "tanh" else "gelu", operands)
            case "pow" if kind == "float" and e.args[1].op == "const" and float(e.args[1].value) in _POWERS:
                return _POWERS[float(e.args[1].value)].format(operands[0])
            case "floor_div" | "mod" if kind == "int" and _is_index_arithmetic(e):
                return f"{operands[0]} {'//' if e.op == 'floor_div' else '%'} {operands[1]}"
        if kind == "int" and e.op in _NOTHING_TO_ROUND:
            return operands[0]
        return self._call((_FUNCTIONS if kind == "float" else _INTEGER_FUNCTIONS)[e.op], operands)

    def _call(self, function: str, operands: list[str]) -> str:
        if not function.startswith("tl."):
            self.functions.add(function)
        return f"{function}({', '.join(operands)})"

    # --- names ---

    def _operands(self, values: list[_Value], kinds: list[str], wanted: list[str], literals: bool = False) -> list[str]:
        """Their texts, converted. literals: some may be numbers, but not all, so that the operation is one of tensors;
        functions take no numbers, since they ask for types."""
        found = [self._as(value, kind, want) for value, kind, want in zip(values, kinds, wanted, strict=True)]
        if literals and any(value.dims is not None for value in found):
            return [value.text if value.dims is not None or not value.text.startswith("-") else f"({value.text})"
                    for value in found]
        return [self._named(value, want).text for value, want in zip(found, wanted, strict=True)]

    def _as(self, value: _Value, kind: str, wanted: str) -> _Value:
        if kind == wanted:
            return value
        value = self._named(value, kind)
        if wanted == "bool":
            return self._new(f"{value.text} != 0", value.shape)
        return self._new(f"{value.text}.to(tl.{'float32' if wanted == 'float' else 'int32'})", value.shape)

    def _named(self, value: _Value, kind: str) -> _Value:
        """A literal as a scalar tensor."""
        if value.dims is not None:
            return value
        types = {"float": "tl.float32", "int": "tl.int32", "bool": "tl.int1"}
        return self._new(f"tl.full((1, 1), {value.text}, {types[kind]})", frozenset())

    def _new(self, text: str, dims: frozenset[str]) -> _Value:
        if text not in self._texts:
            self._texts[text] = _Value(f"v{len(self._texts)}", dims)
            self.lines.append(f"{self._texts[text].text} = {text}")
        return self._texts[text]

    def _use(self, dim: Dim) -> None:
        if (symbol := split_dim(dim)[1]) is not None:
            self.symbols.add(symbol)


def imports(functions: set[str]) -> list[str]:
    """The lines that import functions."""
    by_module: dict[str, list[str]] = {}
    for name in sorted(functions):
        by_module.setdefault(_MODULES.get(name, "functions"), []).append(name)
    return [f"from ingot.plugins.gpu.{module} import {', '.join(names)}" for module, names in sorted(by_module.items())]


def _tile(dims: frozenset[str]) -> str:
    return f"({'ROWS' if 'r' in dims else 1}, {'COLUMNS' if 'c' in dims else 1})"


def _literal(e: Expr) -> str:
    if e.dtype == DType.BOOL:
        return str(bool(e.value))
    if not e.dtype.is_float:
        return str(int(e.value))
    value = float(e.value)
    if value != value or value in (float("inf"), float("-inf")):
        return f'float("{value}")'
    return repr(value)


def _is_index_arithmetic(e: Expr) -> bool:
    """Made of loop indices without subtraction: never negative, so that Triton's division, which is C's, is numpy's."""
    known = ("index", "extent", "add", "mul", "floor_div", "mod")
    return all(part.op in known or (part.op == "const" and part.value > 0) for part in e.walk())
