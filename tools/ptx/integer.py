"""Integers, bits and predicates."""
from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .instruction import Code, Instruction, PtxError, Run, instruction
from .rows import INTEGERS, apply, compute, constant, last_type, width_of
from .warp import Warps

_WIDER = {"i2": "i4", "u2": "u4", "i4": "i8", "u4": "u8"}
_UFUNCS: dict[str, Any] = {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum,
                           "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.bitwise_not,
                           "neg": np.negative, "abs": np.absolute}


def _typed(names: tuple[str, ...], types: tuple[str, ...]) -> list[str]:
    return [f"{name}.{kind}" for name in names for kind in types]


@instruction(*_typed(("add", "sub", "min", "max"), ("s16", "u16", "s32", "u32", "s64", "u64")),
             *_typed(("neg", "abs"), ("s16", "s32", "s64")),
             *_typed(("and", "or", "xor", "not"), ("pred", "b16", "b32", "b64")))
def simple(op: Instruction, code: Code) -> Run:
    name, kind = op.opcode.partition(".")[0], last_type(op)
    if kind == "b1":
        logical = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not}
        return apply(op, code, logical[name], kind)
    return apply(op, code, _UFUNCS[name], kind)


@instruction(*_typed(("add", "sub", "min", "max"), ("s16x2", "u16x2")))
def simple_pairs(op: Instruction, code: Code) -> Run:
    """Both halves of a register by themselves."""
    ufunc, kind = _UFUNCS[op.opcode.partition(".")[0]], "i2" if op.has("s16x2") else "u2"
    return compute(op, code, lambda a, b: ufunc(a.view(kind), b.view(kind)).view("u4"), "u4", "u4", "u4")


@instruction("mul.lo", "mul.wide", "mul.hi", "mul24.lo")
def mul(op: Instruction, code: Code) -> Run:
    kind = last_type(op)
    if op.has("lo"):
        return apply(op, code, np.multiply, kind)
    if op.has("hi"):
        return compute(op, code, partial(_high, kind), kind, kind, kind)
    wide = _WIDER[kind]
    return compute(op, code, lambda a, b: np.multiply(a, b, dtype=wide), wide, kind, kind)


@instruction("mad.lo", "mad.wide", "mad.hi")
def mad(op: Instruction, code: Code) -> Run:
    kind = last_type(op)
    if op.has("lo"):
        return compute(op, code, lambda a, b, c: a * b + c, kind, kind, kind, kind)
    if op.has("hi"):
        return compute(op, code, lambda a, b, c: _high(kind, a, b) + c, kind, kind, kind, kind)
    wide = _WIDER[kind]
    return compute(op, code, lambda a, b, c: np.multiply(a, b, dtype=wide) + c, wide, kind, kind, wide)


@instruction("add.cc", "addc", "sub.cc", "subc", "mad.lo.cc", "mad.hi.cc", "madc")
def with_carry(op: Instruction, code: Code) -> Run:
    """Words of longer integers: the carry, or the borrow, of one goes to the next."""
    name, kind = op.parts[0], last_type(op)
    if kind not in ("i4", "u4"):
        raise PtxError(f"unknown instruction {op.opcode}")
    takes, gives = name.endswith("c"), op.has("cc")
    d, carry = code.target(op.operands[0], 32), code.carry()
    sources = [code.row(operand, 32) for operand in op.operands[1:]]

    def run(warps: Warps) -> None:
        a, *rest = (warps.views[kind][row] for row in sources)
        if len(rest) == 2:
            a, rest = (a * rest[0] if op.has("lo") else _high(kind, a, rest[0])), rest[1:]
        first, second = (x.view("u4").astype(np.int64) for x in (a, rest[0]))
        if takes:
            second = second + warps.bits[1][carry]
        total = first - second if name.startswith("sub") else first + second
        np.copyto(warps.bits[32][d], total & 0xFFFFFFFF, where=warps.mask, casting="unsafe")
        if gives:
            np.copyto(warps.bits[1][carry], (total < 0) | (total >> 32 != 0), where=warps.mask)
    return run


