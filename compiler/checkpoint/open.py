"""Finds out what kind of checkpoint a path is."""
from __future__ import annotations

import re
from pathlib import Path

from ingot.runtime.errors import WorkFailed

from .checkpoint import Checkpoint, TensorStore
from .errors import CheckpointError
from .safetensors_store import INDEX, SINGLE, SafetensorsStore


def open_checkpoint(source: str | Path) -> Checkpoint:
    """source: a folder with safetensors files, a .gguf file or a folder with one, or the name of a model on the hub.

    Raises CheckpointError for what is none of these, WorkFailed where the hub cannot be reached.
    """
    path = Path(source)
    if path.is_dir():
        return _open_folder(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path} is a file; a checkpoint is a folder or a .gguf file")
        return Checkpoint(path, _gguf_store(path))
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(source)):  # what begins with a dot is a path
        return _open_folder(_download(str(source)))
    raise CheckpointError(f"{path} does not exist, and {str(source)!r} is no model name (organisation/name)")


def _open_folder(folder: Path) -> Checkpoint:
    if (folder / SINGLE).exists() or (folder / INDEX).exists():
        return Checkpoint(folder, SafetensorsStore(folder))
    gguf = sorted(folder.glob("*.gguf"))
    if len(gguf) == 1:
        return Checkpoint(gguf[0], _gguf_store(gguf[0]))
    if gguf:
        raise CheckpointError(f"{folder} holds {len(gguf)} GGUF files; name the one that is meant: "
                              f"{', '.join(f.name for f in gguf[:5])}")
    found = sorted(f.name for f in folder.iterdir())[:8]
    if any(name.endswith((".bin", ".pt", ".pth")) for name in found):
        raise CheckpointError(f"{folder} holds pickled weights ({', '.join(found)}), which can run code when they are "
                              "read. Save the model with save_pretrained, which writes safetensors")
    raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX} nor a .gguf file, but "
                          f"{', '.join(found) or 'nothing'}")


def _gguf_store(path: Path) -> TensorStore:
    from .gguf_store import GgufStore
    return GgufStore(path)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]))
    except Exception as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise WorkFailed(f"there is no folder {name}, and the model of that name could not be fetched from the hub: "
                         f"{reason.rstrip('.')}. Give the path of a checkpoint") from error
