"""ingot refit: the very engine that a build would give; others are refused by their first difference."""
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

from ingot.compiler import refit_record, write_weights
from ingot.compiler.build import BuildRequest, build
from ingot.compiler.cache.build_cache import BuildCache
from ingot.compiler.calibration.text import CalibrationText
from ingot.compiler.refit import CannotRefit, RefitRequest, refit
from ingot.runtime.engine_file import EngineFile, EngineHashMismatch, WeightsMissing
from ingot.runtime.errors import IngotError, RequestError

SHORT = CalibrationText("short", ("a short text " * 20,))
pytestmark = pytest.mark.usefixtures("short_text")


@pytest.fixture(scope="module")
def short_text() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_weights, "default_text", lambda: SHORT)
        yield


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> BuildCache:
    """Imports and code are shared; what refit itself does is done without it."""
    return BuildCache(tmp_path_factory.mktemp("cache"), 10**9)


@pytest.fixture(scope="module")
def built(cache: BuildCache, tmp_path_factory: pytest.TempPathFactory, short_text: object) -> Callable[..., Path]:
    """An engine of a checkpoint, built once."""
    folder = tmp_path_factory.mktemp("built")
    done: dict[str, Path] = {}

    def engine(checkpoint: Path, precision: str = "w4a8", **options: object) -> Path:
        name = str((checkpoint, precision, *options.items()))
        if name not in done:
            done[name] = folder / f"{len(done)}.engine"
            asked = BuildRequest(str(checkpoint), "cpu:x86-64-v3", precision, done[name], max_batch_size=2,
                                 max_num_tokens=4)
            build(replace(asked, **options), cache=cache)  # type: ignore[arg-type]
        return done[name]
    return engine


@pytest.fixture(scope="module")
def tuned(speaking_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights, stored in another type, in another order of files."""
    return changed(speaking_checkpoint, tmp_path_factory.mktemp("tuned"),
                   lambda tensors: {name: (value[::-1] * 1.25).astype(np.float16) for name, value in tensors.items()})


def changed(checkpoint: Path, folder: Path, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]],
            **config: object) -> Path:
    copy = folder / checkpoint.name
    shutil.copytree(checkpoint, copy)
    tensors = change(load_file(copy / "model.safetensors"))
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, copy / "model.safetensors",
              {"format": "pt"})
    if config:
        entries = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(entries | config))
    return copy


@pytest.mark.parametrize("precision", ["fp32", "int8", "w4a8"])
def test_a_refitted_engine_is_the_one_that_a_build_gives(built: Callable[..., Path], speaking_checkpoint: Path,
                                                         tuned: Path, tmp_path: Path, precision: str) -> None:
    first, fresh = built(speaking_checkpoint, precision), built(tuned, precision)
    result = refit(RefitRequest(first, str(tuned), tmp_path / "x.engine"))
    assert (tmp_path / "x.engine").read_bytes() == fresh.read_bytes() != first.read_bytes()
    with EngineFile.open(fresh) as file:
        assert result.hash == file.hash
        assert file.manifest["num_calibrated_weights"] == (8 if precision == "w4a8" else 0)


def test_a_refit_that_rounds_to_nearest(built: Callable[..., Path], speaking_checkpoint: Path, tuned: Path,
                                        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that was calibrated, without a run of the model: what a build without calibration gives."""
    monkeypatch.setattr(write_weights, "calibrated", lambda *arguments: pytest.fail("calibrated"))
    refit(RefitRequest(built(speaking_checkpoint), str(tuned), tmp_path / "x.engine", calibrate=False))
    assert (tmp_path / "x.engine").read_bytes() == built(tuned, calibrate=False).read_bytes()


def test_another_chat_template_comes_along(built: Callable[..., Path], speaking_checkpoint: Path, tuned: Path,
                                           tmp_path: Path) -> None:
    other = tmp_path / tuned.name
    shutil.copytree(tuned, other)
    (other / "chat_template.jinja").write_text("{{ messages }}")
    refit(RefitRequest(built(speaking_checkpoint, "int8"), str(other), tmp_path / "x.engine"))
    with EngineFile.open(tmp_path / "x.engine") as file:
        assert file.read("tokenizer/chat_template.jinja") == b"{{ messages }}"
    assert (tmp_path / "x.engine").read_bytes() == built(other, "int8").read_bytes()


def test_refit_needs_neither_torch_nor_a_compiler(built: Callable[..., Path], speaking_checkpoint: Path, tuned: Path,
                                                  tmp_path: Path) -> None:
    words = ["refit", str(built(speaking_checkpoint, "int8")), "--weights", str(tuned), "-o", str(tmp_path / "x"),
             "--no-cache", "--json"]
    program = f"import sys; from ingot.runtime.cli import main; status = main({words!r}); " \
              "print(sorted({'torch', 'transformers'} & set(sys.modules)), file=sys.stderr); sys.exit(status)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={"PATH": "/nowhere"})
    assert done.returncode == 0 and done.stderr.splitlines()[-1] == "[]", done.stderr
    with EngineFile.open(built(tuned, "int8")) as fresh:
        assert json.loads(done.stdout)["hash"] == fresh.hash


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(("change", "config", "message"), [
    (lambda tensors: tensors | {DOWN: tensors[DOWN][:, :95]}, {},
     rf"the first tensor that differs is {DOWN}:\s+expected f32\[64, 96\], got f32\[64, 95\]"),
    (lambda tensors: {name: value for name, value in tensors.items() if name != DOWN}, {},
     r"expected f32\[64, 96\], got no such tensor"),
    (lambda tensors: tensors | {"a.b": tensors[DOWN]}, {}, r"differs is a.b:\s+expected no such tensor, got f32"),
    (lambda tensors: tensors, {"rms_norm_eps": 0.01}, "config.json: rms_norm_eps: expected 1e-06, got 0.01"),
])
def test_others_are_refused_by_the_first_difference(
        built: Callable[..., Path], speaking_checkpoint: Path, tmp_path: Path,
        change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]], config: dict[str, object], message: str,
) -> None:
    other = changed(speaking_checkpoint, tmp_path, change, **config)
    with pytest.raises(CannotRefit, match=message):
        refit(RefitRequest(built(speaking_checkpoint, "int8"), str(other), tmp_path / "x.engine"))
    assert [path.name for path in tmp_path.iterdir()] == [other.name]