def _high(kind: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper half of the product."""
    width = width_of(kind)
    if width < 64:
        return (np.multiply(a, b, dtype=_WIDER[kind]) >> width).astype(kind)
    found = [int(x) * int(y) >> 64 for x, y in np.broadcast(a, b)]
    return np.array([value & ((1 << 64) - 1) for value in found], np.uint64).view(kind)


@instruction(*_typed(("div", "rem"), ("s16", "u16", "s32", "u32", "s64", "u64")))
def div(op: Instruction, code: Code) -> Run:
    """Rounds to zero; what a division by zero gives is not said, so it is all ones."""
    kind = last_type(op)

    def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        safe = np.where(b == 0, np.array(1, kind), b)
        rest = np.fmod(a, safe)
        found = rest if op.opcode.startswith("rem") else (a - rest) // safe
        return np.where(b == 0, np.array(-1).astype(kind), found)
    return compute(op, code, divide, kind, kind, kind)


@instruction(*_typed(("shl",), ("b16", "b32", "b64")), *_typed(("shr",), tuple(INTEGERS)))
def shift(op: Instruction, code: Code) -> Run:
    """By a u32; more than the width gives 0, or the sign."""
    kind = last_type(op)
    width = width_of(kind)
    ufunc = np.left_shift if op.opcode.startswith("shl") else np.right_shift
    amount = constant(op.operands[2])
    if amount is not None and 0 <= amount < width:
        return apply(op, code, ufunc, kind)

    def moved(a: np.ndarray, by: np.ndarray) -> np.ndarray:
        if kind[0] == "i":
            return ufunc(a, np.minimum(by, width - 1).astype(kind))
        return np.where(by < width, ufunc(a, np.minimum(by, width - 1).astype(kind)), np.array(0, kind))
    return compute(op, code, moved, kind, kind, "u4")


@instruction("shf.l", "shf.r")
def funnel(op: Instruction, code: Code) -> Run:
    """A word out of two."""
    left, wraps = op.has("l"), op.has("wrap")

    def moved(low: np.ndarray, high: np.ndarray, by: np.ndarray) -> np.ndarray:
        amount = (by & 31 if wraps else np.minimum(by, 32)).astype(np.uint64)
        both = high.astype(np.uint64) << np.uint64(32) | low
        return both << amount >> np.uint64(32) if left else both >> amount
    return compute(op, code, moved, "u4", "u4", "u4", "u4")


@instruction("bfe")
def extract(op: Instruction, code: Code) -> Run:
    """b[position : position + length], zero- or sign-extended."""
    kind = last_type(op)
    width, signed = width_of(kind), kind[0] == "i"

    def field(a: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
        begin, size = (np.asarray(x & 255).astype(np.int64) for x in (position, length))
        bits = a.view(f"u{width // 8}")
        value = np.where(begin < width, bits >> np.minimum(begin, width - 1).astype(bits.dtype), 0).astype(bits.dtype)
        short = size < width
        mask = (np.array(1, bits.dtype) << np.where(short, size, 0).astype(bits.dtype)) - np.array(1, bits.dtype)
        value = np.where(short, value & mask, value)
        if signed:
            at = np.minimum(begin + size - 1, width - 1)
            negative = (size > 0) & (bits >> np.maximum(at, 0).astype(bits.dtype) & np.array(1, bits.dtype) != 0)
            # Beyond what the bits hold, the sign fills too.
            held = np.minimum(size, np.maximum(width - begin, 0))
            fill = np.where(held < width, ~np.array(0, bits.dtype) << np.minimum(held, width - 1).astype(bits.dtype), 0)
            value = np.where(negative, value | fill.astype(bits.dtype), value)
        return value
    return compute(op, code, field, f"u{width // 8}", kind, "u4", "u4")


@instruction("bfi")
def insert(op: Instruction, code: Code) -> Run:
    """b with a's lowest bits at a position."""
    kind = last_type(op)
    width = width_of(kind)

    def put(a: np.ndarray, b: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
        begin, size = (np.asarray(x & 255).astype(np.int64) for x in (position, length))
        one = np.array(1, kind)
        mask = np.where(size < width, (one << np.minimum(size, width - 1).astype(kind)) - one, ~np.array(0, kind))
        by = np.minimum(begin, width - 1).astype(kind)
        found = (b & ~(mask << by)) | ((a & mask) << by)
        return np.where(begin < width, found, b)
    return compute(op, code, put, kind, kind, kind, "u4", "u4")


@instruction("prmt.b32")
def permute(op: Instruction, code: Code) -> Run:
    """Four bytes of eight; bit 3 of a selector's digit repeats the sign of that byte instead."""
    if op.opcode != "prmt.b32":
        raise PtxError(f"unknown instruction {op.opcode}")
    d = code.target(op.operands[0], 32)
    a, b, s = (code.row(operand, 32) for operand in op.operands[1:])
    selector = constant(op.operands[3])
    if selector is None:
        return compute(op, code, _permute, "u4", "u4", "u4", "u4")
    digits = [selector >> (4 * i) & 15 for i in range(4)]

    def run(warps: Warps) -> None:
        rows = warps.views["u4"]
        sources = rows[a].view(np.uint8).reshape(-1, 4), rows[b].view(np.uint8).reshape(-1, 4)
        found = np.empty((warps.lanes, 4), np.uint8)
        for i, digit in enumerate(digits):
            byte = sources[digit >> 2 & 1][:, digit & 3]
            found[:, i] = byte if digit < 8 else (byte.view(np.int8) >> 7).view(np.uint8)
        np.copyto(rows[d], found.view(np.uint32)[:, 0], where=warps.mask)
    del s
    return run


def _permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both = b.astype(np.uint64) << np.uint64(32) | a
    found = np.zeros_like(both)
    for i in range(4):
        digit = (selector >> np.uint32(4 * i)).astype(np.uint64) & np.uint64(15)
        byte = both >> (digit & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        found |= np.where(digit & np.uint64(8), sign, byte) << np.uint64(8 * i)
    return found


@instruction("lop3.b32")
def lop3(op: Instruction, code: Code) -> Run:
    """A truth table of three bits, in the last operand."""
    table = constant(op.operands[4])
    if table is None or op.opcode != "lop3.b32":
        raise PtxError(f"unknown instruction {op.opcode}, or its table is no constant")

    def look_up(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        found = np.zeros_like(a)
        for i in range(8):
            if table >> i & 1:
                found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return found
    trimmed = Instruction(op.opcode, op.operands[:4], None, op.line)
    return compute(trimmed, code, look_up, "u4", "u4", "u4", "u4")


@instruction("popc", "clz", "brev", "bfind")
def count_bits(op: Instruction, code: Code) -> Run:
    kind = last_type(op)
    width, name = width_of(kind), op.opcode.partition(".")[0]

    def count(a: np.ndarray) -> np.ndarray:
        bits = np.unpackbits(np.ascontiguousarray(a).view(np.uint8).reshape(-1, width // 8), 1, bitorder="little")
        highest = np.where(bits.any(1), width - 1 - np.argmax(bits[:, ::-1], 1), -1)
        if name == "popc":
            return bits.sum(1)
        if name == "clz":
            return width - 1 - highest
        return highest
    if name == "bfind" and (kind[0] == "i" or op.has("shiftamt")):
        raise PtxError(f"unknown instruction {op.opcode}")
    if name == "brev":
        return compute(op, code, lambda a: _reversed(a, width), kind, kind)
    return compute(op, code, count, "i4", kind)


def _reversed(a: np.ndarray, width: int) -> np.ndarray:
    bits = np.unpackbits(np.ascontiguousarray(a).view(np.uint8).reshape(-1, width // 8), 1, bitorder="little")
    return np.packbits(np.ascontiguousarray(bits[:, ::-1]), 1, bitorder="little").view(a.dtype)[:, 0]


@instruction("dp4a")
def dot4(op: Instruction, code: Code) -> Run:
    """c + the products of four bytes."""
    first, second = (INTEGERS[part.replace("32", "8")] for part in op.parts[1:3])
    result = "i4" if "i1" in (first, second) else "u4"

    def dot(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        left, right = (x.view(kind).reshape(-1, 4).astype(np.int64) for x, kind in ((a, first), (b, second)))
        return c + (left * right).sum(1)
    return compute(op, code, dot, result, "u4", "u4", result)
