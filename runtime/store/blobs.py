"""A folder of blobs, each under the name of its SHA-256.

    FOLDER/sha256/<first two digits>/<sha256>   a blob, read-only
    FOLDER/partial/<sha256>                     what has arrived of one

A blob appears by one rename, when all of it is there and has been hashed, and is never changed: whatever is killed at
whatever moment, a file of the first kind is whole. Who adds blobs holds the folder's lock shared, who removes them
holds it alone. The folder may be a symbolic link to a larger disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path

from ..errors import WorkFailed

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 1 << 20


class BlobMismatch(WorkFailed):
    """What arrived is not the blob that was asked for."""


class StoreBusy(WorkFailed):
    """Others are adding to the store."""


class BlobFolder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._unsynced: set[Path] = set()

    def path(self, sha256: str) -> Path:
        """Where the blob is, or would be."""
        return self.folder / "sha256" / sha256[:2] / sha256

    def find(self, sha256: str) -> Path | None:
        path = self.path(sha256)
        return path if path.is_file() else None

    def holds(self, sha256: str, size: int) -> bool:
        """Whether the blob is there, in its size: what has another is damaged and will be replaced."""
        try:
            return self.path(sha256).stat().st_size == size
        except FileNotFoundError:
            return False

    def __iter__(self) -> Iterator[str]:
        for folder in sorted(self.folder.glob("sha256/??")):
            yield from sorted(name for name in os.listdir(folder) if _SHA256.fullmatch(name))

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        """Nothing is removed meanwhile."""
        with self._locked(fcntl.LOCK_SH):
            yield

    @contextlib.contextmanager
    def removing(self) -> Iterator[None]:
        """Nothing is added meanwhile. Raises StoreBusy where others add."""
        with self._locked(fcntl.LOCK_EX | fcntl.LOCK_NB):
            yield

    @contextlib.contextmanager
    def receive(self, sha256: str, size: int) -> Iterator[io.FileIO | None]:
        """A file to write the blob to, at the end of what is already there; None if the blob is there.

        At the end of the block the data are checked and become the blob. After an exception they stay, and the next
        `receive` of the blob continues them. Raises BlobMismatch, and forgets the data, if they are not the blob.
        """
        if self.holds(sha256, size):
            yield None
            return
        with self._partial(sha256) as file:
            if self.holds(sha256, size):  # another process was faster
                os.unlink(self._partial_path(sha256))
                yield None
                return
            if file.seek(0, os.SEEK_END) > size:
                file.seek(0)
                file.truncate()
            yield file
            self._publish(file, sha256, size)

    def put(self, sha256: str, data: memoryview) -> None:
        """Adds a blob that is in memory. Raises BlobMismatch if it is another."""
        with self.receive(sha256, data.nbytes) as file:
            if file is not None:
                file.seek(0)
                file.truncate()
                while data.nbytes:  # one call writes at most 2 GiB
                    data = data[file.write(data) :]

    def sync(self) -> None:
        """Returns when what was received lasts, even if the machine loses its power."""
        while self._unsynced:
            sync_folder(self._unsynced.pop())

    def remove(self, sha256: str) -> None:
        self.path(sha256).unlink(missing_ok=True)

    def partial(self) -> list[Path]:
        """What has arrived of blobs, from transfers that run or were broken off."""
        return sorted((self.folder / "partial").glob("*"))

    def _partial_path(self, sha256: str) -> Path:
        return self.folder / "partial" / sha256

    @contextlib.contextmanager
    def _partial(self, sha256: str) -> Iterator[io.FileIO]:
        """The blob's partial file, which no other process has meanwhile."""
        path = self._partial_path(sha256)
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            with io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if _is_at(file, path):
                    yield file
                    return
                # Who had the lock before has made it the blob, or has removed it.

    def _publish(self, file: io.FileIO, sha256: str, size: int) -> None:
        found = file.tell(), hash_of(file)
        if found != (size, sha256):
            os.unlink(self._partial_path(sha256))
            raise BlobMismatch(f"the data received for blob {sha256} are not that blob: {found[0]:,} bytes with "
                               f"SHA-256 {found[1]}, expected {size:,} bytes.\n  They were thrown away; try again, and "
                               "if this stays, the source is damaged.")
        os.fsync(file.fileno())
        os.fchmod(file.fileno(), 0o444)
        path = self.path(sha256)
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._unsynced.add(path.parent.parent)
        os.replace(self._partial_path(sha256), path)
        self._unsynced.add(path.parent)

    @contextlib.contextmanager
    def _locked(self, mode: int) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "ab") as file:
            try:
                fcntl.flock(file, mode)
            except BlockingIOError:
                raise StoreBusy(f"{self.folder}: another process is adding to this store; try again when it is "
                                "done") from None
            yield


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Other processes that want the same lock wait. `lock` is a file for nothing else."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def hash_of(file: io.FileIO) -> str:
    """SHA-256 of a whole open file; its position stays."""
    digest, offset = hashlib.sha256(), 0
    while chunk := os.pread(file.fileno(), _CHUNK_BYTES, offset):
        digest.update(chunk)
        offset += len(chunk)
    return digest.hexdigest()


def _is_at(file: io.FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes) -> None:
    """`path` has its old content or, from one moment on, `data`. One process at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)
