"""Packing by several threads: order, memory, faults, and the same bytes however many there are."""
from __future__ import annotations

import hashlib
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
import pytest

from ingot.compiler import pack_pool
from ingot.compiler.pack_pool import Job, blobs_in_order, num_threads, workers
from ingot.compiler.weights.expr import concat, tensor
from ingot.compiler.weights.packed import ROWS, ROWS_AT_A_TIME, PackedWeight, Packing, Piece


class Source:
    def __init__(self, **arrays: np.ndarray) -> None:
        self.arrays = arrays

    def shape(self, name: str) -> tuple[int, ...]:
        return self.arrays[name].shape

    def get(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        return self.arrays[name][begin:end]


def weights() -> tuple[list[PackedWeight], Source]:
    rng = np.random.default_rng(0)
    source = Source(a=rng.standard_normal((ROWS_AT_A_TIME * 3 + 48, 64)).astype(np.float32),
                    b=rng.standard_normal((70, 64)).astype(np.float32),
                    c=rng.standard_normal((3, 32, 64)).astype(np.float32))
    a, b, c = (tensor(name, source.shape(name)) for name in "abc")
    packings = [Packing("w4a8"), Packing("int8g32"), Packing("bf16"), Packing(), Packing("fp8", ROWS)]
    return [PackedWeight(f"w{number}", expr, packing, "") for number, (expr, packing) in enumerate(
        (expr, packing) for packing in packings for expr in (a, concat([a, b], 0), b, c))], source


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_the_bytes_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    packed, source = weights()
    jobs = (Job(weight.name, weight.size_bytes, weight.pieces(source)) for weight in packed)
    with workers(threads) as pool:
        found = list(blobs_in_order(jobs, pool))
    assert [name for name, _ in found] == [weight.name for weight in packed]
    for weight, (_, blob) in zip(packed, found, strict=True):
        data = weight.make(source).tobytes()
        assert blob.data.tobytes() == data and len(data) == weight.size_bytes
        assert (blob.sha256, blob.crc32) == (hashlib.sha256(data).hexdigest(), zlib.crc32(data))


def job(number: int, size: int, make: Callable[[], object] = lambda: None, pieces: int = 2) -> Job[int]:
    def part() -> np.ndarray:
        make()
        return np.full(size // pieces, number, np.uint8)
    return Job(number, size, [Piece(begin * (size // pieces), part) for begin in range(pieces)])


def test_pieces_of_one_matrix_are_made_side_by_side() -> None:
    together = threading.Barrier(2, timeout=20)
    with workers(2) as pool:
        (_, blob), = blobs_in_order([job(7, 10, together.wait)], pool)
    assert blob.data.tolist() == [7] * 10


def test_blobs_ahead_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is asked for while the ones that nobody has taken yet fill the memory; one that is larger comes alone."""
    monkeypatch.setattr(pack_pool, "AHEAD_BYTES", 100)
    asked = count(1)
    started = 0

    def jobs() -> list[Job[int]]:
        return [job(0, 40), job(1, 40), job(2, 40), job(3, 400), job(4, 40)]

    def counted() -> Iterator[Job[int]]:
        nonlocal started
        for each in jobs():
            started = next(asked)
            yield each

    seen = []
    with workers(2) as pool:
        for number, _ in blobs_in_order(counted(), pool):
            seen.append((number, started))
    # Of what has been asked for the last one waits for its turn.
    assert seen == [(0, 3), (1, 4), (2, 4), (3, 5), (4, 5)]


@pytest.mark.parametrize("threads", [1, 4])
def test_a_fault_is_told_and_ends_the_rest(threads: int) -> None:
    def fail() -> None:
        raise ValueError("damaged")

    def work() -> None:
        done.append(0)
        time.sleep(0.01)

    done: list[int] = []
    jobs = (job(number, 10, fail if number == 2 else work) for number in range(1000))
    taken: list[int] = []
    with pytest.raises(ValueError, match="damaged"), workers(threads) as pool:
        for number, _ in blobs_in_order(jobs, pool):
            taken.append(number)
    assert taken == [0, 1] and len(done) < 100


def test_what_is_there_already_is_hashed() -> None:
    with workers(1) as pool:
        (_, blob), = blobs_in_order([Job("x", 3, found=np.arange(3, dtype=np.uint8))], pool)
    assert blob.sha256 == hashlib.sha256(b"\0\1\2").hexdigest()


def test_threads_are_bounded_by_memory() -> None:
    assert num_threads(0, 4) == 4 and num_threads(1 << 40, 4) == 1
    assert num_threads(pack_pool.PIECES_BYTES // 3, 64) == 3 and num_threads(1, 1000) < 1000
    large = PackedWeight("w", tensor("w", (128_256, 8192)), Packing("w4a8"), "")
    assert large.piece_bytes(False) * 5 < pack_pool.PIECES_BYTES < large.piece_bytes(True) * 2
