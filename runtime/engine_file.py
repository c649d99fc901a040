"""Reads an engine file: checks it, then gives its members as bytes or mapped into memory.

`EngineFile.open` checks, before anything is mapped or executed: the layout of the whole file byte by byte (every
header, no gap, no overlap, nothing appended), the manifest, the table of members, and the hashes of the plan and the
code. It reads neither weights nor tokenizer. `read` checks the hash of what it returns. `verify` checks every hash, so
that after it no byte of the file is unchecked.

A stripped engine has the manifest of the whole one, and so its hash, but no weights. They are files elsewhere, such as
in a store, that `find_blob` finds by their SHA-256. Of a loose engine, which is how a store holds it, all members are
such files, and what is opened is the manifest: `EngineFile.open_loose`.

A mapped engine must not be changed in place; writing a new one over it is safe, for the writer replaces the name and
leaves the old file to those who have it mapped.
"""

import errno
import hashlib
import io
import mmap
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from .checkpoints import build_first
from .engine_format import (
    COMMENT_PREFIX,
    DIRECTORY_ORDER,
    END_BYTES,
    FIRST_BYTES,
    MANIFEST,
    PLAN,
    EngineFormatError,
    EngineHashMismatch,
    EngineTruncated,
    Member,
    NotAnEngine,
    expect_bytes,
    local_header,
    parse_directory,
    parse_end_records,
    section,
)
from .errors import RequestError
from .manifest import MAX_MANIFEST_BYTES, canonical_json, check_manifest, check_members, parse_canonical, parse_object

if TYPE_CHECKING:
    import numpy as np

_CHUNK_BYTES = 1 << 20
_JUNK_SEARCH_BYTES = 1 << 16


FindBlob = Callable[[str], Path | None]
"""SHA-256 of a blob -> a file that holds it, or None."""


class WeightsMissing(RequestError):
    """Members that the engine's file lacks, a stripped engine's weights, are asked for and are not to be found."""


@dataclass(frozen=True, slots=True)
class MemberCheck:
    """A member whose data were found to have the SHA-256 that the manifest gives and the CRC-32 of the directory."""

    name: str
    size_bytes: int
    sha256: str


