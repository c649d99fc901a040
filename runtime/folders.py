"""Where Ingot keeps what can be made again: the user's cache folder."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """$INGOT_CACHE, else $XDG_CACHE_HOME/ingot, else ~/.cache/ingot. It may not exist yet."""
    if named := os.environ.get("INGOT_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ingot"
