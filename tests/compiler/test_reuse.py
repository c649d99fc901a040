"""What a build takes from the cache, and that it makes no difference to a single byte."""
from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ingot.compiler import write_weights
from ingot.compiler.build import BuildRequest, BuildResult, build
from ingot.compiler.cache.build_cache import BuildCache
from ingot.compiler.calibration.text import CalibrationText

SHORT = CalibrationText("short", ("a short text " * 20,))
LIMITS = {"max_batch_size": 4, "max_num_tokens": 8}
Builder = Callable[..., BuildResult]


@pytest.fixture(scope="module")
def warm(speaking_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[BuildResult, Path]:
    """(a build of w4a8, the folder of the cache that it has filled)"""
    folder = tmp_path_factory.mktemp("warm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_weights, "default_text", lambda: SHORT)
        result = build(request(speaking_checkpoint, folder / "first.engine"), cache=BuildCache(folder / "cache"))
    return result, folder / "cache"


@pytest.fixture
def again(warm: tuple[BuildResult, Path], speaking_checkpoint: Path, tmp_path: Path,
          monkeypatch: pytest.MonkeyPatch) -> Builder:
    """Builds once more with some change, from a copy of the cache."""
    monkeypatch.setattr(write_weights, "default_text", lambda: SHORT)
    shutil.copytree(warm[1], tmp_path / "cache")

    def one(checkpoint: Path = speaking_checkpoint, **change: object) -> BuildResult:
        asked = replace(request(checkpoint, tmp_path / "again.engine"), **change)  # type: ignore[arg-type]
        return build(asked, cache=BuildCache(tmp_path / "cache"))
    return one


def request(checkpoint: Path, output: Path) -> BuildRequest:
    return BuildRequest(str(checkpoint), "cpu:x86-64-v3", "w4a8", output, **LIMITS)  # type: ignore[arg-type]


def bytes_of(result: BuildResult) -> bytes:
    assert result.path is not None
    return result.path.read_bytes()


def found(result: BuildResult) -> set[str]:
    """The kinds of which everything was found."""
    return {kind for kind, (found, asked) in result.reused.items() if found == asked}


def test_the_first_build_makes_everything(warm: tuple[BuildResult, Path]) -> None:
    assert found(warm[0]) == set() and warm[0].manifest["num_calibrated_weights"] > 0
    assert set(warm[0].reused) == {"model", "graph", "code", "object", "digests", "calibration", "weights"}


def test_the_same_again_makes_nothing(warm: tuple[BuildResult, Path], again: Builder) -> None:
    result = again()
    assert found(result) == {"model", "graph", "code", "calibration", "weights"} | found(result) & {"digests"}
    assert bytes_of(result) == bytes_of(warm[0])


def test_the_same_again_needs_neither_torch_nor_a_compiler(warm: tuple[BuildResult, Path], tmp_path: Path,
                                                           speaking_checkpoint: Path) -> None:
    program = f"""
import sys
from ingot.compiler.build import BuildRequest, build
from ingot.compiler import write_weights
from ingot.compiler.cache.build_cache import BuildCache
from ingot.compiler.calibration.text import CalibrationText
from pathlib import Path
write_weights.default_text = lambda: CalibrationText("short", ("a short text " * 20,))
result = build(BuildRequest({str(speaking_checkpoint)!r}, "cpu:x86-64-v3", "w4a8", Path({str(tmp_path / "x")!r}),
                            max_batch_size=4, max_num_tokens=8), cache=BuildCache(Path({str(warm[1])!r})))
print(result.hash, sorted({{"torch", "transformers"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={"PATH": "/nowhere"})
    assert done.stdout.split() == [warm[0].hash, "[]"], done.stderr


@pytest.mark.parametrize(("change", "kept"), [
    ({"precision": "int8"}, {"model", "graph"}),
    ({"target": "cpu:x86-64-v4"}, {"model", "graph", "calibration", "weights"}),
    ({"max_batch_size": 3}, {"model", "graph", "calibration", "weights"}),
    ({"max_seq_len": 64}, {"model", "calibration", "weights"}),
])
def test_what_a_change_leaves(again: Builder, change: dict[str, object], kept: set[str]) -> None:
    result = again(**change)
    assert found(result) - {"code", "digests", "object"} == kept
    if "precision" in change:  # attention, norms, sampling, the pool: all but the matrices
        compiled, asked = result.reused["object"]
        assert 0 < compiled < asked


def test_other_weights_leave_graph_and_code(again: Builder, speaking_checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / speaking_checkpoint.name
    shutil.copytree(speaking_checkpoint, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] = np.ascontiguousarray(tensors["model.norm.weight"][::-1])
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    result = again(other, calibrate=False)
    assert {"model", "graph", "code"} <= found(result)
    reused, asked = result.reused["weights"]
    assert reused < asked  # those that were calibrated before are rounded for themselves now


def test_a_changed_configuration_is_noticed(again: Builder, speaking_checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / speaking_checkpoint.name
    shutil.copytree(speaking_checkpoint, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))
    assert not {"model", "graph", "code"} & found(again(other))


def test_damaged_entries_are_made_again(warm: tuple[BuildResult, Path], again: Builder, tmp_path: Path) -> None:
    for kind in ("weights", "code", "graph"):
        for path in (tmp_path / "cache" / kind).glob("??/*"):
            path.write_bytes(path.read_bytes()[:-1] + b"?")
    result = again()
    assert found(result) & {"weights", "code", "graph"} == set() and result.hash == warm[0].hash
