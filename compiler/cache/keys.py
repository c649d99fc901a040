"""Keys of the build cache: everything that takes part, in canonical JSON, hashed."""
from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from ingot.runtime.manifest import canonical_json

ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds compiler/, plugins/ and runtime/, or in an installed package the same folders."""


def key(**parts: Any) -> str:
    """SHA-256 over named parts: what JSON can tell."""
    return hashlib.sha256(canonical_json(parts)).hexdigest()


def library_versions(*packages: str) -> dict[str, str]:
    """Package -> version without its local part, so that builds of one release for different devices count as one."""
    from importlib.metadata import PackageNotFoundError, version  # reads much that a refit has no use for

    found = {}
    for package in packages:
        try:
            found[package] = version(package).partition("+")[0]
        except PackageNotFoundError:
            found[package] = ""
    return found


@cache
def source_digest(*places: str) -> str:
    """SHA-256 over Ingot's own Python sources: files, or folders with all below them, as "compiler/importer".

    A change of a comment counts: to be asked twice costs seconds, to be told something old costs an engine.
    """
    total = hashlib.sha256()
    for place in places:
        path = ROOT / place
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        assert files, f"no sources at {place}"
        for file in files:
            total.update(f"{file.relative_to(ROOT)}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()
