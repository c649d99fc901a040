"""tools/ptx/tensor_wgmma.py and tensor_descriptors.py: matrices laid out in shared memory as the copy unit does it,
lines of 128, 64 or 32 bytes whose 16-byte pieces change places, against products in numpy."""
from __future__ import annotations

import numpy as np
import pytest

from ingot.plugins.gpu.floats import from_bf16, from_e4m3, to_bf16, to_e4m3
from tools.ptx.instruction import Immediate, Instruction, PtxError, Register, Vector
from tools.ptx.tensor_descriptors import of_tcgen05, of_wgmma, read_matrix
from tools.ptx.tensor_mma import Kind
from tools.ptx.tensor_pipeline import Pipeline
from tools.ptx.tensor_wgmma import Form, parse_form, product, register_rows_of_a, shared_rows_of_a
from tools.ptx.warp import Block

RNG = np.random.default_rng(7)
CODES = {128: 1, 64: 2, 32: 3, 16: 0}


def descriptor(start: int, leading: int, stride: int, width: int) -> int:
    return start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | CODES[width] << 62


def store_lines(shared: np.ndarray, at: int, lines: np.ndarray) -> None:
    """lines: u8 [lines, width]; piece j of line i goes to piece j ^ f(i): with 128 bytes f is i % 8, with 64 i / 2 % 4,
    with 32 i / 4 % 2 (`at` is a multiple of 1024)."""
    count, width = lines.shape
    pieces = width // 16
    for i in range(count):
        for j in range(pieces):
            place = j ^ (i * width // 128 % pieces)
            shared[at + i * width + 16 * place :][:16] = lines[i, 16 * j : 16 * j + 16]


def store_rows(shared: np.ndarray, at: int, rows: np.ndarray, width: int) -> int:
    """K-major, rows as long as a line: stride is 8 lines. Returns the descriptor."""
    store_lines(shared, at, rows.view(np.uint8).reshape(len(rows), -1))
    return descriptor(at, 16, 8 * width, width)


@pytest.mark.parametrize("width", [128, 64, 32])
@pytest.mark.parametrize("name", ["bf16", "e4m3", "s8"])
def test_rows_along_channels(width: int, name: str) -> None:
    """Channels advance by the start of the descriptor, 32 bytes for each product."""
    element = 2 if name == "bf16" else 1
    codes = RNG.integers(0, 1 << 8 * element, (64, width // element)).astype(np.uint16 if element == 2 else np.uint8)
    shared = np.zeros(16384, np.uint8)
    whole = store_rows(shared, 2048, codes, width)
    channels = 32 // element
    for step in range(width // 32):
        found = read_matrix(shared, of_wgmma(whole + step * 2), 64, channels, name, True)
        assert np.array_equal(found, codes[:, step * channels : (step + 1) * channels])


@pytest.mark.parametrize("width", [128, 64, 32])
def test_lines_along_rows(width: int) -> None:
    """MN-major: two atoms of rows, `leading` apart, each of 16 channels in two atoms, `stride` apart."""
    per_line = width // 2
    codes = RNG.integers(0, 1 << 16, (16, 2 * per_line)).astype(np.uint16)  # channels × rows
    shared = np.zeros(32768, np.uint8)
    for half in range(2):
        lines = np.ascontiguousarray(codes[:, half * per_line : (half + 1) * per_line]).view(np.uint8)
        store_lines(shared, 1024 + 8192 * half, lines)
    found = read_matrix(shared, of_wgmma(descriptor(1024, 8192, 8 * width, width)), 2 * per_line, 16, "bf16", False)
    assert np.array_equal(found, codes.T)


@pytest.mark.parametrize("is_k_major", [True, False])
def test_no_swizzle(is_k_major: bool) -> None:
    """Pieces of 8 lines × 16 bytes, the next along channels and the next along rows at distances of their own."""
    codes = RNG.integers(0, 1 << 16, (32, 16)).astype(np.uint16)
    shared = np.zeros(8192, np.uint8)
    along_k, along_rows = (256, 1024) if is_k_major else (1024, 256)
    for row in range(0, 32, 8):
        for k in range(0, 16, 8):
            block = codes[row : row + 8, k : k + 8]
            data = np.ascontiguousarray(block if is_k_major else block.T).view(np.uint8).reshape(-1)
            shared[row // 8 * along_rows + k // 8 * along_k :][:128] = data
    matrix = of_wgmma(descriptor(0, along_k, along_rows, 16))
    assert np.array_equal(read_matrix(shared, matrix, 32, 16, "f16", is_k_major), codes)


@pytest.mark.parametrize(("name", "n"), [("bf16", 64), ("e4m3", 8), ("e4m3", 256)])
def test_product_of_a_warp(name: str, n: int) -> None:
    encode, decode = (to_bf16, from_bf16) if name == "bf16" else (to_e4m3, from_e4m3)
    channels = 64 if name == "bf16" else 128
    a, b = (encode(RNG.standard_normal((rows, channels)).astype(np.float32)) for rows in (64, n))
    shared = np.zeros(65536, np.uint8)
    a_at, b_at = store_rows(shared, 0, a, 128), store_rows(shared, 32768, b, 128)
    k = 16 if name == "bf16" else 32
    form = Form(n, Kind(k, name, name, "f32"))
    sums = np.zeros((n // 2, 32), np.uint32)
    for step in range(channels // k):
        left = shared_rows_of_a(shared, form, a_at + 2 * step, 2)
        sums = product(shared, form, left, b_at + 2 * step, sums)
    wanted = decode(a[32:48]).astype(np.float64) @ decode(b).astype(np.float64).T
    for lane in range(32):
        for r in range(n // 2):  # registers r and r + 1 are neighbours, two rows of eight columns for each four
            row, column = lane // 4 + 8 * (r // 2 % 2), lane % 4 * 2 + r % 2 + r // 4 * 8
            assert abs(sums[r, lane : lane + 1].view(np.float32)[0] - wanted[row, column]) < 1e-4


def test_rows_in_registers() -> None:
    codes = np.arange(16 * 16, dtype=np.uint16).reshape(16, 16)
    registers = np.zeros((4, 32), np.uint32)
    for lane in range(32):
        for r in range(4):
            row, column = lane // 4 + 8 * (r % 2), lane % 4 * 2 + 8 * (r // 2)
            registers[r, lane] = int(codes[row, column]) | int(codes[row, column + 1]) << 16
    assert np.array_equal(register_rows_of_a(registers, Form(8, Kind(16, "bf16", "bf16", "f32"))), codes)


def test_sums_are_added_to_or_not_and_signs() -> None:
    shared = np.zeros(4096, np.uint8)
    ones = to_bf16(np.ones((8, 64), np.float32))
    b = store_rows(shared, 0, ones, 128)
    form = Form(8, Kind(16, "bf16", "bf16", "f32"), a_sign=-1)
    before = np.full((4, 32), 3, np.float32).view(np.uint32)
    found = product(shared, form, to_bf16(np.ones((16, 16), np.float32)), b, before)
    assert (found.view(np.float32) == 3 - 16).all()


def test_forms() -> None:
    d, a = Vector((Register("%r1", 32, 0),)), Register("%rd1", 64, 0)
    sign = Immediate(1), Immediate(-1)
    text = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"
    p = Register("%p1", 1, 0)
    form = parse_form(Instruction(text, (d, a, a, p, *sign, Immediate(0), Immediate(1)), None, 1))
    assert form == Form(64, Kind(16, "bf16", "bf16", "f32"), True, False, 1, -1)
    form = parse_form(Instruction(text, (d, d, a, p, *sign, Immediate(1)), None, 1))
    assert (form.a_is_k_major, form.b_is_k_major) == (True, False)
    form = parse_form(Instruction("wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8", (d, a, a, p), None, 1))
    assert form == Form(8, Kind(32, "s8", "s8", "s32"))
    with pytest.raises(PtxError, match="channels"):
        parse_form(Instruction("wgmma.mma_async.sync.aligned.m64n8k16.s32.s8.s8", (d, a, a, p), None, 1))


def test_wrong_descriptors() -> None:
    with pytest.raises(PtxError, match="behind"):
        read_matrix(np.zeros(512, np.uint8), of_wgmma(descriptor(0, 16, 1024, 128)), 16, 16, "bf16", True)
    with pytest.raises(PtxError, match="base offset"):
        of_wgmma(1 << 49)
    with pytest.raises(PtxError, match="expected 1"):
        of_tcgen05(descriptor(0, 16, 1024, 128))


def test_nothing_overtakes_in_a_pipeline() -> None:
    """Whichever of the pending pieces the machine takes, what was begun before is done first, and once."""
    block, done = Block((0, 0, 0), 1, np.zeros(0, np.uint8)), list[int]()
    pipeline = Pipeline(block)
    for number in range(3):
        pipeline.begin(lambda number=number: done.append(number))  # type: ignore[misc]
    block.pending.pop(1)()
    assert done == [0, 1]
    pipeline.finish(3)
    for work in block.pending:
        work()
    assert done == [0, 1, 2]
