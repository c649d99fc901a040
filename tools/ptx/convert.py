"""cvt: from every type to every other that Triton asks for. Floats are rounded to nearest unless rz says to zero."""
from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from .floating import flush, narrow, round_to_bf16, widen
from .instruction import Code, Instruction, PtxError, Run, instruction
from .rows import INTEGERS, compute, register_width

_FLOATS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}
_SMALL = {"e4m3x2": ml_dtypes.float8_e4m3fn, "e5m2x2": ml_dtypes.float8_e5m2, "e2m1x2": ml_dtypes.float4_e2m1fn}
_LARGEST = {"e4m3x2": 448.0, "e5m2x2": 57344.0, "e2m1x2": 6.0}
_NAN = {"e4m3x2": 0x7F, "e5m2x2": 0x7F, "e2m1x2": 0x7}
_KNOWN = {"rn", "rz", "rna", "rni", "rzi", "rmi", "rpi", "ftz", "sat", "satfinite", "relu"}
_TO_INTEGER: dict[str, Callable[[np.ndarray], np.ndarray]] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor,
                                                              "rpi": np.ceil}


@instruction("cvt")
def convert(op: Instruction, code: Code) -> Run:
    *modifiers, to, source = op.parts[1:]
    if unknown := set(modifiers) - _KNOWN:
        raise PtxError(f"{op.opcode}: .{unknown.pop()} is not supported")
    if to in INTEGERS and source in INTEGERS:
        return _integers(op, code, to, source)
    if to in INTEGERS and source in _FLOATS:
        return _to_integer(op, code, to, source)
    if to in _FLOATS and source in INTEGERS:
        return _from_integer(op, code, to, source)
    if to in _FLOATS and source in _FLOATS:
        return _floats(op, code, to, source)
    if to == "tf32" and source == "f32":
        return compute(op, code, _tf32(op), "u4", "u4")
    if to in ("bf16x2", "f16x2") and source == "f32":
        return _pair(op, code, to)
    if to in _SMALL and source == "f32":
        return _small_from_pair(op, code, to)
    if to in _SMALL and source in ("f16x2", "bf16x2"):
        return compute(op, code, lambda a: _encode(*_halves(widen(a, source)), to, op), _small_register(to), "u4")
    if to in ("f16x2", "bf16x2") and source in _SMALL:
        return _from_small(op, code, to, source)
    raise PtxError(f"unknown instruction {op.opcode}")


def _register(op: Instruction, place: int, name: str) -> str:
    """numpy type of an operand's register: those of integers may be wider than the type."""
    width = register_width(op.operands[place]) or 8 * int(INTEGERS[name][1])
    return f"{INTEGERS[name][0]}{width // 8}"


def _integers(op: Instruction, code: Code, to: str, source: str) -> Run:
    inner, outer = INTEGERS[source], INTEGERS[to]
    saturates = op.has("sat")

    def cast(a: np.ndarray) -> np.ndarray:
        value = a.astype(inner)
        if saturates:
            limits = np.iinfo(outer)
            value = np.clip(value.astype(object), limits.min, limits.max)
        return value.astype(outer)
    return compute(op, code, cast, _register(op, 0, to), _register(op, 1, source))


def _to_integer(op: Instruction, code: Code, to: str, source: str) -> Run:
    rounding = next((_TO_INTEGER[part] for part in op.parts if part in _TO_INTEGER), None)
    if rounding is None:
        raise PtxError(f"{op.opcode} does not say how to round")
    limits, kind = np.iinfo(INTEGERS[to]), f"u{_FLOATS[source] // 8}"

    def cast(a: np.ndarray) -> np.ndarray:
        whole = rounding(widen(a, source).astype(np.float64))
        whole = np.where(np.isnan(whole), 0.0, whole)
        low, high = whole <= float(limits.min), whole >= float(limits.max)
        found = np.where(low | high, 0.0, whole).astype(INTEGERS[to])
        found = np.where(low, np.array(limits.min, INTEGERS[to]), found)
        return np.where(high, np.array(limits.max, INTEGERS[to]), found)
    return compute(op, code, cast, _register(op, 0, to), kind)


