"""Finds the engine that a user names: a file, a name of the store, or the start of a hash."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..engine_file import EngineFile
from ..errors import RequestError
from .store import STORE_VARIABLE, NotInStore, Store

SUFFIX = ".engine"


@dataclass(frozen=True)
class Located:
    """An engine that was found: `hash` in `store`, or the file `path`."""

    store: Store
    hash: str | None
    path: Path | None

    @property
    def attestations(self) -> Path:
        """The file of signed statements about it, which may not exist."""
        if self.hash is not None:
            return self.store.attestations_path(self.hash)
        assert self.path is not None
        return self.path.with_name(f"{self.path.name}.intoto.jsonl")

    def open(self) -> EngineFile:
        """Raises RequestError, EngineFormatError. Weights that a file lacks are looked for in the store."""
        if self.hash is not None:
            return self.store.open(self.hash)
        assert self.path is not None
        return EngineFile.open(self.path, self.store.find_blob if self.store.blobs.folder.is_dir() else None)


def locate(reference: str | os.PathLike[str], store: str | os.PathLike[str] | None = None) -> Located:
    """reference: a path (all that is no plain string, has a / or ends with .engine), else a name, else the start of a
    hash, else a path. store: its folder; default as of Store.

    Raises RequestError for what is none of these.
    """
    the_store = Store(store)
    if not isinstance(reference, str) or os.sep in reference or reference.endswith(SUFFIX):
        return Located(the_store, None, Path(reference))
    try:
        return Located(the_store, the_store.resolve(reference), None)
    except NotInStore:
        if os.path.lexists(reference):
            return Located(the_store, None, Path(reference))
        known = ", ".join(sorted(the_store.lock.now())) or "none"
        raise RequestError(
            f"{reference!r} is no engine file here, and neither a name nor the start of a hash in the store "
            f"{the_store.folder}\n  (${STORE_VARIABLE} or --store choose another). Names: {known}") from None


def open_engine(reference: str | os.PathLike[str], store: str | os.PathLike[str] | None = None) -> EngineFile:
    """The engine, opened and checked. Raises RequestError, EngineFormatError."""
    return locate(reference, store).open()
