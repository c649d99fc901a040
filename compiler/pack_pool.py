"""Packing by several threads, the blobs in the order that they were asked for.

numpy, the packing routine and the hashes run without Python's lock. A matrix is packed in pieces, each of which makes
its own part of the blob, so that the bytes do not depend on how many threads there are.
"""
from __future__ import annotations

import hashlib
import threading
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from .weights.packed import Piece

AHEAD_BYTES = 64 << 20
"""Blobs that may be there or under way at a time; one that is larger is alone."""

PIECES_BYTES = 768 << 20
"""Memory that the pieces under way may take."""

_MOST_THREADS = 32

T = TypeVar("T")


def num_threads(piece_bytes: int, cores: int) -> int:
    """piece_bytes: that the largest piece takes."""
    return max(1, min(cores, _MOST_THREADS, PIECES_BYTES // max(piece_bytes, 1)))


@contextmanager
def workers(threads: int) -> Iterator[ThreadPoolExecutor]:
    """What has not begun when the block ends is dropped."""
    pool = ThreadPoolExecutor(threads, "pack")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class Blob:
    """data u8; its SHA-256 in hexadecimal and its CRC-32."""

    data: np.ndarray
    sha256: str
    crc32: int

    @staticmethod
    def of(data: np.ndarray) -> Blob:
        view = data.reshape(-1).view(np.uint8).data
        return Blob(data, hashlib.sha256(view).hexdigest(), zlib.crc32(view))


@dataclass(frozen=True)
class Job(Generic[T]):
    """pieces of one blob, or the whole blob if it is there already; what: what the caller knows it by."""

    what: T
    size_bytes: int
    pieces: Sequence[Piece] = ()
    found: np.ndarray | None = None


@dataclass
class _UnderWay:
    """data: empty where a single piece is all of it."""

    data: np.ndarray
    left: int
    done: Future[Blob] = field(default_factory=Future)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, piece: Piece) -> None:
        if self.done.done():  # another piece has failed
            return
        try:
            part = piece.make()
            if not self.data.size:
                self.data = part
            else:
                self.data[piece.begin:piece.begin + part.size] = part
            with self.lock:
                self.left -= 1
                is_last = not self.left
            if is_last:
                self.done.set_result(Blob.of(self.data))
        except BaseException as error:
            with self.lock:
                if not self.done.done():
                    self.done.set_exception(error)


def blobs_in_order(jobs: Iterable[Job[T]], pool: ThreadPoolExecutor) -> Iterator[tuple[T, Blob]]:
    """Each job's blob when its turn comes. A job is asked for as soon as memory allows to start it.

    Raises what a piece raises, when the turn of its blob comes; no other starts then.
    """
    waiting: deque[tuple[T, int, Future[Blob]]] = deque()
    ahead, rest = 0, iter(jobs)
    following = next(rest, None)
    try:
        while waiting or following is not None:
            while following is not None and (not waiting or ahead + following.size_bytes <= AHEAD_BYTES):
                waiting.append((following.what, following.size_bytes, _start(following, pool)))
                ahead += following.size_bytes
                following = next(rest, None)
            what, size, blob = waiting.popleft()
            yield what, blob.result()
            ahead -= size
    finally:
        for _, _, blob in waiting:
            blob.cancel()  # its pieces find that nobody waits


def _start(job: Job[T], pool: ThreadPoolExecutor) -> Future[Blob]:
    if job.found is not None:
        return pool.submit(Blob.of, job.found)
    under_way = _UnderWay(np.empty(job.size_bytes if len(job.pieces) > 1 else 0, np.uint8), len(job.pieces))
    for piece in job.pieces:
        pool.submit(under_way.run, piece)
    return under_way.done

