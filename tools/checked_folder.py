"""Folders of a cache that appear whole and checked, or not at all.

A new folder is filled under a hidden name beside its final one, compared with pinned SHA-256 sums, stamped with a list
of its files, and renamed. Whoever finds the stamp finds everything that the stamp lists.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ingot.runtime.errors import IngotError, WorkFailed

STAMP = "stamp.json"


class DigestMismatch(WorkFailed):
    """A file is not the one that was pinned or recorded."""


def is_ready(folder: Path, pinned: Mapping[str, str]) -> bool:
    """True if the stamp agrees with the pinned SHA-256 sums and with the sizes of the files."""
    files = _read_stamp(folder)
    return (
        files is not None
        and all(files.get(name, {}).get("sha256") == digest for name, digest in pinned.items())
        and all(_size(folder / name) == entry["size_bytes"] for name, entry in files.items())
    )


def verify(folder: Path) -> int:
    """Reads every file that the stamp lists; returns the number of bytes. Raises DigestMismatch."""
    files = _read_stamp(folder) or {}
    recorded = {name: entry["sha256"] for name, entry in files.items()}
    _check_digests(folder, folder, recorded, f"Delete {folder} and run again.")
    return sum(entry["size_bytes"] for entry in files.values())


@contextlib.contextmanager
def new_folder(final: Path, pinned: Mapping[str, str], facts: Mapping[str, Any], advice: str) -> Iterator[Path]:
    """Yields an empty folder to fill. It becomes `final` if it holds what is `pinned`; on any failure it goes away.

    final   replaced if it has a stamp (damaged, or made by an older tool), else respected: WorkFailed
    pinned  file name → SHA-256 in hex; the stamp also lists all the other files, as they are
    facts   written into the stamp
    advice  the next step, for the message of a DigestMismatch
    Call under `lock`: what an interrupted process left under the hidden name is removed first.
    """
    if final.exists() and _read_stamp(final) is None:
        raise WorkFailed(f"{final} is in the way: it was not made by this tool.\n  Move it elsewhere and run again.")
    hidden = f".{final.name}-making-"
    for leftover in final.parent.glob(f"{hidden}*"):
        shutil.rmtree(leftover)
    folder = Path(tempfile.mkdtemp(prefix=hidden, dir=final.parent))
    try:
        yield folder
        found = _check_digests(folder, final, pinned, advice)
        files = {}
        for path in sorted(folder.iterdir()):
            path.chmod(0o644)  # some writers leave 0600
            files[path.name] = {"size_bytes": _size(path), "sha256": found.get(path.name) or _digest(path)}
        (folder / STAMP).write_text(json.dumps({"files": files, **facts}, indent=1) + "\n")
        folder.chmod(0o755)
        if final.exists():
            shutil.rmtree(final)
        folder.rename(final)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def lock(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """One maker at a time; the system drops the lock when its process ends, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is at work here; waiting for it ({path})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turns what the system says about the disk under `folder` into WorkFailed.

    safetensors wraps the system's error in a class of its own and keeps only the text, so the text is what we ask.
    """
    try:
        yield
    except IngotError:
        raise
    except Exception as error:
        if isinstance(error, OSError) or os.strerror(errno.ENOSPC) in str(error):
            raise WorkFailed(
                f"Cannot write under {folder}: {error}.\n"
                "  Nothing half-made was kept. Make room or get the right to write there, or name another folder."
            ) from error
        raise


def _read_stamp(folder: Path) -> dict[str, dict[str, Any]] | None:
    try:
        files: dict[str, dict[str, Any]] = json.loads((folder / STAMP).read_text())["files"]
        return files
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_digests(folder: Path, final: Path, expected: Mapping[str, str], advice: str) -> dict[str, str]:
    """SHA-256 of the files in `folder` named by `expected`; the message speaks of them as they lie in `final`."""
    found = {name: _digest(folder / name) for name in expected if (folder / name).is_file()}
    for name, digest in expected.items():
        if found.get(name) != digest:
            raise DigestMismatch(
                f"{final / name} is not the file it should be.\n"
                f"  expected SHA-256 {digest}\n"
                f"  got      SHA-256 {found.get(name, '(no such file)')}\n"
                f"  {advice}"
            )
    return found
