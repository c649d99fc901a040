"""tools/ptx/tensor_memory.py and tensor_tcgen05.py: where elements lie in tensor memory, written out lane by lane,
against products in numpy; what is begun and not waited for."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ingot.plugins.gpu.floats import from_bf16, from_e2m1, from_e4m3, to_bf16, to_e4m3
from tools.ptx.instruction import PtxError
from tools.ptx.tensor_memory import TensorMemory, places
from tools.ptx.tensor_mma import Kind, Scales
from tools.ptx.tensor_tcgen05 import Form, Operands, lanes_of_rows, multiply, parse_descriptor, read_scales

RNG = np.random.default_rng(11)
FORM = Form(128, 64, Kind(16, "bf16", "bf16", "f32"), True, True)


def memory_of(columns: int = 512) -> TensorMemory:
    memory = TensorMemory()
    memory.allocate(columns, np.random.default_rng(0))
    return memory


def store_rows(shared: np.ndarray, at: int, rows: np.ndarray) -> int:
    """Lines of 128 bytes, whose 16-byte pieces change places. Returns the descriptor."""
    lines = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)
    for i, line in enumerate(lines):
        for j in range(8):
            shared[at + 128 * i + 16 * (j ^ i % 8) :][:16] = line[16 * j : 16 * j + 16]
    return at >> 4 | 1 << 16 | 64 << 32 | 1 << 46 | 2 << 61


def read_sums(memory: TensorMemory, m: int, n: int, column: int, first: int = 0) -> np.ndarray:
    """Row by row: 128 in as many lanes, or 64 in 16 lanes of each group of 32."""
    lanes = [row if m == 128 else row // 16 * 32 + row % 16 + first for row in range(m)]
    return np.stack([memory.words[lane, column : column + n].view(np.float32) for lane in lanes])


@pytest.mark.parametrize(("m", "n", "first"), [(128, 64, 0), (64, 256, 0), (64, 8, 16)])
def test_products_of_shared_matrices(m: int, n: int, first: int) -> None:
    a, b = (to_bf16(RNG.standard_normal((rows, 64)).astype(np.float32)) for rows in (m, n))
    shared = np.zeros(65536, np.uint8)
    a_at, b_at = store_rows(shared, 0, a), store_rows(shared, 32768, b)
    memory = memory_of()
    memory.words[:] = np.float32(3).view(np.uint32)
    for step in range(4):
        multiply(shared, memory, replace(FORM, m=m, n=n),
                 Operands(first << 16 | 32, a_at + 2 * step, False, b_at + 2 * step, adds=step > 0))
    wanted = from_bf16(a).astype(np.float64) @ from_bf16(b).astype(np.float64).T
    np.testing.assert_allclose(read_sums(memory, m, n, 32, first), wanted, rtol=1e-5, atol=1e-4)
    untouched = np.ones((128, 512), bool)
    untouched[lanes_of_rows(m, first)[:, None], 32 + np.arange(n)] = False
    assert (memory.words[untouched] == np.float32(3).view(np.uint32)).all()


def test_rows_in_tensor_memory() -> None:
    """Two elements of 16 bits in a column, eight columns for a product."""
    a, b = (to_bf16(RNG.standard_normal(shape).astype(np.float32)) for shape in ((128, 16), (64, 64)))
    shared, memory = np.zeros(16384, np.uint8), memory_of()
    b_at = store_rows(shared, 0, b)
    for row in range(128):
        for pair in range(8):
            memory.words[row, 200 + pair] = int(a[row, 2 * pair]) | int(a[row, 2 * pair + 1]) << 16
    multiply(shared, memory, FORM, Operands(0, 200, True, b_at + 4, adds=False))
    wanted = from_bf16(a).astype(np.float64) @ from_bf16(b[:, 32:48]).astype(np.float64).T
    np.testing.assert_allclose(read_sums(memory, 128, 64, 0), wanted, rtol=1e-5, atol=1e-4)


def test_integers() -> None:
    a, b = (RNG.integers(0, 256, (rows, 128)).astype(np.uint8) for rows in (128, 64))
    shared, memory = np.zeros(32768, np.uint8), memory_of()
    form = replace(FORM, kind=Kind(32, "s8", "s8", "s32"))
    operands = Operands(0, store_rows(shared, 0, a), False, store_rows(shared, 16384, b), adds=True)
    memory.words[:] = 2**31 - 1
    multiply(shared, memory, form, operands)
    products = a[:, :32].view(np.int8).astype(np.int64) @ b[:, :32].view(np.int8).astype(np.int64).T
    wrapped = (products + 2**31 - 1).astype(np.int32)
    assert np.array_equal(memory.words[:, :64].view(np.int32), wrapped)


def store_scales(memory: TensorMemory, column: int, scales: np.ndarray) -> None:
    """u8 [rows, 4]: row r in lane r % 32 of each group of lanes, in the column r / 32, four scales in its bytes."""
    for row in range(len(scales)):
        word = sum(int(byte) << 8 * i for i, byte in enumerate(scales[row]))
        for group in range(4):
            memory.words[32 * group + row % 32, column + row // 32] = word


def test_scales_of_blocks() -> None:
    a, b = (RNG.integers(0, 256, (rows, 128)).astype(np.uint8) for rows in (128, 64))  # 256 channels of four bits
    a_scales, b_scales = (to_e4m3(RNG.uniform(0.25, 4, (rows, 4)).astype(np.float32)) for rows in (128, 64))
    shared, memory = np.zeros(32768, np.uint8), memory_of()
    form = replace(FORM, kind=Kind(64, "e2m1", "e2m1", "f32"), scales=Scales("ue4m3", 4))
    store_scales(memory, 100, a_scales)
    store_scales(memory, 300, b_scales)
    step = 2  # channels 128 to 191
    multiply(shared, memory, form, Operands(
        0, store_rows(shared, 0, a) + 2 * step, False, store_rows(shared, 16384, b) + 2 * step, False, 100, 300))

    def value(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        part = codes[:, 64:96]
        wide = np.stack([part & 15, part >> 4], -1).reshape(len(codes), 64)
        return from_e2m1(wide).astype(np.float64) * np.repeat(from_e4m3(scales), 16, 1)
    wanted = value(a, a_scales) @ value(b, b_scales).T
    np.testing.assert_allclose(read_sums(memory, 128, 64, 0), wanted, rtol=1e-5, atol=1e-3)


def test_scales_are_in_each_group_of_lanes() -> None:
    memory = memory_of()
    memory.words[:] = 0x38383838
    assert (read_scales(memory, 8, 128, 0, Scales("ue4m3", 4)) == 1).all()
    memory.words[96 + 5, 9] = 0
    with pytest.raises(PtxError, match="not the same"):
        read_scales(memory, 8, 128, 0, Scales("ue4m3", 4))


def test_instruction_descriptors() -> None:
    common = 64 >> 3 << 17 | 128 >> 4 << 24
    assert parse_descriptor(common | 1 << 4 | 1 << 7 | 1 << 10, "kind::f16") == FORM
    integers = parse_descriptor(64 >> 3 << 17 | 64 >> 4 << 24 | 2 << 4 | 1 << 7 | 1 << 10 | 1 << 3, "kind::i8")
    assert integers == Form(64, 64, Kind(32, "s8", "s8", "s32", saturates=True), True, True)
    turned = parse_descriptor(common | 1 << 4 | 1 << 15 | 1 << 13, "kind::f8f6f4")
    assert turned == Form(128, 64, Kind(32, "e4m3", "e4m3", "f32"), False, True, sign=-1)
    scaled = parse_descriptor(1 << 7 | 1 << 10 | 64 >> 3 << 17 | 1 << 27 | 2 << 29, "kind::mxf4nvf4", 4)
    assert scaled == replace(FORM, kind=Kind(64, "e2m1", "e2m1", "f32"), scales=Scales("ue4m3", 4), a_byte=2)
    for wrong, kind in ((common | 1 << 4 | 5 << 7, "kind::f8f6f4"), (common | 1 << 4, "kind::i8"),
                        (common, "kind::f16"), (common | 1 << 4 | 1 << 2, "kind::f16"),
                        (64 >> 3 << 17 | 32 >> 4 << 24 | 1 << 4, "kind::f16")):
        with pytest.raises(PtxError, match="not supported"):
            parse_descriptor(wrong, kind)


def test_which_lanes_and_columns_a_warp_reaches() -> None:
    lanes, columns = places(64 << 16 | 8, 4, "32x32b", 0)
    assert (lanes[2, 31], columns[2, 31]) == (95, 10)
    lanes, columns = places(64 << 16 | 8, 4, "16x32bx2", 32)
    assert (lanes[2, 15], columns[2, 15]) == (79, 10)
    assert (lanes[2, 16], columns[2, 16]) == (64, 42)
    lanes, columns = places(64 << 16 | 8, 8, "16x256b", 0)
    assert [(lanes[r, 31], columns[r, 31]) for r in (0, 1, 2, 7)] == [(71, 14), (71, 15), (79, 14), (79, 23)]


def test_allocation() -> None:
    memory, random = TensorMemory(), np.random.default_rng(2)
    first, second = memory.allocate(256, random), memory.allocate(128, random)
    with pytest.raises(PtxError, match="no 256 columns"):
        memory.allocate(256, random)
    with pytest.raises(PtxError, match="not in one piece"):
        memory.check(np.array([second, second + 128]))
    with pytest.raises(PtxError, match="given back"):
        memory.free(first, 128)
    memory.free(first, 256)
    assert memory.allocate(256, random) == first
    with pytest.raises(PtxError, match="power of two"):
        memory.allocate(48, random)
    memory.may_allocate = False
    with pytest.raises(PtxError, match="permit"):
        memory.allocate(32, random)