def test_another_packing_is_refused(built: Callable[..., Path], tuned: Path, speaking_checkpoint: Path, tmp_path: Path,
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    engine = built(speaking_checkpoint, "int8")
    monkeypatch.setattr(refit_record, "PACKING_SOURCES", ("compiler/errors.py",))
    with pytest.raises(CannotRefit, match=r"was built by Ingot .* whose layout .* may differ.*others than here"):
        refit(RefitRequest(engine, str(tuned), tmp_path / "x.engine"))


def test_a_bad_checkpoint_leaves_nothing(built: Callable[..., Path], speaking_checkpoint: Path, tmp_path: Path) -> None:
    bad = changed(speaking_checkpoint, tmp_path, lambda tensors: tensors | {DOWN: tensors[DOWN] * np.nan})
    with pytest.raises(IngotError, match=DOWN):
        refit(RefitRequest(built(speaking_checkpoint, "int8"), str(bad), tmp_path / "x.engine"))
    assert [path.name for path in tmp_path.iterdir()] == [bad.name]


def test_a_file_is_not_replaced_unasked(built: Callable[..., Path], tuned: Path, speaking_checkpoint: Path,
                                        tmp_path: Path) -> None:
    (tmp_path / "x.engine").write_text("kept")
    with pytest.raises(RequestError, match="exists"):
        refit(RefitRequest(built(speaking_checkpoint, "int8"), str(tuned), tmp_path / "x.engine"))
    assert (tmp_path / "x.engine").read_text() == "kept"


@pytest.fixture
def stripped(built: Callable[..., Path], speaking_checkpoint: Path) -> Path:
    return built(speaking_checkpoint, "int8", strip_weights=True)


def blobs(engine: Path, folder: Path) -> Callable[[str], Path | None]:
    """The weights of a whole engine as files named by their hashes."""
    with EngineFile.open(engine) as file:
        for name in file.members:
            if name.startswith("weights/"):
                (folder / name.split("/")[1].removesuffix(".bin")).write_bytes(file.read(name))

    def find(sha256: str) -> Path | None:
        return folder / sha256 if (folder / sha256).exists() else None
    return find


def test_a_stripped_engine_has_the_same_hash(built: Callable[..., Path], speaking_checkpoint: Path,
                                             stripped: Path) -> None:
    whole = built(speaking_checkpoint, "int8")
    with EngineFile.open(whole) as a, EngineFile.open(stripped) as b:
        assert a.hash == b.hash and a.manifest == b.manifest and not a.stripped
        assert set(a.members) - set(b.members) == set(b.stripped) and not set(b.members) - set(a.members)
        assert {name: member.size for name, member in a.members.items() if name in b.stripped} == b.stripped
        assert {check.name for check in b.verify()} == set(b.members)
    assert stripped.stat().st_size < whole.stat().st_size


def test_its_weights_are_found_by_hash(built: Callable[..., Path], speaking_checkpoint: Path, stripped: Path,
                                       tmp_path: Path) -> None:
    whole = built(speaking_checkpoint, "int8")
    find = blobs(whole, tmp_path)
    with EngineFile.open(whole) as a, EngineFile.open(stripped, find) as b:
        for name in b.stripped:
            assert b.read(name) == a.read(name) and np.array_equal(b.map(name), a.map(name))
        assert not b.map(name).flags.writeable
        assert {check.name for check in b.verify()} == set(a.members)
        path = find(next(iter(b.stripped)).split("/")[1].removesuffix(".bin"))
        assert path is not None
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        with pytest.raises(EngineHashMismatch, match="data have SHA-256"):
            b.verify()
        path.write_bytes(b"short")
        with pytest.raises(EngineHashMismatch, match="has 5 bytes"):
            b.map(next(iter(b.stripped)))


def test_missing_weights_are_told(stripped: Path) -> None:
    for find in (None, lambda sha256: None):
        with EngineFile.open(stripped, find) as file, pytest.raises(WeightsMissing, match="ingot refit"):
            file.map(next(iter(file.stripped)))


def test_a_stripped_engine_is_refitted(built: Callable[..., Path], tuned: Path, stripped: Path, tmp_path: Path) -> None:
    """Back to the whole one from its own checkpoint, or to another's; and another's without its weights."""
    refit(RefitRequest(stripped, str(tuned), tmp_path / "x.engine"))
    assert (tmp_path / "x.engine").read_bytes() == built(tuned, "int8").read_bytes()
    result = refit(RefitRequest(stripped, str(tuned), tmp_path / "y.engine", strip_weights=True))
    with EngineFile.open(tmp_path / "y.engine") as file, EngineFile.open(tmp_path / "x.engine") as whole:
        assert file.hash == result.hash == whole.hash and file.stripped
