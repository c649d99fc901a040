"""Floating-point arithmetic. Fused multiply-adds are rounded once, by way of float64 (which rounds twice in rare ties).

Approximate instructions are as far from the exact result as the PTX ISA allows them to be, by a share of that bound
which depends on the bits of the operand: what passes here does not lean on an exactness that hardware lacks."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .instruction import Code, Instruction, PtxError, Run, instruction
from .rows import apply, compute

_TYPES = ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "f32x2")
_ROUNDINGS = ("", "rn.")
_REGISTER = {"f16": "u2", "bf16": "u2", "f32": "u4", "f64": "u8", "f16x2": "u4", "bf16x2": "u4", "f32x2": "u8"}
_KNOWN = {"rn", "ftz", "approx", "full", "NaN", "sat", "relu", "xorsign", "abs", *_TYPES}

_ULP2 = 2.0**-22
_ROUNDING = 2.0**-24
"""The share of rounding to float32 in an error."""
_BOUNDS = {"ex2": 2.0**-22.5, "rsqrt": 2.0**-22.9, "rcp": 2.0**-23, "sqrt": 2.0**-23, "tanh": 2.0**-11, "div": _ULP2,
           "lg2": 2.0**-22, "sin": 2.0**-20.5, "cos": 2.0**-20.5}
"""Largest errors, relative; of lg2, sin and cos (in -2 pi to 2 pi) absolute. Source: PTX ISA, floating-point
instructions."""


_EXACT: dict[str, Callable[..., Any]] = {
    "div": np.divide, "ex2": np.exp2, "lg2": np.log2, "rsqrt": lambda x: 1 / np.sqrt(x), "rcp": lambda x: 1 / x,
    "sqrt": np.sqrt, "sin": np.sin, "cos": np.cos, "tanh": np.tanh}


def widen(bits: np.ndarray, name: str) -> np.ndarray:
    """Register bits -> floats: float32, or float64 of f64; of packed types twice as many."""
    if name.startswith("bf16"):
        return (bits.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if name.startswith("f16"):
        return bits.view("<f2").astype(np.float32)
    return bits.view("<f8" if name == "f64" else "<f4")


def narrow(values: np.ndarray, name: str) -> np.ndarray:
    """The reverse, to nearest."""
    if name.startswith("bf16"):
        found = round_to_bf16(np.asarray(values, np.float32))
    elif name.startswith("f16"):
        found = np.asarray(values).astype(np.float16)
    else:
        found = np.asarray(values).astype("<f8" if name == "f64" else "<f4")
    return found.view(f"<{_REGISTER[name]}")


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 -> u16 bits, to nearest, ties to even; NaN is 0x7FFF."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def flush(x: np.ndarray) -> np.ndarray:
    """Subnormal float32 become zeros of their sign."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def _check(op: Instruction) -> str:
    """The type. Raises PtxError for a modifier that is not known."""
    parts = op.parts
    if unknown := set(parts[1:]) - _KNOWN:
        raise PtxError(f"{op.opcode}: .{unknown.pop()} is not supported")
    return parts[-1]


def _floats(op: Instruction, code: Code, function: Callable[..., Any]) -> Run:
    """d = function(a, …) of floats, with what modifiers ask for before and after."""
    name = _check(op)
    flushes, saturates, relu = op.has("ftz"), op.has("sat"), op.has("relu")

    def run(*bits: np.ndarray) -> np.ndarray:
        values = [widen(x, name) for x in bits]
        if flushes:
            values = [flush(x) for x in values]
        found = function(*values)
        if saturates:
            found = np.where(np.isnan(found), 0, np.clip(found, 0, 1))
        if relu:
            found = np.where(np.isnan(found), found, np.maximum(found, 0))
        rounded = narrow(found, name)
        return flush(rounded.view(np.float32)).view(rounded.dtype) if flushes else rounded
    kind = _REGISTER[name]
    return compute(op, code, run, kind, *[kind] * (len(op.operands) - 1))


def _named(*names: str) -> list[str]:
    return [f"{name}.{rounding}{rest}" for name in names for rounding in _ROUNDINGS
            for kind in _TYPES for rest in (kind, f"ftz.{kind}", f"sat.{kind}", f"ftz.sat.{kind}")]


@instruction(*_named("add", "sub", "mul"))
def arithmetic(op: Instruction, code: Code) -> Run:
    ufunc = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[op.opcode.partition(".")[0]]
    kind = {"f32": "f4", "f64": "f8"}.get(op.parts[-1])
    if kind and not op.has("ftz") and not op.has("sat"):
        return apply(op, code, ufunc, kind)
    return _floats(op, code, ufunc)


