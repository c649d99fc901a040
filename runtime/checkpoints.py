"""Checkpoints that are named where an engine is expected: what is to be done first."""

from __future__ import annotations

import os


def build_first(path: str, first_bytes: bytes = b"") -> str:
    """The end of a message about what is no engine: how to build one of it, if it is a checkpoint, else nothing.

    first_bytes: of a file; a folder is looked into.
    """
    if first_bytes.startswith(b"GGUF") or os.path.isfile(os.path.join(path, "config.json")):
        return f"\n  It is a checkpoint; build an engine of it: ingot build {path} --target cpu --precision w4a8"
    return ""
