"""The same recipe gives the same engine wherever and however it is built, and ingot verify proves it."""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ingot.compiler.build import BuildRequest, build
from ingot.compiler.cache.build_cache import BuildCache
from ingot.compiler.rebuild import NotReproduced, rebuild
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.errors import RequestError
from tests.runtime.mock_engine import write_engine

RECIPE = ("--target", "cpu:x86-64-v3", "--precision", "w4a8", "--max-batch-size", "2", "--max-num-tokens", "4")
HASHED = """
import sys
import ingot.compiler.write_weights as module
from ingot.compiler.calibration.text import CalibrationText
from ingot.runtime.cli import main
module.default_text = lambda: CalibrationText("short", ("a short text " * 20,))
sys.exit(main(sys.argv[1:]))
"""


def run(checkpoint: Path, folder: Path, cores: set[int], **environment: str) -> tuple[str, bytes]:
    """Builds in a process of its own: (hash, bytes)."""
    folder.mkdir(parents=True)
    output = folder / f"{len(environment)}.engine"
    words = [sys.executable, "-c", HASHED, "build", str(checkpoint), *RECIPE, "-o", str(output), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env={**os.environ, **environment},
                          preexec_fn=lambda: os.sched_setaffinity(0, cores))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["hash"], output.read_bytes()


def test_two_builds_under_different_circumstances(speaking_checkpoint: Path, tmp_path: Path) -> None:
    """Folder, user, time zone, locale, hash seed, cores, file times, a cold cache and a warm one."""
    elsewhere = tmp_path / "a much longer path, with blanks" / speaking_checkpoint.name
    shutil.copytree(speaking_checkpoint, elsewhere)
    for path in elsewhere.iterdir():
        os.utime(path, (1, 1))
    cores = os.sched_getaffinity(0)
    first = run(speaking_checkpoint, tmp_path / "one", cores, INGOT_CACHE=str(tmp_path / "cache"), PYTHONHASHSEED="1")
    other = {"INGOT_CACHE": str(tmp_path / "cache 2"), "PYTHONHASHSEED": "2", "TZ": "Asia/Kathmandu", "LC_ALL": "C",
             "HOME": str(tmp_path / "home"), "USER": "somebody", "LOGNAME": "somebody", "OMP_NUM_THREADS": "3"}
    second = run(elsewhere, tmp_path / "two", {min(cores)}, **other)
    warm = run(elsewhere, tmp_path / "three", cores, **other | {"INGOT_CACHE": str(tmp_path / "cache")})
    assert first == second == warm


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "tiny.engine"
    build(BuildRequest(str(tiny_checkpoint), "cpu:x86-64-v3", "int8", path, max_batch_size=2, max_num_tokens=4,
                       name="renamed", dump=path.parent / "dump"))
    return path


def test_a_rebuild_proves_it(engine: Path, tiny_checkpoint: Path) -> None:
    with EngineFile.open(engine) as file:
        result = rebuild(file, str(tiny_checkpoint))
        assert result.hash == file.hash and file.manifest["model"]["name"] == "renamed"
        assert "debug/passes/00_import.txt" in file.members


def test_a_rebuild_from_other_weights_is_none(engine: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_checkpoint, other)
    tensors = load_file(other / "model.safetensors")
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] + np.float32(1)},
              other / "model.safetensors", {"format": "pt"})
    with EngineFile.open(engine) as file, pytest.raises(NotReproduced) as caught:
        rebuild(file, str(other))
    assert "the checkpoints hold different tensors" in str(caught.value)
    assert "weights: 1 of" in str(caught.value) and "model.norm.weight" in str(caught.value)


def test_an_engine_without_a_recipe(tmp_path: Path) -> None:
    path = write_engine(tmp_path / "mock.engine", b"no code")
    with EngineFile.open(path) as file, pytest.raises(RequestError, match="does not record the recipe"):
        rebuild(file, "anywhere")


@pytest.mark.usefixtures("compiles_anew")  # what tests keep of C files is a cache too
def test_the_cache_takes_no_part_in_a_rebuild(engine: Path, tiny_checkpoint: Path, tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BuildCache, "get", lambda *arguments: pytest.fail("the cache was asked"))
    with EngineFile.open(engine) as file:
        asked = BuildRequest(str(tiny_checkpoint), "cpu:x86-64-v3", "int8", tmp_path / "x")
        with pytest.raises(pytest.fail.Exception):
            build(replace(asked, max_num_tokens=4), cache=BuildCache(tmp_path / "cache"))
        rebuild(file, str(tiny_checkpoint))
