"""C text of loop expressions.

What is f32 in an expression is a float in C, integers and booleans are int; C's own conversions where the two meet are
numpy's.
"""
from __future__ import annotations

from collections.abc import Sequence

from ingot.plugins.constants import float_in_c, rows_in_c

from ..ir.types import DType, TensorType
from .expr import Expr

C_TYPES = {DType.F32: "float", DType.I32: "int32_t", DType.BOOL: "uint8_t", DType.U8: "uint8_t", DType.I8: "int8_t"}

_FLOAT_CALLS = {
    "exp": "ingot_expf", "expm1": "ingot_expm1f", "log": "ingot_logf", "log1p": "ingot_log1pf", "sin": "ingot_sinf",
    "cos": "ingot_cosf", "tanh": "ingot_tanhf", "erf": "ingot_erff", "sigmoid": "ingot_sigmoidf",
    "silu": "ingot_siluf", "softplus": "ingot_softplusf", "sqrt": "__builtin_sqrtf", "rsqrt": "ingot_rsqrtf",
    "reciprocal": "ingot_reciprocalf", "floor": "__builtin_floorf", "ceil": "__builtin_ceilf",
    "round": "__builtin_rintf", "trunc": "__builtin_truncf", "abs": "__builtin_fabsf", "sign": "ingot_signf",
    "maximum": "ingot_maximumf", "minimum": "ingot_minimumf", "where": "ingot_selectf", "mod": "ingot_modf",
    "floor_div": "ingot_floor_divf", "pow": "ingot_powf"}
_INTEGER_CALLS = {
    "abs": "__builtin_abs", "sign": "ingot_signi", "maximum": "ingot_maximumi", "minimum": "ingot_minimumi",
    "where": "ingot_selecti", "mod": "ingot_modi", "floor_div": "ingot_floor_divi", "pow": "ingot_powi",
    **dict.fromkeys(("floor", "ceil", "round", "trunc"), "")}
_BINARY = {"add": "+", "sub": "-", "mul": "*", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_LOGICAL = {"logical_and": "&", "logical_or": "|"}
_POWERS = {2.0: "ingot_squaref", 3.0: "ingot_cubef", 0.5: "__builtin_sqrtf", -0.5: "ingot_rsqrtf",
           -1.0: "ingot_reciprocalf"}


def in_c(e: Expr, inputs: Sequence[TensorType]) -> str:
    """inputs: the types of what the loads read. Axis n is the C variable i<n>, input n the pointer in<n>."""
    match e.op:
        case "const":
            return constant_in_c(e)
        case "index":
            return f"i{e.value}"
        case "extent":
            return rows_in_c(e.value[0])
        case "load":
            return f"in{e.value}[{_flat(e, inputs)}]"
        case "pick":
            # Lazily: a part that is not picked may lie outside of what it reads.
            where, *parts = (in_c(arg, inputs) for arg in e.args)
            text = parts[-1]
            for end, part in reversed(list(zip(e.value, parts[:-1], strict=False))):
                text = f"({where} < {end} ? {part} : {text})"
            return text
        case "maximum" | "minimum" if e.args[1].op == "const":
            return _operation(e, [in_c(arg, inputs) for arg in reversed(e.args)])
    return _operation(e, [in_c(arg, inputs) for arg in e.args])


def _operation(e: Expr, a: list[str]) -> str:
    is_float = e.dtype == DType.F32
    match e.op:
        case "add" if e.dtype == DType.BOOL:
            return f"({a[0]} | {a[1]})"
        case "neg":
            return f"(-{a[0]})"
        case "div":
            return f"((float){a[0]} / (float){a[1]})"
        case "logical_not":
            return f"(!{a[0]})"
        case "logical_and" | "logical_or":
            return f"({_truth(e.args[0], a[0])} {_LOGICAL[e.op]} {_truth(e.args[1], a[1])})"
        case "cast":
            return _truth(e.args[0], a[0]) if e.value == DType.BOOL else f"(({C_TYPES[e.value]}){a[0]})"
        case "gelu":
            return f"{'ingot_gelu_tanhf' if e.value == 'tanh' else 'ingot_geluf'}({a[0]})"
        case "floor_div" | "mod" if not is_float and _is_index_arithmetic(e):
            return f"({a[0]} {'/' if e.op == 'floor_div' else '%'} {a[1]})"
        case "pow" if is_float and e.args[1].op == "const" and float(e.args[1].value) in _POWERS:
            return f"{_POWERS[float(e.args[1].value)]}({a[0]})"
    if e.op in _BINARY:
        return f"({a[0]} {_BINARY[e.op]} {a[1]})"
    call = (_FLOAT_CALLS if is_float else _INTEGER_CALLS)[e.op]
    return f"{call}({', '.join(a)})"


def constant_in_c(e: Expr) -> str:
    if e.dtype != DType.F32:
        return f"({int(e.value)})" if int(e.value) < 0 else str(int(e.value))
    value = float(e.value)
    if value != value:
        return "__builtin_nanf(\"\")"
    if value in (float("inf"), float("-inf")):
        return f"({'-' if value < 0 else ''}__builtin_inff())"
    text = float_in_c(value)
    return f"({text})" if text.startswith("-") else text


def _truth(e: Expr, text: str) -> str:
    """0 or 1."""
    return text if e.dtype == DType.BOOL else f"({text} != 0)"


def _flat(e: Expr, inputs: Sequence[TensorType]) -> str:
    """The element number of a load in row-major order."""
    shape = inputs[e.value].shape
    text = ""
    for axis, at in enumerate(e.args):
        if shape[axis] == 1:
            continue
        place = in_c(at, inputs)
        text = f"({text}) * ({rows_in_c(shape[axis])}) + {place}" if text else f"(ptrdiff_t){place}"
    return text or "0"


def _is_index_arithmetic(e: Expr) -> bool:
    """Made of loop indices without subtraction: never negative, so that C's division is numpy's."""
    known = ("index", "extent", "add", "mul", "floor_div", "mod")
    return all(part.op in known or (part.op == "const" and part.value > 0) for part in e.walk())
