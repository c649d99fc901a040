"""A folder of entries, addressed by the SHA-256 of everything that they were made from.

    FOLDER/<kind>/<first two digits>/<key>      magic, SHA-256 of the data, the data

An entry appears by one rename and is never changed, so that builds may run side by side and be killed at any moment:
two that make the same entry write the same bytes, and what a killed one leaves is a hidden file that a later trim
removes.
An entry is checked when it is read; a damaged one is removed and made again. The time of last use is the file's own
modification time. A cache that cannot be written is no reason for a build to fail.
"""
from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ingot.runtime.errors import RequestError
from ingot.runtime.folders import cache_folder

KINDS = {
    "model": "configurations and tokenizers, as an engine holds them",
    "graph": "imported graphs",
    "digests": "SHA-256 of each tensor of a checkpoint file",
    "object": "compiled C files",
    "code": "linked code of CPU engines",
    "calibration": "second moments of the inputs of layers",
    "weights": "packed weights",
    "kernels": "compiled GPU kernels",
}
DEFAULT_LIMIT_BYTES = 20_000_000_000
LIMIT_VARIABLE = "INGOT_CACHE_LIMIT"
_MAGIC = b"ingot cache 1\n"
_HEADER_BYTES = len(_MAGIC) + 32
_ABANDONED_S = 3600
"""A hidden file of that age belongs to no living build: writing one takes seconds."""


@dataclass(frozen=True)
class Entry:
    """used: time of last use, seconds since 1970."""

    path: Path
    kind: str
    size_bytes: int
    used: float


@dataclass
class Uses:
    """How many entries of a kind a build found, and how many it had to make."""

    found: int = 0
    made: int = 0


class BuildCache:
    def __init__(self, folder: Path | None = None, limit_bytes: int | None = None) -> None:
        """folder: default is the user's. Raises RequestError for a malformed $INGOT_CACHE_LIMIT."""
        self.folder = folder or cache_folder()
        self.limit_bytes = limit_from_environment() if limit_bytes is None else limit_bytes
        self.uses: dict[str, Uses] = {}
        self._written_bytes = 0

    def get(self, kind: str, key: str) -> bytes | None:
        """The data of an entry, whole and checked; None if there is none."""
        uses, path = self.uses.setdefault(kind, Uses()), self._path(kind, key)
        data = _read(path)
        if data is None:
            uses.made += 1
            return None
        uses.found += 1
        with contextlib.suppress(OSError):
            os.utime(path)
        return data

    def put(self, kind: str, key: str, data: bytes | memoryview) -> None:
        """Adds an entry, or replaces it by the same bytes. One that is too large for the cache is left out."""
        size = len(data) + _HEADER_BYTES
        if size > self.limit_bytes // 4:
            return
        path = self._path(kind, key)
        temporary = path.with_name(f".{key}.{os.getpid()}-{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with open(temporary, "xb") as file:
                    file.write(_MAGIC + hashlib.sha256(data).digest())
                    file.write(data)
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError:
            return
        self._written_bytes += size
        if self._written_bytes > self.limit_bytes // 8:
            self.trim()

    def entries(self) -> list[Entry]:
        """Everything that is there now, the longest unused first."""
        found = []
        for kind in KINDS:
            for path in self._files(kind):
                with contextlib.suppress(OSError):  # another build may remove it meanwhile
                    status = path.stat()
                    found.append(Entry(path, kind, _size(path), status.st_mtime))
        return sorted(found, key=lambda entry: entry.used)

    def trim(self, limit_bytes: int | None = None) -> int:
        """Removes the longest unused entries until the rest fit the limit, and what killed builds have left.

        Returns the bytes removed.
        """
        limit = self.limit_bytes if limit_bytes is None else limit_bytes
        self._written_bytes = 0
        for kind in KINDS:
            for path in self.folder.glob(f"{kind}/??/.*"):
                with contextlib.suppress(OSError):
                    if time.time() - path.stat().st_mtime > _ABANDONED_S:
                        _remove(path)
        entries = self.entries()
        total, removed = sum(entry.size_bytes for entry in entries), 0
        for entry in entries:
            if total - removed <= limit:
                break
            _remove(entry.path)
            removed += entry.size_bytes
        return removed

    def clear(self, kind: str | None = None) -> int:
        """Removes the entries of one kind, or all. Returns the bytes removed."""
        removed = 0
        for entry in self.entries():
            if kind in (None, entry.kind):
                _remove(entry.path)
                removed += entry.size_bytes
        return removed

    def _path(self, kind: str, key: str) -> Path:
        assert kind in KINDS, kind
        return self.folder / kind / key[:2] / key

    def _files(self, kind: str) -> Iterator[Path]:
        """An entry is a file, or for GPU kernels a small folder."""
        return (path for path in self.folder.glob(f"{kind}/??/*") if not path.name.startswith("."))


def limit_from_environment() -> int:
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    if not text:
        return DEFAULT_LIMIT_BYTES
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)B?", text)
    if match is None:
        raise RequestError(f"${LIMIT_VARIABLE} is {text!r}; expected a size such as 500MB or 20GB")
    return int(float(match[1]) * 1000 ** " kMGT".index(match[2] or " "))


def _read(path: Path) -> bytes | None:
    try:
        with open(path, "rb") as file:
            header, data = file.read(_HEADER_BYTES), file.read()
    except OSError:
        return None
    if header == _MAGIC + hashlib.sha256(data).digest():
        return data
    _remove(path)  # cut short by a crash of the machine, or damaged
    return None


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(file.stat().st_size for file in path.iterdir())
    return path.stat().st_size


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir():
            for file in path.iterdir():
                file.unlink(missing_ok=True)
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
