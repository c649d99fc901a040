"""Small engines that share weights, as files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ingot.runtime.engine_file import EngineFile
from ingot.runtime.store.lock_file import Move, move_of
from ingot.runtime.store.store import Store
from tests.runtime.engine_sample import SMALL, assemble, manifest_of, weight_members

SHARED = b"shared" * 3000


def engine(path: Path, *own: bytes, **fields: Any) -> Path:
    """An engine of the shared weight and its own; `fields` replace some of the manifest."""
    files = weight_members([SHARED, *own]) | SMALL
    path.write_bytes(assemble(files, manifest_of(files, **fields)))
    return path


def hash_of(path: Path) -> str:
    with EngineFile.open(path) as file:
        return file.hash


def add(store: Store, path: Path, name: str | None = None) -> str:
    with EngineFile.open(path) as file:
        store.add(file)
        if name is not None:
            store.lock.move(name, move(file))
        return file.hash


def move(file: EngineFile, action: str = "add", why: str = "") -> Move:
    return move_of(file.manifest, file.hash, action, why)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
