"""Writes an engine file: streams weights one by one, then replaces the target in one step.

    with EngineWriter(path) as writer:
        blob = writer.add_weight(array)             # any number of times; "weights/<sha256>.bin"
        writer.add("plan.json", canonical_json(plan))
        writer.add("code/engine.so", library)
        engine_hash = writer.finish(manifest)

Everything goes to a temporary file beside the target, `.NAME.PID-RANDOM.partial`, which is locked while its writer
lives and renamed at the end. Whatever leaves the `with` block before `finish` removes it; a killed writer can't, so the
next writer of the same target removes the temporary files that nobody locks. Memory: one weight at a time, and the
members other than weights until `finish`.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ingot.runtime.engine_file import EngineFile
from ingot.runtime.engine_format import (
    FILE_ORDER,
    FORMAT_VERSION,
    MANIFEST,
    MAX_MEMBERS,
    PLAN,
    Member,
    check_name,
    directory,
    end_records,
    local_header,
    section,
)
from ingot.runtime.errors import RequestError, WorkFailed
from ingot.runtime.manifest import canonical_json, check_manifest, parse_canonical, weight_name
from ingot.runtime.store.blobs import sync_folder

if TYPE_CHECKING:
    from ingot.runtime.store.store import Store

_SYNC_BYTES = 16 << 20
"""So much is written before the disk is told to begin; what waits for it at the end is then little."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFull(WorkFailed):
    """The engine does not fit on its disk; nothing is left behind."""


def check_output(path: Path, overwrite: bool) -> None:
    """Raises RequestError where an engine cannot be written. Who has long work to do asks before it."""
    folder = path.parent
    if not folder.is_dir():
        raise RequestError(f"{path}: the folder {folder} does not exist; create it or choose another path")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RequestError(f"{path}: the folder {folder} cannot be written to; choose another path")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:  # as in /proc, which an administrator seems to be allowed to write to
        raise RequestError(f"{path}: no file can be made in the folder {folder}: {error.strerror}; choose another path"
                           ) from None
    if os.path.lexists(path):
        if not (path.is_file() or path.is_symlink()):
            raise RequestError(f"{path} exists and is not a file; choose another path")
        if not overwrite:
            raise _exists(path)


def _exists(path: Path) -> RequestError:
    return RequestError(f"{path} exists; pass --force to replace it or choose another path")


