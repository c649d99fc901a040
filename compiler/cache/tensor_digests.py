"""SHA-256 of every tensor of a checkpoint. A file that was read before and has not changed is not read again.

Whether it has changed is told as git tells it: by device, inode, size and both times of the file. A file that changed
within the last seconds is read each time, for its times are too coarse to tell a second change.
"""
from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ingot.runtime.host import available_cores

from ..checkpoint.checkpoint import Checkpoint
from .build_cache import BuildCache
from .keys import key

_SETTLED_NS = 3_000_000_000
_EARLY_BYTES = 1 << 30


def tensor_digests(checkpoint: Checkpoint, cache: BuildCache | None) -> dict[str, str]:
    """Tensor name -> SHA-256 of its type, shape and stored bytes."""
    digests: dict[str, str] = {}
    for path, names in checkpoint.store.files().items():
        digests |= _of_file(checkpoint, path, names, cache)
    return digests


class Digests(Mapping[str, str]):
    """The same, each made when it is asked for, or beforehand by `start`: where nobody keeps them, they are made beside
    the packing of the tensors that they name."""

    def __init__(self, checkpoint: Checkpoint, pool: ThreadPoolExecutor) -> None:
        self._checkpoint, self._pool = checkpoint, pool
        self._names = checkpoint.names()
        self._futures: dict[str, Future[str]] = {}

    def start(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._futures:
                self._futures[name] = self._pool.submit(self._checkpoint.tensor_digest, name)

    def start_some(self) -> None:
        """Those that surely stay in memory until they are packed: while nothing is packed yet, the pool has time."""
        left = _EARLY_BYTES
        for name in self._names:
            left -= 4 * math.prod(self._checkpoint.shape(name))
            if left < 0:
                break
            self.start([name])

    def __getitem__(self, name: str) -> str:
        self.start([name])
        return self._futures[name].result()

    def __iter__(self) -> Iterator[str]:
        self.start(self._names)
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def checkpoint_digest(digests: Mapping[str, str]) -> str:
    """SHA-256 over all tensors. How they are divided over files, and in which order, does not count."""
    return hashlib.sha256("".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode()).hexdigest()


def _of_file(checkpoint: Checkpoint, path: Path, names: list[str], cache: BuildCache | None) -> dict[str, str]:
    status = os.stat(path)
    if cache is not None:
        name = key(identity=[str(path.resolve()), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns,
                             status.st_ctime_ns], names=names)
        if (data := cache.get("digests", name)) is not None:
            found: dict[str, str] = json.loads(data)
            return found
    with ThreadPoolExecutor(available_cores()) as pool:
        digests = dict(zip(names, pool.map(checkpoint.tensor_digest, names), strict=True))
    if cache is not None and time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS:
        cache.put("digests", name, json.dumps(digests).encode())
    return digests
