"""Proof that an engine comes from a checkpoint: build it again by its own recipe, from nothing, and compare hashes."""
from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from ingot.runtime.diff import diff
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.errors import RequestError, WorkFailed

from .build import BuildRequest, BuildResult, build
from .clock import Progress


class NotReproduced(WorkFailed):
    """The rebuilt engine is another one; the message tells what differs and why."""


def rebuild(engine: EngineFile, checkpoint: str, progress: Progress = lambda stage, detail: None) -> BuildResult:
    """Without the build cache, so that every step is taken again; needs the room of the engine in the temporary folder.

    Raises NotReproduced, RequestError for an engine that records no recipe, and what a build raises.
    """
    recipe = engine.manifest.get("recipe")
    if not isinstance(recipe, dict):
        raise RequestError(f"{engine.path} does not record the recipe that it was built by")
    with tempfile.TemporaryDirectory(prefix="ingot-rebuild-") as folder:
        options = {name: value for name, value in recipe.items() if name != "dump"}
        try:
            request = BuildRequest(model=checkpoint, output=Path(folder, "again.engine"), **options)
        except TypeError as error:
            raise RequestError(f"{engine.path}: its recipe has entries that this Ingot does not know: {error}"
                               ) from None
        if recipe.get("dump"):
            request = replace(request, dump=Path(folder, "dump"))
        result = build(request, progress)
        if result.hash == engine.hash:
            return result
        with EngineFile.open(Path(folder, "again.engine")) as again:
            found = diff(engine, again)
    details = [f"{d.topic}: {d.detail}" for d in found.differences]
    raise NotReproduced("\n  ".join([
        f"{engine.path} has the hash {engine.hash}, building it again from {checkpoint} gave {result.hash}.",
        *found.reasons, *details[:12]]))