def _from_integer(op: Instruction, code: Code, to: str, source: str) -> Run:
    inner = INTEGERS[source]
    if op.has("rz"):
        raise PtxError(f"{op.opcode}: .rz is not supported")

    def cast(a: np.ndarray) -> np.ndarray:
        whole = a.astype(inner)
        return narrow(whole.astype(np.float32 if to == "f32" else np.float64), to)
    return compute(op, code, cast, f"u{_FLOATS[to] // 8}", _register(op, 1, source))


def _floats(op: Instruction, code: Code, to: str, source: str) -> Run:
    rounding = next((_TO_INTEGER[part] for part in op.parts if part in _TO_INTEGER), None)
    flushes, saturates, relu, to_zero = (op.has(name) for name in ("ftz", "sat", "relu", "rz"))
    if to_zero and (to, source) != ("bf16", "f32"):
        raise PtxError(f"{op.opcode}: .rz is not supported")

    def cast(a: np.ndarray) -> np.ndarray:
        value = widen(a, source)
        if flushes and source == "f32":
            value = flush(value)
        if rounding:
            value = rounding(value)
        if saturates:
            value = np.where(np.isnan(value), 0, np.clip(value, 0, 1))
        if relu:
            value = np.where(value < 0, 0, value)
        if to_zero:
            return (np.ascontiguousarray(value, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return narrow(value, to)
    return compute(op, code, cast, f"u{_FLOATS[to] // 8}", f"u{_FLOATS[source] // 8}")


def _tf32(op: Instruction) -> Callable[[np.ndarray], np.ndarray]:
    """10 bits of mantissa; rna: ties away from zero."""
    def cast(bits: np.ndarray) -> np.ndarray:
        half = np.uint32(0x1000) if op.has("rna") else np.uint32(0xFFF) + (bits >> 13 & 1)
        return np.where(np.isnan(bits.view(np.float32)), bits, (bits + half) & np.uint32(0xFFFFE000))
    return cast


def _pair(op: Instruction, code: Code, to: str) -> Run:
    """The first source goes to the upper half."""
    relu, to_zero = op.has("relu"), op.has("rz")
    if to_zero and to == "f16x2":
        raise PtxError(f"{op.opcode}: .rz is not supported")

    def one(x: np.ndarray) -> np.ndarray:
        if relu:
            x = np.where(x < 0, np.float32(0), x)
        if to_zero:
            return x.view(np.uint32) >> 16
        return (round_to_bf16(x) if to == "bf16x2" else x.astype(np.float16).view(np.uint16)).astype(np.uint32)
    return compute(op, code, lambda a, b: one(a) << 16 | one(b), "u4", "f4", "f4")


def _small_register(to: str) -> str:
    return "u1" if to == "e2m1x2" else "u2"


def _small_from_pair(op: Instruction, code: Code, to: str) -> Run:
    return compute(op, code, lambda a, b: _encode(a, b, to, op), _small_register(to), "f4", "f4")


def _encode(upper: np.ndarray, lower: np.ndarray, to: str, op: Instruction) -> np.ndarray:
    """Two small floats; what is too large becomes the largest (satfinite)."""
    if not op.has("satfinite"):
        raise PtxError(f"{op.opcode}: without .satfinite it is not known")
    relu, bits = op.has("relu"), 4 if to == "e2m1x2" else 8

    def one(x: np.ndarray) -> np.ndarray:
        if relu:
            x = np.where(x < 0, np.float32(0), x)
        limited = np.clip(x, -_LARGEST[to], _LARGEST[to]).astype(np.float32)
        code = limited.astype(_SMALL[to]).view(np.uint8)
        return np.where(np.isnan(x), np.uint8(_NAN[to]), code & np.uint8((1 << bits) - 1)).astype(np.uint16)
    return (one(upper) << bits | one(lower)).astype(_small_register(to))


def _halves(both: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return both[1::2], both[::2]


def _from_small(op: Instruction, code: Code, to: str, source: str) -> Run:
    bits = 4 if source == "e2m1x2" else 8
    largest = (1 << bits) - 1
    relu = op.has("relu")

    def cast(a: np.ndarray) -> np.ndarray:
        halves = np.stack([a & largest, a >> bits & largest], 1).astype(np.uint8)
        value = halves.view(_SMALL[source]).astype(np.float32).reshape(-1)
        if relu:
            value = np.where(value < 0, np.float32(0), value)
        return narrow(value, to)
    return compute(op, code, cast, "u4", _small_register(source))
