"""The configuration that a GGUF file's metadata describes."""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def read_gguf_config(path: Path) -> PretrainedConfig:
    """Raises CheckpointError for an architecture that transformers does not read from GGUF."""
    from transformers import AutoConfig
    try:
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except Exception as error:
        raise CheckpointError(f"{path}: transformers cannot make a configuration from this file's metadata: "
                              f"{error}") from error
