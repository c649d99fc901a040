"""The engine store: a folder of engines that share what they have in common.

    STORE/engines.lock                        names, see lock_file.py; the only part that belongs into git
    STORE/manifests/<engine hash>.json        an engine is in the store if its manifest is
    STORE/blobs/…                             every member of every engine, once, see blobs.py
    STORE/attestations/<engine hash>.intoto.jsonl   signed statements about it, see attestation.py

An engine is opened where it lies: its members are mapped from their blobs, nothing is unpacked or copied. Its manifest
comes last when it is added and goes first when it is removed, so that an engine in the store is always whole, whatever
is killed at whatever moment.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..engine_file import EngineFile
from ..engine_format import EngineFormatError, EngineHashMismatch
from ..errors import RequestError
from ..manifest import check_manifest, parse_canonical
from . import attestation
from .blobs import BlobFolder, alone, hash_of, sync_folder, write_atomic
from .lock_file import MIN_PREFIX, LockFile

STORE_VARIABLE = "INGOT_STORE"
OnBytes = Callable[[int], None]
"""Called with the number of bytes that have been worked off."""
_MANIFEST_FILE = re.compile(r"([0-9a-f]{64})\.json")


class NotInStore(RequestError):
    """No engine of that hash is in the store."""


@dataclass(frozen=True)
class Added:
    """What adding an engine took: how many of its blobs, and of their bytes, were new."""

    hash: str
    num_blobs: int
    num_new_blobs: int
    size_bytes: int
    new_bytes: int


@dataclass(frozen=True)
class Garbage:
    """What no name needs. partial: files of broken transfers; size_bytes: of all."""

    engines: list[str]
    blobs: list[str]
    partial: list[Path]
    size_bytes: int


@dataclass
class StoreCheck:
    """What a check of the whole store found.

    damaged  blob -> the engines that have it
    missing  likewise
    broken   engine -> what is wrong with its manifest
    """

    num_engines: int = 0
    num_blobs: int = 0
    size_bytes: int = 0
    damaged: dict[str, list[str]] = field(default_factory=dict)
    missing: dict[str, list[str]] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return not (self.damaged or self.missing or self.broken)


class Store:
    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        """folder: default $INGOT_STORE, else engines/ in the working folder. It may not exist yet."""
        self.folder = Path(folder or os.environ.get(STORE_VARIABLE) or "engines")
        self.blobs = BlobFolder(self.folder / "blobs")
        self.lock = LockFile(self.folder / "engines.lock")

    def find_blob(self, sha256: str) -> Path | None:
        """For EngineFile.open: where a stripped engine's weights are."""
        return self.blobs.find(sha256)

    def manifest_path(self, hash: str) -> Path:
        return self.folder / "manifests" / f"{hash}.json"

    def attestations_path(self, hash: str) -> Path:
        return self.folder / "attestations" / f"{hash}.intoto.jsonl"

    def has(self, hash: str) -> bool:
        return self.manifest_path(hash).is_file()

    def engines(self) -> list[str]:
        """The hashes of all engines in the store."""
        folder = self.folder / "manifests"
        found = map(_MANIFEST_FILE.fullmatch, sorted(os.listdir(folder)) if folder.is_dir() else [])
        return [match[1] for match in found if match]

    def open(self, hash: str) -> EngineFile:
        """Raises NotInStore, EngineFormatError."""
        self._require(hash)
        engine = EngineFile.open_loose(self.manifest_path(hash), self.find_blob)
        if engine.hash != hash:
            engine.close()
            raise EngineHashMismatch(f"{engine.path}: its content has hash {engine.hash}")
        return engine

    def manifest(self, hash: str) -> dict[str, Any]:
        """Raises NotInStore, EngineFormatError."""
        self._require(hash)
        path = self.manifest_path(hash)
        data = path.read_bytes()
        if (found := hashlib.sha256(data).hexdigest()) != hash:
            raise EngineHashMismatch(f"{path}: its content has hash {found}")
        return read_manifest(data, str(path))

    def full_hash(self, prefix: str) -> str:
        """The one engine whose hash starts so. Raises NotInStore, RequestError if there are several."""
        found = [hash for hash in self.engines() if hash.startswith(prefix)]
        if len(found) > 1:
            raise RequestError(f"{prefix} is the start of {len(found)} hashes in {self.folder}; give more digits:\n  "
                               + "\n  ".join(found))
        if not found or len(prefix) < MIN_PREFIX:
            raise NotInStore(f"no engine in {self.folder} has a hash that starts {prefix!r} (at least {MIN_PREFIX} "
                             "digits)\n  See what there is: ingot engines list --all")
        return found[0]

    def resolve(self, reference: str) -> str:
        """The hash that a name or the start of a hash stands for. Raises LockError, RequestError."""
        move = self.lock.now().get(reference)
        return move.hash if move is not None else self.full_hash(reference)

    def add(self, engine: EngineFile, on_bytes: OnBytes = lambda done: None) -> Added:
        """Copies an open engine into the store. What is there already, whichever engine brought it, is not copied.

        Raises EngineFormatError if a member is not what the manifest says, WeightsMissing, WorkFailed.
        """
        table = engine.manifest["members"]
        num_new = new_bytes = 0
        with self.blobs.adding():
            for name, entry in table.items():
                with self.blobs.receive(entry["sha256"], entry["size"]) as file:
                    if file is not None:
                        file.seek(0)
                        file.truncate()
                        engine.copy(name, file.fileno())
                        num_new, new_bytes = num_new + 1, new_bytes + entry["size"]
                on_bytes(entry["size"])
            self.publish(engine.hash, engine.manifest_bytes())
        return Added(engine.hash, len(table), num_new, sum(entry["size"] for entry in table.values()), new_bytes)

    def publish(self, hash: str, manifest: bytes) -> None:
        """All members of the engine are there: now it is one of the store's. Only within `blobs.adding()`."""
        self.blobs.sync()
        path = self.manifest_path(hash)
        with alone(path.with_name(".lock")):  # several may publish the same engine
            if not path.is_file() or path.read_bytes() != manifest:
                write_atomic(path, manifest)

    def attestations(self, hash: str) -> list[bytes]:
        """The signed statements about an engine, see attestation.py."""
        return attestation.read(self.attestations_path(hash))

    def add_attestations(self, hash: str, envelopes: Iterable[bytes]) -> int:
        """Adds those that are new; how many that were."""
        path = self.attestations_path(hash)
        with alone(path.with_name(".lock")):
            return attestation.add(path, envelopes)

    def garbage(self, keep_history: int | None = None) -> Garbage:
        """What no name means now or has meant, in its last `keep_history` moves (None: ever). Raises LockError."""
        named = self.lock.named(keep_history)
        engines = [hash for hash in self.engines() if hash not in named]
        needed = {sha256 for hash in self.engines() if hash in named for sha256 in _blobs_of(self.manifest(hash))}
        blobs = [sha256 for sha256 in self.blobs if sha256 not in needed]
        partial = self.blobs.partial()
        paths = [*map(self.manifest_path, engines), *map(self.blobs.path, blobs), *partial]
        return Garbage(engines, blobs, partial, sum(path.stat().st_size for path in paths))

    def collect_garbage(self, keep_history: int | None = None) -> Garbage:
        """Removes it, and tells what it was. Raises LockError, StoreBusy."""
        with self.blobs.removing():
            garbage = self.garbage(keep_history)
            for hash in garbage.engines:
                self.manifest_path(hash).unlink()
                self.attestations_path(hash).unlink(missing_ok=True)
            if garbage.engines:
                sync_folder(self.folder / "manifests")
            for sha256 in garbage.blobs:
                self.blobs.remove(sha256)
            for path in garbage.partial:
                path.unlink()
        return garbage

    def verify(self, hashes: Iterable[str] | None = None, on_bytes: OnBytes = lambda done: None) -> StoreCheck:
        """Reads every byte of the engines (default: of everything in the store)."""
        check, users = StoreCheck(), dict[str, list[str]]()
        sizes: dict[str, int] = {}
        for hash in self.engines() if hashes is None else hashes:
            check.num_engines += 1
            try:
                for entry in self.manifest(hash)["members"].values():
                    users.setdefault(entry["sha256"], []).append(hash)
                    sizes[entry["sha256"]] = entry["size"]
            except EngineFormatError as error:
                check.broken[hash] = str(error)
        for sha256 in sorted({*users, *(self.blobs if hashes is None else ())}):
            path = self.blobs.find(sha256)
            if path is None:
                check.missing[sha256] = users[sha256]
                continue
            with open(path, "rb", buffering=0) as file:
                size = path.stat().st_size
                if hash_of(file) != sha256 or size != sizes.get(sha256, size):
                    check.damaged[sha256] = users.get(sha256, [])
            check.num_blobs, check.size_bytes = check.num_blobs + 1, check.size_bytes + size
            on_bytes(size)
        return check

    def _require(self, hash: str) -> None:
        if not self.has(hash):
            raise NotInStore(f"engine {hash} is not in {self.folder}\n"
                             f"  Get it: ingot engines pull URL {hash}")


def read_manifest(data: bytes, what: str) -> dict[str, Any]:
    """Raises EngineFormatError."""
    manifest = parse_canonical(data, what)
    check_manifest(manifest)
    return manifest


def _blobs_of(manifest: dict[str, Any]) -> list[str]:
    return [entry["sha256"] for entry in manifest["members"].values()]
