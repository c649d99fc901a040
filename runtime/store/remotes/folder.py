"""A remote that is a folder: of this machine, or of anything that fsspec reaches (s3://, gs://, az://, sftp://, …).

It looks like a store without names, and names/NAME holds the hash of what the name means. A file is written under its
own name, for object stores have no cheap rename; a blob that is there in its size counts as there, and what was broken
off has another size or, on an object store, never appears.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from ...errors import RequestError, WorkFailed
from ..blobs import write_atomic
from .remote import Broken

_CHUNK_BYTES = 4 << 20
_HASH = re.compile(r"[0-9a-f]{64}")


class Files(Protocol):
    """Paths are relative to the remote. All raise OSError; FileNotFoundError where there is nothing to read."""

    def size(self, path: str) -> int | None: ...
    def read(self, path: str) -> bytes: ...
    def chunks(self, path: str, offset: int) -> Iterator[bytes]: ...
    def write(self, path: str, data: bytes) -> None: ...
    def put(self, path: str, source: Path) -> None: ...


class LocalFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def size(self, path: str) -> int | None:
        try:
            return (self._folder / path).stat().st_size
        except FileNotFoundError:
            return None

    def read(self, path: str) -> bytes:
        return (self._folder / path).read_bytes()

    def chunks(self, path: str, offset: int) -> Iterator[bytes]:
        with open(self._folder / path, "rb") as file:
            file.seek(offset)
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk

    def write(self, path: str, data: bytes) -> None:
        write_atomic(self._folder / path, data)

    def put(self, path: str, source: Path) -> None:
        target = self._folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.partial")
        with open(source, "rb") as read, open(temporary, "wb") as write:
            while chunk := read.read(_CHUNK_BYTES):
                write.write(chunk)
            write.flush()
            os.fsync(write.fileno())
        os.replace(temporary, target)


class FsspecFiles:
    def __init__(self, url: str) -> None:
        """Raises RequestError if fsspec, or what it needs for the URL, is not installed."""
        try:
            import fsspec
        except ModuleNotFoundError:
            raise RequestError(f"{url} needs the package fsspec, which is not installed here.\n"
                               "  Install it: pip install 'ingot-llm[store]'") from None
        try:
            self._files, self._folder = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:  # a package for this protocol is missing; an unknown protocol
            raise RequestError(f"{url}: {error}") from None

    def _path(self, path: str) -> str:
        return f"{self._folder.rstrip('/')}/{path}"

    def size(self, path: str) -> int | None:
        try:
            size: int = self._files.info(self._path(path))["size"]
        except FileNotFoundError:
            return None
        return size

    def read(self, path: str) -> bytes:
        data: bytes = self._files.cat_file(self._path(path))
        return data

    def chunks(self, path: str, offset: int) -> Iterator[bytes]:
        with self._files.open(self._path(path), "rb", block_size=_CHUNK_BYTES) as file:
            file.seek(offset)
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk

    def write(self, path: str, data: bytes) -> None:
        self._make_parent(path)
        self._files.pipe_file(self._path(path), data)

    def put(self, path: str, source: Path) -> None:
        self._make_parent(path)
        self._files.put_file(str(source), self._path(path))
        self._files.invalidate_cache()

    def _make_parent(self, path: str) -> None:
        self._files.makedirs(self._path(path).rpartition("/")[0], exist_ok=True)


def files_of(url: str) -> Files:
    """Raises RequestError for a single word: a name of the store, where a URL is meant, would become a folder."""
    if os.sep not in url and not os.path.isdir(url):
        raise RequestError(f"{url!r} is no place for engines: expected oci://HOST/REPOSITORY, a URL such as s3://…, or "
                           f"a folder, written with a slash: ./{url}")
    return FsspecFiles(url) if "://" in url else LocalFiles(Path(url))


class FolderRemote:
    def __init__(self, url: str, files: Files) -> None:
        self.url = url
        self._files = files

    def resolve(self, reference: str) -> str | None:
        if _HASH.fullmatch(reference):
            return reference if self._try("look at", reference, self._files.size, _manifest(reference)) else None
        data = self._read(f"names/{reference}")
        hash = data.decode("ascii", "replace").strip() if data is not None else None
        if hash is not None and not _HASH.fullmatch(hash):
            raise WorkFailed(f"{self.url}: names/{reference} holds {hash[:80]!r}, which is no hash")
        return hash

    def manifest(self, hash: str) -> bytes:
        data = self._read(_manifest(hash))
        if data is None:
            raise WorkFailed(f"{self.url} has no engine {hash}")
        return data

    def attestations(self, hash: str) -> list[bytes]:
        return [line for line in (self._read(_attestations(hash)) or b"").split(b"\n") if line]

    def has(self, sha256: str, size: int) -> bool:
        return bool(self._try("look at", sha256, self._files.size, _blob(sha256)) == size)

    def upload(self, sha256: str, path: Path, size: int) -> int:
        self._try("write", sha256, self._files.put, _blob(sha256), path)
        return 0

    def download(self, sha256: str, size: int, offset: int) -> Iterator[bytes]:
        try:
            yield from self._files.chunks(_blob(sha256), offset)
        except FileNotFoundError:
            raise WorkFailed(f"{self.url} has no blob {sha256}") from None
        except OSError as error:
            raise Broken(str(error)) from None

    def publish(self, hash: str, manifest: bytes, attestations: list[bytes]) -> None:
        if attestations:
            lines = b"".join(line + b"\n" for line in attestations)
            self._try("write", hash, self._files.write, _attestations(hash), lines)
        self._try("write", hash, self._files.write, _manifest(hash), manifest)

    def set_name(self, name: str, hash: str) -> None:
        self._try("write", name, self._files.write, f"names/{name}", f"{hash}\n".encode())

    def _read(self, path: str) -> bytes | None:
        try:
            data: bytes = self._try("read", path, self._files.read, path)
        except FileNotFoundError:
            return None
        return data

    def _try(self, verb: str, what: str, action: Any, *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise WorkFailed(f"{self.url}: cannot {verb} {what}: {error.strerror or error}") from None


def _blob(sha256: str) -> str:
    return f"blobs/sha256/{sha256[:2]}/{sha256}"


def _manifest(hash: str) -> str:
    return f"manifests/{hash}.json"


def _attestations(hash: str) -> str:
    return f"attestations/{hash}.intoto.jsonl"
