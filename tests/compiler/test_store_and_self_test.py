"""Builds and refits that fill the engine store, and that record a self-test."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ingot.compiler import engine_writer
from ingot.compiler.build import BuildRequest, build
from ingot.compiler.rebuild import rebuild
from ingot.compiler.refit import RefitRequest, refit
from ingot.compiler.self_test import self_test_of
from ingot.runtime.cli import main
from ingot.runtime.engine import Engine
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.errors import RequestError, WorkFailed
from ingot.runtime.executor.loading import EngineOptions, LoadedEngine
from ingot.runtime.self_test import SelfTest, SelfTestFailed
from ingot.runtime.store.store import Store


@pytest.fixture
def request_(tiny_checkpoint: Path, tmp_path: Path) -> BuildRequest:
    return BuildRequest(str(tiny_checkpoint), "cpu", "int8", tmp_path / "tiny.engine", max_batch_size=2,
                        max_num_tokens=8)


@pytest.fixture
def changed(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "changed" / tiny_checkpoint.name
    shutil.copytree(tiny_checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] * np.float32(1.5)},
              folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_stripped_engine_fills_the_store(request_: BuildRequest, changed: Path, tmp_path: Path) -> None:
    whole = build(request_)
    store = Store(tmp_path / "store")
    stripped = build(replace(request_, output=tmp_path / "stripped.engine", strip_weights=True, store=store.folder))
    assert stripped.hash == whole.hash and store.engines() == [whole.hash] and store.verify().good
    assert stripped.path is not None
    with EngineFile.open(stripped.path) as file:
        assert file.stripped and all(store.find_blob(name.split("/")[1][:-4]) for name in file.stripped)
    with Engine.load(stripped.path, store=store.folder, kv_cache_tokens=64) as a, \
            Engine.load(request_.output, kv_cache_tokens=64) as b:  # type: ignore[arg-type]
        assert np.array_equal(a.logits([1, 2, 3]), b.logits([1, 2, 3]))
    # A refit shares what has not changed.
    blobs = len(list(store.blobs))
    other = refit(RefitRequest(stripped.path, str(changed), tmp_path / "other.engine", strip_weights=True,
                               store=store.folder))
    assert store.engines() == sorted([whole.hash, other.hash]) and store.verify().good
    assert 0 < len(list(store.blobs)) - blobs <= 4


def test_a_whole_engine_goes_into_the_store_too(request_: BuildRequest, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    result = build(replace(request_, store=store.folder))
    assert store.engines() == [result.hash] and store.verify().good and result.path is not None
    with EngineFile.open(result.path) as file:
        assert not file.stripped


def test_a_build_that_fails_leaves_no_engine_in_the_store(request_: BuildRequest, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "store")

    def broken(*arguments: object) -> bytes:
        raise WorkFailed("no")

    monkeypatch.setattr(engine_writer, "end_records", broken)
    with pytest.raises(WorkFailed, match="no"):
        build(replace(request_, strip_weights=True, store=store.folder))
    assert store.engines() == []
    assert len(store.collect_garbage().blobs) > 0, "and nothing holds the store any more"
    full = tmp_path / "file"
    full.write_text("")
    with pytest.raises(WorkFailed, match="cannot add the engine to the store"):
        build(replace(request_, strip_weights=True, store=full))


def test_a_self_test_is_recorded_and_passed(request_: BuildRequest, changed: Path, tiny_checkpoint: Path,
                                            tmp_path: Path) -> None:
    plain = build(replace(request_, output=tmp_path / "plain.engine"))
    result = build(replace(request_, self_test=True))
    assert result.path is not None and result.hash != plain.hash and result.manifest["recipe"]["self_test"] is True
    assert "self_test" not in plain.manifest["recipe"]
    options = EngineOptions(kv_cache_tokens=128)
    with LoadedEngine(result.path, options, extent="full") as loaded:
        assert loaded.trial is not None and loaded.trial.recorded and loaded.trial.largest_difference < 1e-4
    with EngineFile.open(result.path) as file:
        record = SelfTest.read(file)
        assert record is not None and record == self_test_of(result.path)
        assert rebuild(file, str(tiny_checkpoint)).hash == file.hash

    # Of other weights the record is another one: not carried over, and made again where it is asked for.
    without = refit(RefitRequest(result.path, str(changed), tmp_path / "without.engine"))
    with EngineFile.open(without.path) as file:
        assert SelfTest.read(file) is None and "self_test" not in file.manifest["recipe"]
    again = refit(RefitRequest(result.path, str(changed), tmp_path / "again.engine", self_test=True))
    built = build(replace(request_, model=str(changed), output=tmp_path / "built.engine", self_test=True))
    assert again.hash == built.hash, "byte for byte what a build gives"
    with LoadedEngine(again.path, options, extent="full") as loaded:
        assert loaded.trial is not None and loaded.trial.recorded
    with EngineFile.open(again.path) as file:
        other = SelfTest.read(file)
    assert other is not None and other != record
    with pytest.raises(SelfTestFailed), LoadedEngine(result.path, options) as loaded:
        other.compare(_answer(loaded, other), "x")


def _answer(loaded: LoadedEngine, record: SelfTest) -> list:  # type: ignore[type-arg]
    from ingot.runtime.executor.trial import _Asking

    return _Asking(loaded.executor, "x").ask([record.prompt_token_ids], len(record.token_ids))[0]


def test_a_self_test_that_cannot_be_recorded_here(request_: BuildRequest) -> None:
    with pytest.raises(RequestError, match=r"this machine cannot: it is for aarch64"):
        build(replace(request_, target="cpu:aarch64-dotprod", self_test=True))
    with pytest.raises(RequestError, match="leave one of the two out"):
        build(replace(request_, strip_weights=True, self_test=True))
    assert request_.output is not None and not request_.output.exists()


def test_the_options(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, store = tmp_path / "x.engine", tmp_path / "store"
    assert main(["build", str(tiny_checkpoint), "--target", "cpu", "--precision", "int8", "-o", str(path),
                 "--max-batch-size", "2", "--max-num-tokens", "8", "--self-test", "--store", str(store), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert Store(store).engines() == [told["hash"]] and told["manifest"]["recipe"]["self_test"] is True
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {tiny_checkpoint}\nlimits: {{max_batch_size: 2, max_num_tokens: 8}}\nself_test: true\n"
                      "builds: [{targets: [cpu], precisions: [int8]}]\n")
    assert main(["build", "--recipe", str(recipe), "-o", str(tmp_path), "--json"]) == 0
    (built,) = json.loads(capsys.readouterr().out)
    assert built["hash"] == told["hash"]
