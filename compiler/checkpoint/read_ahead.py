"""Has the system read a checkpoint while Python is still being loaded. Imports nothing that takes time."""
from __future__ import annotations

import os
import threading
from pathlib import Path

from ingot.runtime.host import available_memory_bytes

_SUFFIXES = (".safetensors", ".gguf")
_STEP_BYTES = 256 << 10
"""The system cuts longer requests short."""

_MEMORY_SHARE = 4
"""Files that would take more than this part of the memory that is free are left alone: the first would be gone before
it is used."""


def read_ahead(model: str) -> threading.Thread | None:
    """Begins with it, in a thread of its own; None if there is nothing to be read here, or too much of it.

    model: checkpoint folder or GGUF file; whatever is wrong with it, those who open it tell.
    """
    path = Path(model)
    files = [path] if path.suffix in _SUFFIXES else sorted(
        file for suffix in _SUFFIXES for file in path.glob(f"*{suffix}"))
    try:
        size = sum(file.stat().st_size for file in files)
    except OSError:
        return None
    if not size or size > available_memory_bytes() // _MEMORY_SHARE or not hasattr(os, "posix_fadvise"):
        return None
    thread = threading.Thread(target=_advise, args=(files,), name="read ahead", daemon=True)
    thread.start()
    return thread


def _advise(files: list[Path]) -> None:
    for file in files:
        try:
            fd = os.open(file, os.O_RDONLY)
        except OSError:
            return
        try:
            for begin in range(0, os.fstat(fd).st_size, _STEP_BYTES):
                os.posix_fadvise(fd, begin, _STEP_BYTES, os.POSIX_FADV_WILLNEED)
        except OSError:  # a file system without it
            return
        finally:
            os.close(fd)
