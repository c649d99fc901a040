"""Writes an engine of the store as an engine file, to be given to somebody who has no store."""

from __future__ import annotations

import hashlib
import os
import zlib
from pathlib import Path

from ..engine_file import EngineFile
from ..engine_format import (
    FILE_ORDER,
    MANIFEST,
    EngineHashMismatch,
    Member,
    directory,
    end_records,
    local_header,
    section,
)
from ..errors import RequestError, WorkFailed
from .blobs import sync_folder


def export(engine: EngineFile, path: Path, overwrite: bool = False) -> None:
    """Writes the whole engine, its weights too, wherever they lie; every hash is checked on the way.

    The file has the hash of the engine. Weights stand in the order of their names, not in that in which they were
    built. Raises RequestError if the file exists, EngineHashMismatch, WeightsMissing, WorkFailed.
    """
    if path.exists() and not overwrite:
        raise RequestError(f"{path} exists; pass --force to replace it or choose another path")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        try:
            with open(temporary, "xb", buffering=0) as file:
                _write(engine, file.fileno())
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise WorkFailed(f"cannot write {path}: {error.strerror}") from None


def _write(engine: EngineFile, fd: int) -> None:
    members: list[Member] = []
    offset = 0
    table = engine.manifest["members"]
    for name in sorted(table, key=lambda name: (FILE_ORDER.index(section(name)), name)):
        data = engine.map(name).data
        if (found := hashlib.sha256(data).hexdigest()) != table[name]["sha256"]:
            raise EngineHashMismatch(f"{engine.path}: member {name} has SHA-256 {found}, expected "
                                     f"{table[name]['sha256']}")
        members.append(Member(name, data.nbytes, zlib.crc32(data), offset))
        _append(fd, local_header(members[-1]))
        engine.copy(name, fd)
        offset = members[-1].end_offset
    manifest = engine.manifest_bytes()
    members.append(Member(MANIFEST, len(manifest), zlib.crc32(manifest), offset))
    entries = directory(members)
    _append(fd, local_header(members[-1]) + manifest + entries
            + end_records(len(members), members[-1].end_offset, len(entries)))


def _append(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