class EngineFile:
    """An open, checked engine.

    path      as given to open
    hash      SHA-256 of manifest.json, the name of this engine
    manifest  its content
    plan      content of plan.json, parsed when first asked for
    members   name -> Member (size, offsets) of those in the file, in its directory's order: manifest, plan, code, …
    stripped  name -> size in bytes of those that the file lacks: none for a whole engine, all for a loose one
    sizes     name -> size in bytes of both
    """

    path: str
    hash: str
    manifest: dict[str, Any]
    members: Mapping[str, Member]
    stripped: Mapping[str, int]
    sizes: Mapping[str, int]

    @classmethod
    def open(cls, path: str | os.PathLike[str], find_blob: FindBlob | None = None) -> Self:
        """Opens and checks the engine at `path`. find_blob: where the weights of a stripped engine are.

        Raises RequestError when there is no readable file, else EngineFormatError or one of its kinds: NotAnEngine,
        EngineTruncated, EngineVersionError, EngineHashMismatch.
        """
        return cls._open(path, find_blob, cls._check_file)

    @classmethod
    def open_loose(cls, path: str | os.PathLike[str], find_blob: FindBlob) -> Self:
        """Opens and checks the engine whose manifest is the file at `path`; all else comes from find_blob.

        Raises as `open` does, and WeightsMissing.
        """
        return cls._open(path, find_blob, cls._check_loose)

    @classmethod
    def _open(cls, path: str | os.PathLike[str], find_blob: FindBlob | None, check: Callable[[Self], None]) -> Self:
        engine = cls()
        engine.path = os.fspath(path)
        engine._find_blob = find_blob
        engine._file = _open_file(engine.path)
        try:
            check(engine)
        except EngineFormatError as error:
            engine.close()
            raise type(error)(f"{engine.path}: {error}") from None
        except BaseException:
            engine.close()
            raise
        return engine

    def __init__(self) -> None:
        self._file: io.FileIO
        self._map: mmap.mmap | None = None
        self._find_blob: FindBlob | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file. Arrays that `map` gave stay valid; the mapping goes with the last of them."""
        self._map = None
        self._file.close()

    @cached_property
    def plan(self) -> dict[str, Any]:
        data = self.read(PLAN)
        try:
            return parse_object(data, PLAN)
        except EngineFormatError as error:
            raise EngineFormatError(f"{self.path}: {error}") from None

    def read(self, name: str) -> bytes:
        """The data of a member, whose hash is checked. Raises EngineFormatError, WeightsMissing."""
        if name in self.stripped:
            data = b"".join(self._blob_chunks(name))
            self._check_blob(name, [data])
            return data
        member = self._member(name)
        try:
            data = _read(self._file, member.data_offset, member.size, f"member {name}")
            self._check_hash(member, [data])
        except EngineFormatError as error:
            raise type(error)(f"{self.path}: {error}") from None
        return data

    def map(self, name: str) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        """The data of a member as a read-only [size] uint8 array that starts on a page; nothing is copied.

        All members share one mapping; weights of a stripped engine have their own. The hash is not checked here: call
        `verify` once for a new file. Raises EngineFormatError, WeightsMissing.
        """
        import numpy as np  # inspecting and verifying an engine needs no arrays and should not wait for numpy

        if name in self.stripped:
            path = self._blob(name)
            if not self.stripped[name]:
                return np.empty(0, np.uint8)
            with open(path, "rb") as file:
                return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        member = self._member(name)
        if self._map is None:
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(self._map, np.uint8, member.size, member.data_offset)

    def read_into(self, name: str, memory: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]") -> None:
        """The data of a member to memory of its size, u8. As with `map` the hash is not checked here.

        Raises EngineFormatError, WeightsMissing.
        """
        assert self.sizes.get(name, memory.size) == memory.size, (name, memory.size)
        if name in self.stripped:
            with open(self._blob(name), "rb", buffering=0) as file:
                _read_into(file, 0, memory.data, name)
        else:
            _read_into(self._file, self._member(name).data_offset, memory.data, name)

    def verify(self, on_progress: Callable[[int, int], None] | None = None) -> list[MemberCheck]:
        """Checks the hash of every member and that the plan is canonical; `on_progress(bytes done, bytes in all)`.

        Of a stripped engine that was opened with `find_blob`, the weights too, wherever they lie. Raises
        EngineHashMismatch that lists every member that fails, expected and got; WeightsMissing.
        """
        sizes = self.sizes if self._find_blob is not None else {name: self.sizes[name] for name in self.members}
        total, done = sum(sizes.values()), 0
        failures = []
        for name, size in sizes.items():
            try:
                if name in self.stripped:
                    self._check_blob(name, self._blob_chunks(name))
                else:
                    self._check_hash(self.members[name], self._chunks(self.members[name]))
            except EngineHashMismatch as error:
                failures.append(str(error))
            done += size
            if on_progress is not None:
                on_progress(done, total)
        if failures:
            raise EngineHashMismatch(
                f"{self.path}: {len(failures)} of {len(sizes)} members are damaged:\n  " + "\n  ".join(failures)
            )
        parse_canonical(self.read(PLAN), f"{self.path}: {PLAN}")
        return [MemberCheck(name, size, self._sha256(name)) for name, size in sizes.items()]

    def _sha256(self, name: str) -> str:
        return self.hash if name == MANIFEST else self.manifest["members"][name]["sha256"]

    def _member(self, name: str) -> Member:
        if name not in self.members:
            raise EngineFormatError(f"{self.path}: the engine has no member {name!r}")
        return self.members[name]

    def manifest_bytes(self) -> bytes:
        """The canonical JSON whose SHA-256 is `hash`."""
        return canonical_json(self.manifest)

    def copy(self, name: str, fd: int) -> None:
        """Appends the data of a member, unchecked, to a file; without copying where the file system can share them.

        Raises EngineFormatError, WeightsMissing, OSError.
        """
        if name in self.stripped:
            with open(self._blob(name), "rb") as file:
                _copy(file.fileno(), 0, self.stripped[name], fd)
        else:
            member = self._member(name)
            _copy(self._file.fileno(), member.data_offset, member.size, fd)

    def _check_loose(self) -> None:
        """Fills members, manifest and hash, or raises EngineFormatError, WeightsMissing."""
        size = os.fstat(self._file.fileno()).st_size
        _check_manifest_size(size)
        data = _read(self._file, 0, size, MANIFEST)
        self.members = MappingProxyType({})
        self.hash = hashlib.sha256(data).hexdigest()
        self._take_manifest(data)
        if PLAN not in self.stripped:
            raise EngineFormatError(f"member {PLAN} is missing")
        for name in self.stripped:
            if section(name) in (PLAN, "code/"):
                self._check_blob(name, self._blob_chunks(name))

    def _take_manifest(self, data: bytes) -> None:
        self.manifest = parse_canonical(data, MANIFEST)
        check_manifest(self.manifest)
        table = self.manifest["members"]
        self.stripped = {name: table[name]["size"] for name in table if name not in self.members}
        self.sizes = {name: member.size for name, member in self.members.items()} | self.stripped

    def _check_file(self) -> None:
        """Fills members, manifest and hash, or raises EngineFormatError."""
        in_file = _read_layout(self._file)
        listed = sorted(in_file, key=lambda member: DIRECTORY_ORDER.index(section(member.name)))
        self.members = MappingProxyType({member.name: member for member in listed})
        for name in (MANIFEST, PLAN):
            if name not in self.members:
                raise EngineFormatError(f"member {name} is missing")
        manifest = self.members[MANIFEST]
        _check_manifest_size(manifest.size)
        data = _read(self._file, manifest.data_offset, manifest.size, MANIFEST)
        self.hash = hashlib.sha256(data).hexdigest()
        self._check_hash(manifest, [data])  # the CRC: no other record tells the manifest's SHA-256
        self._take_manifest(data)
        check_members(self.manifest, self.members)
        for member in listed:
            if section(member.name) in (PLAN, "code/"):
                self._check_hash(member, self._chunks(member))

    def _blob(self, name: str) -> Path:
        """The file of a member that this one lacks; its size is right."""
        path = None if self._find_blob is None else self._find_blob(self._sha256(name))
        if path is None and not self.members:
            raise WeightsMissing(f"{self.path}: {name}, blob {self._sha256(name)}, is not in the store.\n"
                                 f"  Get it again: ingot engines pull URL {self.hash}")
        if path is None:
            where = "in the store" if self._find_blob is not None else "known without a store"
            raise WeightsMissing(f"{self.path} was written without its weights, and {name} is not {where}.\n"
                                 f"  Put them in again: ingot refit {self.path} --weights CHECKPOINT -o FILE")
        if (size := path.stat().st_size) != self.stripped[name]:
            raise EngineHashMismatch(f"{path} has {size} bytes, {name} of {self.path} has {self.stripped[name]}")
        return path

    def _blob_chunks(self, name: str) -> Iterator[bytes]:
        with open(self._blob(name), "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk

    def _check_blob(self, name: str, chunks: Iterable[bytes]) -> None:
        digest = hashlib.sha256()
        for chunk in chunks:
            digest.update(chunk)
        if digest.hexdigest() != self._sha256(name):
            raise EngineHashMismatch(f"{self._blob(name)}: data have SHA-256 {digest.hexdigest()}, expected "
                                     f"{self._sha256(name)}")

    def _chunks(self, member: Member) -> Iterator[bytes]:
        for offset in range(member.data_offset, member.end_offset, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, member.end_offset - offset)
            yield _read(self._file, offset, size, f"member {member.name}")

    def _check_hash(self, member: Member, chunks: Iterator[bytes] | list[bytes]) -> None:
        digest, crc = hashlib.sha256(), 0
        for chunk in chunks:
            digest.update(chunk)
            crc = zlib.crc32(chunk, crc)
        expected = self._sha256(member.name)
        if digest.hexdigest() != expected:
            raise EngineHashMismatch(
                f"member {member.name}: data have SHA-256 {digest.hexdigest()}, expected {expected}"
            )
        if crc != member.crc:
            raise EngineHashMismatch(f"member {member.name}: data have CRC-32 {crc:08x}, expected {member.crc:08x}")


def verify(path: str | os.PathLike[str]) -> list[MemberCheck]:
    """Opens the engine at `path` and checks every byte of it. Raises as EngineFile.open and EngineFile.verify do."""
    with EngineFile.open(path) as engine:
        return engine.verify()


def _open_file(path: str) -> io.FileIO:
    try:
        mode = os.stat(path).st_mode  # before open: opening a pipe would wait for its other end
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
            raise RequestError(f"{path} is {kind}; expected an engine file{build_first(path)}")
        return io.FileIO(path, "rb")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"cannot open the engine {path!r}: {reason}") from None


def _read(file: io.FileIO, offset: int, size: int, what: str) -> bytes:
    """Exactly `size` bytes at `offset`."""
    data = bytearray(size)
    _read_into(file, offset, memoryview(data), what)
    return bytes(data)


def _read_into(file: io.FileIO, offset: int, memory: memoryview, what: str) -> None:
    """As many bytes at `offset` as the memory has."""
    while memory.nbytes:
        try:
            count = os.preadv(file.fileno(), [memory], offset)
        except OSError as error:
            raise EngineFormatError(f"{what}: cannot read {memory.nbytes} bytes at {offset}: "
                                    f"{error.strerror}") from None
        if not count:
            raise EngineTruncated(f"{what}: the file ends at {offset}, {memory.nbytes} bytes early; it shrank while "
                                  "being read")
        offset, memory = offset + count, memory[count:]


def _copy(source: int, offset: int, size: int, target: int) -> None:
    """Appends `size` bytes at `offset` of one file to another."""
    end = offset + size
    try:
        while offset < end:
            copied = os.copy_file_range(source, target, end - offset, offset)
            if copied == 0:
                break
            offset += copied
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    while offset < end:  # between file systems that cannot
        data = os.pread(source, min(_CHUNK_BYTES, end - offset), offset)
        if not data:
            raise EngineTruncated(f"the file ends at {offset}, {end - offset} bytes early; it shrank while being read")
        offset += len(data)
        while data:
            data = data[os.write(target, data) :]


def _check_manifest_size(size: int) -> None:
    if size > MAX_MANIFEST_BYTES:
        raise EngineFormatError(f"{MANIFEST} has {size} bytes, at most {MAX_MANIFEST_BYTES} are allowed")


def _read_layout(file: io.FileIO) -> list[Member]:
    """The members in file order, once every byte that is no member's data has been checked."""
    file_size = os.fstat(file.fileno()).st_size
    end = _read(file, max(0, file_size - END_BYTES), min(file_size, END_BYTES), "end record")
    try:
        num_members, directory_offset, directory_size = parse_end_records(end, file_size)
    except NotAnEngine:
        raise _explain_end(file, file_size) from None
    data = _read(file, directory_offset, directory_size, "directory")
    members = parse_directory(data, num_members, directory_offset)
    for member in members:
        size = member.data_offset - member.header_offset
        header = _read(file, member.header_offset, size, f"header of {member.name}")
        expect_bytes(header, local_header(member), f"header of {member.name}", member.header_offset)
    return members


def _explain_end(file: io.FileIO, file_size: int) -> EngineFormatError:
    """Why a file does not end in the record that ends every engine."""
    first = _read(file, 0, min(file_size, len(FIRST_BYTES)), "first bytes")
    if first != FIRST_BYTES:
        if FIRST_BYTES.startswith(first):
            return EngineTruncated(f"{file_size} bytes: shorter than the first header of an engine")
        return NotAnEngine(f"not an engine: the {file_size} bytes start {first.hex()}, expected {FIRST_BYTES.hex()}"
                           f"{build_first(str(file.name), first)}")
    searched = min(file_size, _JUNK_SEARCH_BYTES)
    tail = _read(file, file_size - searched, searched, "end record")
    found = tail.rfind(COMMENT_PREFIX)
    if found >= 0 and found + len(COMMENT_PREFIX) + 4 < searched:
        junk = searched - found - len(COMMENT_PREFIX) - 4
        return EngineTruncated(f"{junk} bytes follow the end record, which must be the last thing in the file")
    return EngineTruncated(
        f"no end record in the last {END_BYTES} of {file_size} bytes: the file was cut off or its end is damaged;\n"
        "  copy or build it again."
    )
