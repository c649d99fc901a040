"""tools/ptx/tensor_copies.py and tensor_barriers.py: boxes of tensors, and what waits for them."""
from __future__ import annotations

import numpy as np
import pytest

from ingot.runtime.devices.gpu_kernels import TensorMapType
from ingot.runtime.devices.gpu_plan import BoundTensorMap
from tools.ptx.instruction import PtxError
from tools.ptx.memory import GlobalMemory
from tools.ptx.tensor_barriers import Barrier, barrier_at, make_barrier, remove_barrier
from tools.ptx.tensor_copies import TensorMap, read_box, tensor_map, write_box
from tools.ptx.warp import Block

RNG = np.random.default_rng(3)


def block_of(num_bytes: int) -> Block:
    return Block((0, 0, 0), 4, np.full(num_bytes, 0xEE, np.uint8))


def matrix(rows: int, columns: int, stride: int, box: tuple[int, int], width: int) -> tuple[
        np.ndarray, GlobalMemory, TensorMap]:
    """16-bit elements; what lies between the rows is in the array, too."""
    array = RNG.integers(1, 1 << 16, (rows, stride)).astype(np.uint16)
    memory = GlobalMemory({"x": array})
    return array, memory, TensorMap(memory.addresses["x"], 2, (columns, rows), (2 * stride,), box, width)


def unswizzled(shared: np.ndarray, rows: int, width: int) -> np.ndarray:
    """u8 [rows, width] of a box at 0, its pieces put back one by one."""
    lines = shared[: rows * width].reshape(rows, width // 16, 16)
    found = np.empty_like(lines)
    for i in range(rows):
        for j in range(width // 16):
            found[i, j] = lines[i, j ^ (i * width // 128 % (width // 16))]
    return found.reshape(rows, width)


@pytest.mark.parametrize("width", [128, 64, 32])
@pytest.mark.parametrize("at", [(0, 0), (32, 5), (-8, -3), (70, 0), (0, 64)])
def test_what_is_outside_is_zero(width: int, at: tuple[int, int]) -> None:
    columns = width // 2
    array, memory, tensor = matrix(37, 77, 88, (columns, 16), width)
    block = block_of(4096)
    read_box(memory, tensor, at, block, 0)
    padded = np.zeros((200, 300), np.uint16)
    padded[50:87, 50:127] = array[:, :77]
    wanted = padded[50 + at[1] : 66 + at[1], 50 + at[0] : 50 + at[0] + columns]
    assert np.array_equal(unswizzled(block.shared, 16, width).view(np.uint16), wanted)
    assert (block.shared[16 * width :] == 0xEE).all()


def test_without_swizzle_rows_are_dense() -> None:
    array, memory, tensor = matrix(16, 64, 64, (24, 4), 16)
    block = block_of(1024)
    read_box(memory, tensor, (8, 2), block, 256)
    assert np.array_equal(block.shared[256 : 256 + 192].view(np.uint16).reshape(4, 24), array[2:6, 8:32])


@pytest.mark.parametrize("dimensions", [1, 3, 5])
def test_dimensions(dimensions: int) -> None:
    shape = (2, 3, 2, 4, 64)[5 - dimensions :]
    array = RNG.integers(0, 256, shape).astype(np.uint8)
    memory = GlobalMemory({"x": array})
    tensor = TensorMap(memory.addresses["x"], 1, tuple(reversed(shape)), tuple(reversed(array.strides[:-1])),
                       (32, *(2,) * (dimensions - 1)), 16)
    block = block_of(1024)
    read_box(memory, tensor, (16, *(1,) * (dimensions - 1)), block, 0)
    padded = np.zeros((10,) * (dimensions - 1) + (64,), np.uint8)
    padded[tuple(slice(0, extent) for extent in shape)] = array
    wanted = padded[tuple([slice(1, 3)] * (dimensions - 1) + [slice(16, 48)])]
    assert np.array_equal(block.shared[: wanted.size], wanted.reshape(-1))


def test_writing_leaves_what_is_outside() -> None:
    array, memory, tensor = matrix(10, 40, 48, (64, 8), 128)
    before, block = array.copy(), block_of(1024)
    read_box(memory, tensor, (0, 6), block, 0)
    block.shared[:] = ~block.shared
    write_box(memory, tensor, (0, 6), block, 0)
    found = memory.arrays()["x"]
    assert np.array_equal(found[6:10, :40], ~before[6:10, :40])
    assert np.array_equal(found[:6], before[:6]) and np.array_equal(found[:, 40:], before[:, 40:])


def test_a_launch_tells_of_maps() -> None:
    kind = TensorMapType("bf16", (128, 64), (128, 64), 3, 2, 10, False)
    assert tensor_map(BoundTensorMap(4096, kind, (100, 256), 512)) == TensorMap(
        4096, 2, (256, 100), (1024,), (64, 128), 128)


def test_what_the_unit_refuses() -> None:
    _, memory, tensor = matrix(16, 64, 64, (64, 8), 128)
    with pytest.raises(PtxError, match="multiple of 128"):
        read_box(memory, tensor, (0, 0), block_of(4096), 64)
    with pytest.raises(PtxError, match="behind"):
        read_box(memory, tensor, (0, 0), block_of(512), 0)
    with pytest.raises(PtxError, match="coordinates"):
        read_box(memory, tensor, (0, 0, 0), block_of(4096), 0)
    with pytest.raises(PtxError, match="not supported"):
        read_box(memory, TensorMap(tensor.address, 2, (64, 16), (128,), (32, 8), 128), (0, 0), block_of(4096), 0)


def test_phases_end_with_arrivals_and_bytes() -> None:
    barrier = Barrier(2, 2)
    assert barrier.is_over(1) and not barrier.is_over(0)
    barrier.expect(64)
    barrier.arrive(2)
    assert not barrier.is_over(0)
    barrier.complete(64)
    assert barrier.is_over(0) and not barrier.is_over(1)
    barrier.complete(32)  # sooner than expected
    barrier.arrive()
    barrier.expect(32)
    barrier.arrive()
    assert barrier.is_over(1) and barrier.phase == 2
    with pytest.raises(PtxError, match="waits for 2"):
        barrier.arrive(3)


def test_barriers_that_are_not_there_or_written_over() -> None:
    block = block_of(64)
    make_barrier(block, 8, 1)
    assert barrier_at(block, 8).count == 1
    with pytest.raises(PtxError, match="no barrier at 16"):
        barrier_at(block, 16)
    with pytest.raises(PtxError, match="multiple of 8"):
        make_barrier(block, 4, 1)
    block.shared[10] ^= 1
    with pytest.raises(PtxError, match="written over"):
        remove_barrier(block, 8)