class EngineWriter:
    """Writer of one engine; a context manager. See the module's docstring."""

    def __init__(self, path: str | os.PathLike[str], overwrite: bool = False, expected_bytes: int = 0,
                 strip_weights: bool = False, store: "Store | None" = None) -> None:
        """Creates the temporary file.

        `strip_weights`: name the weights by their hashes, but leave them out of the file. The manifest, and so the
        engine's hash, is that of the whole engine.

        `store`: gets the engine too. Of a stripped one the weights go there alone, one by one as they come. Nothing is
        removed from the store meanwhile, and it has the engine when `finish` returns.

        `expected_bytes`: what the caller knows of the engine's size, to learn of a full disk before the work.
        Raises RequestError when the target can't be written or exists and may not be replaced, DiskFull.
        """
        self.path = Path(path)
        self._overwrite = overwrite
        self._expected_bytes = expected_bytes
        self._strip_weights = strip_weights
        self._store = store
        self._adding = contextlib.ExitStack()
        self._manifest = b""
        self._small: dict[str, bytes] = {}
        self._table: dict[str, dict[str, Any]] = {}
        self._members: list[Member] = []
        self._offset = 0
        self._synced_to = 0
        self._syncing: Future[None] | None = None
        self._fd = -1  # the temporary file, while there is one
        self._disk = ThreadPoolExecutor(1, "sync")
        check_output(self.path, overwrite)
        _remove_abandoned(self.path)
        with self._explained_errors():
            free = shutil.disk_usage(self.path.parent).free
            if expected_bytes > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._temporary, self._fd = _create_temporary(self.path)
        if store is not None:
            with self._explained_store():
                self._adding.enter_context(store.blobs.adding())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.discard()

    def discard(self) -> None:
        """Removes the temporary file; after `finish`, there is none and this does nothing."""
        self._adding.close()
        if self._fd >= 0:
            if self._syncing is not None:
                wait([self._syncing])
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temporary)
            os.close(self._fd)
            self._fd = -1
        self._disk.shutdown()

    def add(self, name: str, data: bytes) -> None:
        """Adds plan.json, refit.json, selftest.json or a member below code/, tokenizer/ or debug/.

        Raises EngineFormatError for a bad name.
        """
        check_name(name)
        if name in self._small or section(name) in ("weights/", MANIFEST):
            raise ValueError(f"{name} is already in the engine or not for add()")
        if name == PLAN:
            parse_canonical(data, PLAN)
        self._small[name] = bytes(data)

    def add_weight(self, data: "np.ndarray[Any, Any] | bytes | bytearray | memoryview", sha256: str | None = None,
                   crc32: int | None = None) -> str:
        """Writes a weight unless an equal one is there or weights are stripped, and returns its member name.

        An array is written as its elements' bytes in row-major order. sha256, crc32: of these bytes, where the caller
        knows them.
        """
        view = _byte_view(data)
        digest = hashlib.sha256(view).hexdigest() if sha256 is None else sha256
        name = weight_name(digest)
        if name not in self._table:
            if self._strip_weights:
                self._table[name] = {"sha256": digest, "size": view.nbytes}
                if self._store is not None:
                    with self._explained_store():
                        self._store.blobs.put(digest, view)
            else:
                self._append(name, view, digest, crc32)
        return name

    @contextlib.contextmanager
    def preview(self, manifest: Mapping[str, Any]) -> Iterator[Path]:
        """The file that `finish(manifest)` would put in place, to be tried out within the block; nothing else may be
        added meanwhile. Afterwards the writer is as it was. Raises as `finish` does."""
        assert not self._strip_weights, "an engine without weights cannot be tried out"
        begin, members, table = self._offset, list(self._members), dict(self._table)
        try:
            self._complete(manifest)
            yield self._temporary
        finally:
            if self._fd >= 0:
                os.ftruncate(self._fd, begin)
                os.lseek(self._fd, begin, os.SEEK_SET)
            self._offset, self._members, self._table = begin, members, table

    def finish(self, manifest: Mapping[str, Any]) -> str:
        """Writes what is left, puts the engine in place and returns its hash.

        `manifest` lacks `members` and may lack `format_version`; both are filled in. Raises EngineFormatError for a
        manifest that breaks the schema, RequestError when the target has appeared meanwhile, DiskFull, WorkFailed.
        """
        engine_hash = self._complete(manifest)
        self._publish()
        if self._store is not None:
            with self._explained_store():
                self._add_to(self._store, engine_hash)
        return engine_hash

    def _add_to(self, store: "Store", engine_hash: str) -> None:
        """The engine is in its place: now it is in the store too."""
        if not self._strip_weights:
            with EngineFile.open(self.path) as engine:
                store.add(engine)
            return
        for name, data in self._small.items():
            store.blobs.put(self._table[name]["sha256"], memoryview(data))
        store.publish(engine_hash, self._manifest)

    def _complete(self, manifest: Mapping[str, Any]) -> str:
        """All that stands behind the weights."""
        if PLAN not in self._small or "members" in manifest:
            raise ValueError(f"an engine needs {PLAN}, and the writer itself fills in the manifest's members")
        for name in sorted(self._small, key=lambda name: (FILE_ORDER.index(section(name)), name)):
            data = self._small[name]
            self._append(name, memoryview(data), hashlib.sha256(data).hexdigest())
        complete = {"format_version": FORMAT_VERSION, **manifest, "members": self._table}
        check_manifest(complete)
        encoded = self._manifest = canonical_json(complete)
        engine_hash = hashlib.sha256(encoded).hexdigest()
        self._append(MANIFEST, memoryview(encoded), engine_hash)
        entries = directory(self._members)
        end = end_records(len(self._members), self._offset, len(entries))
        self._write(memoryview(entries + end))
        return engine_hash

    def _append(self, name: str, data: memoryview, digest: str, crc32: int | None = None) -> None:
        if len(self._members) == MAX_MEMBERS:
            raise WorkFailed(f"{self.path}: more than {MAX_MEMBERS} members do not fit in an engine")
        member = Member(name, data.nbytes, zlib.crc32(data) if crc32 is None else crc32, self._offset)
        self._write(memoryview(local_header(member)))
        self._write(data)
        self._members.append(member)
        if name != MANIFEST:
            self._table[name] = {"sha256": digest, "size": data.nbytes}

    def _write(self, data: memoryview) -> None:
        assert self._fd >= 0, "the engine is finished or discarded"
        with self._explained_errors(data.nbytes):
            written = 0
            while written < data.nbytes:  # one call writes at most 2 GiB
                written += os.write(self._fd, data[written:])
        self._offset += data.nbytes
        self._sync_beside()

    def _sync_beside(self) -> None:
        """Has a thread bring to the disk what is written, unless it is at it."""
        if self._offset - self._synced_to >= _SYNC_BYTES and (self._syncing is None or self._syncing.done()):
            self._await_sync()
            self._synced_to, self._syncing = self._offset, self._disk.submit(os.fdatasync, self._fd)

    def _await_sync(self) -> None:
        """The system tells an error of the disk once: it must not get lost in the thread."""
        syncing, self._syncing = self._syncing, None
        if syncing is not None:
            with self._explained_errors():
                syncing.result()

    def _publish(self) -> None:
        self._await_sync()
        with self._explained_errors():
            os.fsync(self._fd)
            if self._overwrite:
                os.replace(self._temporary, self.path)
            else:
                self._rename_to_new()
            sync_folder(self.path.parent)
        os.close(self._fd)
        self._fd = -1

    def _rename_to_new(self) -> None:
        # A link, unlike a rename, never replaces what another build has put there since we looked.
        try:
            os.link(self._temporary, self.path)
        except FileExistsError:
            raise _exists(self.path) from None
        except OSError:  # a file system without hard links
            check_output(self.path, self._overwrite)
            os.rename(self._temporary, self.path)
        else:
            os.unlink(self._temporary)

    @contextlib.contextmanager
    def _explained_errors(self, num_bytes: int = 0) -> Iterator[None]:
        """Turns errors of the operating system while `num_bytes` are written into DiskFull or WorkFailed."""
        try:
            yield
        except OSError as error:
            self.discard()
            if error.errno not in _NO_SPACE:
                raise WorkFailed(f"{self.path}: cannot write the engine: {error.strerror}") from None
            needed = max(self._expected_bytes, self._offset + num_bytes)
            free = shutil.disk_usage(self.path.parent).free
            raise DiskFull(
                f"{self.path}: {error.strerror}: the engine needs at least {needed:,} bytes, {free:,} are available.\n"
                "  Free some space or choose a path on another disk."
            ) from None


    @contextlib.contextmanager
    def _explained_store(self) -> Iterator[None]:
        assert self._store is not None
        try:
            yield
        except OSError as error:
            self.discard()
            raise WorkFailed(f"{self._store.folder}: cannot add the engine to the store: {error.strerror}") from None


def _byte_view(data: "np.ndarray[Any, Any] | bytes | bytearray | memoryview") -> memoryview:
    if isinstance(data, np.ndarray):  # through uint8, because bfloat16 and fp8 arrays export no buffer
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
    return memoryview(data).cast("B")


def _create_temporary(target: Path) -> tuple[Path, int]:
    """A new locked file beside `target`: its path and descriptor."""
    while True:
        path = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with contextlib.suppress(OSError):  # a file system without locks: then nobody removes the file either
                fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink > 0:
                return path, fd
            os.close(fd)  # another writer saw the file before the lock, took it for abandoned and removed it
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise


def _remove_abandoned(target: Path) -> None:
    """Removes temporary files of writers of `target` that have died: those that can be locked."""
    pattern = re.compile(re.escape(f".{target.name}.") + r"\d+-[0-9a-f]{8}\.partial")
    with contextlib.suppress(OSError):  # tidying up never fails a build
        for path in [entry.path for entry in os.scandir(target.parent) if pattern.fullmatch(entry.name)]:
            with contextlib.suppress(OSError):  # locked: its writer lives; or another writer was faster
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
                finally:
                    os.close(fd)
