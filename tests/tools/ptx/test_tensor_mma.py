"""tools/ptx/tensor_mma.py: fragments laid out by hand, lane by lane, against products in numpy."""
from __future__ import annotations

import numpy as np
import pytest

from ingot.plugins.gpu.floats import from_bf16, from_e2m1, from_e4m3, to_bf16, to_e4m3
from tools.ptx.instruction import Immediate, Instruction, PtxError, Register, Vector
from tools.ptx.tensor_mma import (
    Kind,
    Scales,
    multiply_fragments,
    parse_kind,
    parse_scales,
    scales_of_a,
    scales_of_b,
)

RNG = np.random.default_rng(20)


def pack(elements: list[int], bits: int) -> int:
    return sum(int(element) << bits * i for i, element in enumerate(elements))


def a_registers(a: np.ndarray, bits: int) -> np.ndarray:
    """[16, K] -> u32 [K / 2 / per register, 32], written out as the figures of the PTX ISA number it: a register of
    the upper half of rows, one of the lower, then both of the right half of columns."""
    per, registers = 32 // bits, []
    for half in range(a.shape[1] // (4 * per)):
        for lower in (0, 8):
            lanes = []
            for lane in range(32):
                row, first = lane // 4 + lower, half * 4 * per + lane % 4 * per
                lanes.append(pack(list(a[row, first : first + per]), bits))
            registers.append(lanes)
    return np.array(registers, np.uint32)


def b_registers(b: np.ndarray, bits: int) -> np.ndarray:
    """[K, 8] -> u32 [K / 4 / per register, 32]."""
    per = 32 // bits
    return np.array([[pack(list(b[half * 4 * per + lane % 4 * per :][:per, lane // 4]), bits) for lane in range(32)]
                     for half in range(len(b) // (4 * per))], np.uint32)


def c_registers(c: np.ndarray) -> np.ndarray:
    """[16, 8] of 32 bits -> u32 [4, 32]."""
    bits = c.view(np.uint32)
    return np.array([[bits[lane // 4 + 8 * (r // 2), 2 * (lane % 4) + r % 2] for lane in range(32)] for r in range(4)],
                    np.uint32)


def numbers(kind: str, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Bits, and the values that they stand for."""
    x = RNG.standard_normal(shape).astype(np.float32)
    if kind == "f16":
        return x.astype(np.float16).view(np.uint16), x.astype(np.float16).astype(np.float64)
    if kind == "bf16":
        return to_bf16(x), from_bf16(to_bf16(x)).astype(np.float64)
    if kind == "tf32":
        cut = (x.view(np.uint32) & 0xFFFFE000).view(np.float32)
        return x.view(np.uint32), cut.astype(np.float64)
    if kind == "e4m3":
        return to_e4m3(x), from_e4m3(to_e4m3(x)).astype(np.float64)
    if kind == "e5m2":
        bits = (x.astype(np.float16).view(np.uint16) >> 8).astype(np.uint8)
        return bits, (bits.astype(np.uint16) << 8).view(np.float16).astype(np.float64)
    if kind == "e2m1":
        bits = RNG.integers(0, 16, shape).astype(np.uint8)
        return bits, from_e2m1(bits).astype(np.float64)
    bits = RNG.integers(0, 256, shape).astype(np.uint8)
    return bits, bits.view(np.int8).astype(np.float64) if kind == "s8" else bits.astype(np.float64)


SHAPES = [("f16", 16), ("f16", 8), ("bf16", 16), ("bf16", 8), ("tf32", 8), ("tf32", 4), ("e4m3", 32), ("e5m2", 32),
          ("e4m3", 16)]
WIDTHS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "e2m1": 4}


@pytest.mark.parametrize(("name", "k"), SHAPES)
def test_products_of_floats(name: str, k: int) -> None:
    a_bits, a = numbers(name, (16, k))
    b_bits, b = numbers(name, (k, 8))
    c = RNG.standard_normal((16, 8)).astype(np.float32)
    found = multiply_fragments(a_registers(a_bits, WIDTHS[name])[None], b_registers(b_bits, WIDTHS[name])[None],
                               c_registers(c)[None], Kind(k, name, name, "f32"))
    wanted = c_registers((a @ b + c).astype(np.float32))
    np.testing.assert_allclose(found[0].view(np.float32), wanted.view(np.float32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("left", "right"), [("s8", "s8"), ("u8", "s8"), ("s8", "u8")])
@pytest.mark.parametrize("k", [16, 32])
def test_products_of_integers_are_exact(left: str, right: str, k: int) -> None:
    a_bits, a = numbers(left, (2, 16, k))
    b_bits, b = numbers(right, (2, k, 8))
    c = RNG.integers(-1 << 20, 1 << 20, (2, 16, 8)).astype(np.int32)
    found = multiply_fragments(np.stack([a_registers(x, 8) for x in a_bits]),
                               np.stack([b_registers(x, 8) for x in b_bits]),
                               np.stack([c_registers(x) for x in c]), Kind(k, left, right, "s32"))
    for i in range(2):  # two warps side by side
        assert np.array_equal(found[i], c_registers((a[i] @ b[i]).astype(np.int32) + c[i]))


def test_sums_of_integers_saturate_or_wrap() -> None:
    ones = np.full((1, 4, 32), 0x01010101, np.uint32)
    most = np.full((1, 4, 32), 2**31 - 3, np.uint32)
    saturated = multiply_fragments(ones, ones[:, :2], most, Kind(32, "s8", "s8", "s32", saturates=True))
    wrapped = multiply_fragments(ones, ones[:, :2], most, Kind(32, "s8", "s8", "s32"))
    assert (saturated == 2**31 - 1).all() and (wrapped == 2**31 - 3 + 32).all()


def test_sums_of_halves() -> None:
    """Two elements of the sum in each register."""
    a_bits, a = numbers("f16", (16, 16))
    b_bits, b = numbers("f16", (16, 8))
    found = multiply_fragments(a_registers(a_bits, 16)[None], b_registers(b_bits, 16)[None],
                               np.zeros((1, 2, 32), np.uint32), Kind(16, "f16", "f16", "f16"))
    wanted = (a @ b).astype(np.float16)
    for lane in (0, 5, 31):
        for register in (0, 1):
            pair = found[0, register, lane : lane + 1].view(np.float16)
            np.testing.assert_allclose(pair, wanted[lane // 4 + 8 * register, lane % 4 * 2 :][:2], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("name", "kind", "k", "count"), [
    ("e2m1", "ue4m3", 64, 4), ("e2m1", "ue8m0", 64, 2), ("e4m3", "ue8m0", 32, 1)])
def test_scales_of_blocks(name: str, kind: str, k: int, count: int) -> None:
    """Scales of A come from two lanes of four, those of B from one; all other lanes hold what would be seen."""
    a_bits, a = numbers(name, (16, k))
    b_bits, b = numbers(name, (k, 8))
    low, high = (0x28, 0x48) if kind == "ue4m3" else (120, 134)
    a_scale, b_scale = RNG.integers(low, high, (16, count)), RNG.integers(low, high, (8, count))
    a_thread, b_thread, byte = 1, 2, 0
    held = RNG.integers(0, 1 << 32, (2, 32), np.uint32)
    for row in range(16):
        held[0, 4 * (row % 8) + 2 * a_thread + row // 8] = pack(list(a_scale[row]), 8)
    for column in range(8):
        held[1, 4 * column + b_thread] = pack(list(b_scale[column]), 8)
    scales = Scales(kind, count)
    found = multiply_fragments(
        a_registers(a_bits, WIDTHS[name])[None], b_registers(b_bits, WIDTHS[name])[None],
        np.zeros((1, 4, 32), np.uint32), Kind(k, name, name, "f32"),
        scales_of_a(held[:1], byte, a_thread, scales), scales_of_b(held[1:], byte, b_thread, scales))

    def value(codes: np.ndarray) -> np.ndarray:
        return from_e4m3(codes).astype(np.float64) if kind == "ue4m3" else 2.0 ** (codes - 127)
    wanted = (a * np.repeat(value(a_scale), k // count, 1)) @ (b * np.repeat(value(b_scale), k // count, 1).T)
    wanted = c_registers(wanted.astype(np.float32)).view(np.float32)
    np.testing.assert_allclose(found[0].view(np.float32), wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def instruction(opcode: str, *operands: Vector) -> Instruction:
    return Instruction(opcode, operands, None, 1)


def test_opcodes() -> None:
    assert parse_kind(instruction("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")) == Kind(
        16, "bf16", "bf16", "f32")
    assert parse_kind(instruction("mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32")) == Kind(
        32, "s8", "s8", "s32", saturates=True)
    scaled = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"
    assert parse_kind(instruction(scaled)) == Kind(64, "e2m1", "e2m1", "f32")
    assert parse_scales(instruction(scaled)) == Scales("ue4m3", 4)
    for wrong in ("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32",
                  "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e2m1.f32",
                  "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32"):
        with pytest.raises(PtxError, match="support"):
            parse_kind(instruction(wrong, Vector((Register("%r1", 32, 0), Immediate(0)))))
