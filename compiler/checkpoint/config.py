"""The model's configuration, through transformers."""
from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def read_config(path: Path) -> PretrainedConfig:
    """config.json of a folder, or the metadata of a GGUF file."""
    if path.is_file():
        from .gguf_config import read_gguf_config
        return read_gguf_config(path)
    return read_folder_config(path)


def read_folder_config(folder: Path) -> PretrainedConfig:
    """Raises CheckpointError for a missing or malformed file and for an architecture that transformers lacks."""
    file = folder / "config.json"
    if not file.exists():
        raise CheckpointError(f"{folder} has no config.json. A checkpoint is the folder that save_pretrained writes: "
                              "config.json, model.safetensors, the tokenizer's files")
    try:
        entries = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    import transformers
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    model_type = entries.get("model_type") if isinstance(entries, dict) else None
    if model_type not in CONFIG_MAPPING:
        raise CheckpointError(f"{file}: unknown architecture {model_type!r}; transformers {transformers.__version__} "
                              f"knows {len(CONFIG_MAPPING)}" + _similar(str(model_type), list(CONFIG_MAPPING)))
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise CheckpointError(f"{file}: transformers cannot read this configuration: {error}") from error


def _similar(name: str, known: list[str]) -> str:
    import difflib
    close = difflib.get_close_matches(name, known, n=3)
    return f", of which {', '.join(close)} {'is' if len(close) == 1 else 'are'} spelled alike" if close else ""
