"""mma.sync.aligned: products of matrices whose fragments lie in the registers of a warp.

m16n8kK of f16, bf16, tf32, e4m3, e5m2, s8 and u8, and with scales of blocks of e4m3, e5m2 (mxf8f6f4) and e2m1 (mxf4,
mxf4nvf4). Sums are in float32, in an order that nobody promises: hardware adds products up in groups, with more or
fewer bits. Source: PTX ISA, "Matrix multiply-accumulate operation using mma instruction".
"""
from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from .instruction import Code, Immediate, Instruction, PtxError, Run, Vector, instruction
from .tensor_elements import BITS, decode, decode_scale, unpack
from .tensor_fragments import order_of_a, order_of_b, order_of_c
from .tensor_registers import check_whole, gather, rows_of, scatter
from .warp import Warps

_SHAPE = re.compile(r"m16n8k(\d+)")
_DEFAULT_SCALES = {"kind::mxf8f6f4": "1X", "kind::mxf4": "2X"}


@dataclass(frozen=True)
class Kind:
    """d = a × b + c. k: channels; a, b: element types; sum: f32, f16 or s32."""

    k: int
    a: str
    b: str
    sum: str
    saturates: bool = False


@dataclass(frozen=True)
class Scales:
    """kind: ue4m3 or ue8m0; count: scales of a row of A and of a column of B."""

    kind: str
    count: int


def multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray, kind: Kind, a_scales: np.ndarray | None = None,
                 b_scales: np.ndarray | None = None) -> np.ndarray:
    """a: bits [..., M, K]; b: bits [..., K, N]; c: [..., M, N] in the type of the sum, which the result has too.
    Scales: float32 [..., M, n] and [..., n, N], each of K / n channels."""
    left, right = decode(a, kind.a), decode(b, kind.b)
    if a_scales is not None and b_scales is not None:
        left = left * np.repeat(a_scales, kind.k // a_scales.shape[-1], -1)
        right = right * np.repeat(b_scales, kind.k // b_scales.shape[-2], -2)
    with np.errstate(invalid="ignore", over="ignore"):
        return add(np.matmul(left, right), c, kind)


def add(products: np.ndarray, c: np.ndarray, kind: Kind) -> np.ndarray:
    """products: float32. Integers wrap around unless they saturate."""
    if kind.sum != "s32":
        return (products + c).astype(c.dtype)
    total = products.astype(np.int64) + c
    if kind.saturates:
        total = np.clip(total, -(1 << 31), (1 << 31) - 1)
    return total.astype(np.int32)


def multiply_fragments(a: np.ndarray, b: np.ndarray, c: np.ndarray, kind: Kind, a_scales: np.ndarray | None = None,
                       b_scales: np.ndarray | None = None) -> np.ndarray:
    """Registers u32 [warps, registers, 32] -> registers of the result, u32 of the shape of c."""
    warps = len(c)
    halves = 2 if kind.sum == "f16" else 1
    left = _laid(a, kind.a, order_of_a(kind.k, 32 // _container(kind, kind.a)), kind)
    right = _laid(b, kind.b, order_of_b(kind.k, 32 // _container(kind, kind.b)), kind)
    order = order_of_c(8, halves)
    sums = c.view(_SUMS[kind.sum]).reshape(warps, -1)
    result = np.empty_like(sums)
    result[:, order.reshape(-1)] = multiply_add(
        left, right, sums[:, order], kind, a_scales, b_scales).reshape(warps, -1)
    return result.view(np.uint32).reshape(c.shape)


def _laid(registers: np.ndarray, name: str, order: np.ndarray, kind: Kind) -> np.ndarray:
    return unpack(registers, name).reshape(len(registers), -1)[:, order]


def _container(kind: Kind, name: str) -> int:
    if BITS[name] < 8 and kind.k == 32:
        raise PtxError(f"{name} in bytes, as kind::f8f6f4 has it, is not supported")
    return BITS[name]


_SUMS = {"f32": np.float32, "f16": np.float16, "s32": np.int32}


def scales_of_a(registers: np.ndarray, byte: int, thread: int, scales: Scales) -> np.ndarray:
    """registers: u32 [warps, 32] -> float32 [warps, 16, n]. Of four lanes, numbers 2 × thread and 2 × thread + 1 hold
    the scales of rows lane / 4 and lane / 4 + 8."""
    held = registers.reshape(-1, 8, 4)[:, :, 2 * thread : 2 * thread + 2].transpose(0, 2, 1).reshape(-1, 16)
    return _scales(held, byte, scales)


def scales_of_b(registers: np.ndarray, byte: int, thread: int, scales: Scales) -> np.ndarray:
    """registers: u32 [warps, 32] -> float32 [warps, n, 8]. Of four lanes, number `thread` holds those of column
    lane / 4."""
    return _scales(registers.reshape(-1, 8, 4)[:, :, thread], byte, scales).transpose(0, 2, 1)


def _scales(held: np.ndarray, byte: int, scales: Scales) -> np.ndarray:
    parts = np.ascontiguousarray(held).view(np.uint8).reshape(*held.shape, 4)
    return decode_scale(parts[..., byte : byte + scales.count], scales.kind)


@instruction("mma.sync")
def mma(op: Instruction, code: Code) -> Run:
    kind, scales = parse_kind(op), parse_scales(op)
    d, a, b, c = (rows_of(code, operand, op) for operand in op.operands[:4])
    if scales is None:
        def run(warps: Warps) -> None:
            check_whole(warps, op)
            scatter(warps, d, multiply_fragments(gather(warps, a), gather(warps, b), gather(warps, c), kind))
        return run
    a_scale, a_place, b_scale, b_place = op.operands[4:8]
    a_row, b_row = rows_of(code, a_scale, op), rows_of(code, b_scale, op)
    a_byte, a_thread = _selected(a_place, op)
    b_byte, b_thread = _selected(b_place, op)

    def run_scaled(warps: Warps) -> None:
        check_whole(warps, op)
        by_row = scales_of_a(gather(warps, a_row)[:, 0], a_byte, a_thread, scales)
        by_column = scales_of_b(gather(warps, b_row)[:, 0], b_byte, b_thread, scales)
        scatter(warps, d, multiply_fragments(gather(warps, a), gather(warps, b), gather(warps, c), kind, by_row,
                                             by_column))
    return run_scaled


def parse_kind(op: Instruction) -> Kind:
    """mma.sync.aligned.m16n8k16.row.col.{kind…}.d.a.b.c. Raises PtxError for what is not supported."""
    shape = next(filter(None, map(_SHAPE.fullmatch, op.parts)), None)
    if shape is None or not (op.has("row") and op.has("col")):
        raise PtxError(f"{op.opcode}: only m16n8k… with A by rows and B by columns are supported")
    types = [part for part in op.parts if part in BITS]
    if len(types) != 4 or types[0] != types[3] or types[0] not in _SUMS or op.has("xor") or op.has("and"):
        raise PtxError(f"{op.opcode}: this combination of types is not supported")
    kind = Kind(int(shape[1]), types[1], types[2], types[0], op.has("satfinite"))
    _container(kind, kind.a)
    return kind


def parse_scales(op: Instruction) -> Scales | None:
    """None for a product without scales of blocks."""
    if not op.has("block_scale"):
        return None
    name = next(part for part in op.parts if part.startswith("kind::"))
    told = next((part.removeprefix("scale_vec::") for part in op.parts if part.startswith("scale_vec::")), None)
    size = told or _DEFAULT_SCALES[name]
    return Scales(op.part("ue4m3", "ue8m0"), int(size[0]))


def _selected(operand: object, op: Instruction) -> tuple[int, int]:
    """{byte, thread}"""
    items = operand.items if isinstance(operand, Vector) else ()
    values = [item.value for item in items if isinstance(item, Immediate)]
    if len(values) != 2:
        raise PtxError(f"{op.opcode}: {operand} does not say which byte and which lanes hold the scales")
    return int(values[0]), int(values[1])