@instruction("fma.rn")
def fused(op: Instruction, code: Code) -> Run:
    if op.opcode == "fma.rn.f32":
        return compute(op, code, _fma, "f4", "f4", "f4", "f4")
    return _floats(op, code, _fma)


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return np.multiply(a, b, dtype=np.float64) + c


@instruction(*[f"{name}.f32.{kind}" for name in ("add", "add.rn", "sub", "sub.rn", "fma.rn")
               for kind in ("f16", "bf16")])
def mixed(op: Instruction, code: Code) -> Run:
    """All but the last operand are narrow; the result is a float32."""
    kind, name = op.parts[-1], op.parts[0]

    def run(*values: np.ndarray) -> np.ndarray:
        *narrow_ones, last = values
        wide = [widen(bits, kind) for bits in narrow_ones]
        return _fma(wide[0], wide[1], last) if name == "fma" else wide[0] + last if name == "add" else wide[0] - last
    return compute(op, code, run, "f4", *["u2"] * (len(op.operands) - 2), "f4")


@instruction(*[f"{name}.{rest}{kind}" for name in ("min", "max") for kind in _TYPES
               for rest in ("", "ftz.", "NaN.", "ftz.NaN.", "NaN.ftz.")])
def extreme(op: Instruction, code: Code) -> Run:
    """Of a NaN and a number the number, unless it says NaN."""
    lowest = op.opcode.startswith("min")
    propagates, ignores = (np.minimum, np.fmin) if lowest else (np.maximum, np.fmax)
    ufunc = propagates if op.has("NaN") else ignores
    if op.parts[-1] == "f32" and not op.has("ftz"):
        return _three(op, code, ufunc) if len(op.operands) == 4 else apply(op, code, ufunc, "f4")
    return _floats(op, code, ufunc)


def _three(op: Instruction, code: Code, ufunc: Any) -> Run:
    return compute(op, code, lambda a, b, c: ufunc(ufunc(a, b), c), "f4", "f4", "f4", "f4")


@instruction(*[f"{name}.{rest}{kind}" for name in ("neg", "abs") for kind in _TYPES for rest in ("", "ftz.")])
def sign(op: Instruction, code: Code) -> Run:
    """Of the bits, so that NaN keeps its own."""
    name = _check(op)
    kind = _REGISTER[name]
    single = 16 if name in ("f16x2", "bf16x2") else 32 if name == "f32x2" else 8 * int(kind[1])
    mask = 1 << (single - 1)
    if single < 8 * int(kind[1]):
        mask |= mask << single
    bit = np.array(mask, kind)
    negates, flushes = op.opcode.startswith("neg"), op.has("ftz")

    def change(a: np.ndarray) -> np.ndarray:
        if flushes:
            a = flush(a.view(np.float32)).view(a.dtype)
        return a ^ bit if negates else a & ~bit
    return compute(op, code, change, kind, kind)


@instruction("copysign.f32", "copysign.f64")
def copy_sign(op: Instruction, code: Code) -> Run:
    """The magnitude of b with the sign of a."""
    kind = "f4" if op.has("f32") else "f8"
    return compute(op, code, lambda a, b: np.copysign(b, a), kind, kind, kind)


@instruction("div.rn", "div.full", "div.approx", "sqrt.rn", "rcp.rn", "ex2.approx", "lg2.approx", "rsqrt.approx",
             "rcp.approx", "sqrt.approx", "sin.approx", "cos.approx", "tanh.approx")
def function(op: Instruction, code: Code) -> Run:
    name = op.opcode.partition(".")[0]
    exact = _EXACT[name]
    if op.has("rn"):
        return _floats(op, code, exact)
    found = partial(_approximate, name, exact)
    if name == "div" and op.has("approx"):
        return _floats(op, code, lambda a, b: np.where(
            (np.abs(b) > 2.0**126) & np.isfinite(a), np.copysign(0.0, found(a, b)), found(a, b)))
    return _floats(op, code, found)


def _approximate(name: str, exact: Callable[..., Any], *values: np.ndarray) -> np.ndarray:
    true = exact(*[x.astype(np.float64) for x in values])
    error = (_BOUNDS[name] - _ROUNDING) * noise(values[-1])
    if name in ("lg2", "sin", "cos"):
        return true + np.where(np.isfinite(true) & (true != 0), error, 0)
    if name in ("ex2", "rcp"):
        error = np.where(np.abs(values[0]) == (0 if name == "ex2" else 1), 0, error)
    return true * (1 + error)


def noise(x: np.ndarray) -> np.ndarray:
    """-0.9 to 0.9, the same for the same bits."""
    bits = np.ascontiguousarray(x).view(f"<u{x.dtype.itemsize}").astype(np.uint64)
    mixed = (bits * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
    return (mixed.astype(np.float64) * 2.0**-23 - 1) * 0.9
