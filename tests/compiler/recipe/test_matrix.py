"""A matrix in one command: outcomes in order, one failure stops no other, what is shared is made once."""
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from ingot.compiler.build import BuildRequest
from ingot.compiler.cache.build_cache import BuildCache
from ingot.compiler.recipe import matrix
from ingot.compiler.recipe.matrix import Outcome, build_all, default_jobs
from ingot.runtime.cli import main

BUILDS = [{"targets": ["cpu:x86-64-v3"], "precisions": ["fp32", "int8"]}, {"targets": ["a100"], "precisions": ["fp8"]}]


@pytest.fixture(scope="module")
def cache_folder(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache that knows the tiny model, so that builds need no torch."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INGOT_CACHE", str(folder))
        build_all([request(tiny_checkpoint, folder, "fp32", dry_run=True)], BuildCache())
        yield folder


def request(checkpoint: Path, folder: Path, precision: str, target: str = "cpu:x86-64-v3", dry_run: bool = False,
            ) -> BuildRequest:
    return BuildRequest(str(checkpoint), target, precision, folder / f"{target}.{precision}.engine", name="tiny",
                        max_batch_size=1, max_num_tokens=1, max_seq_len=32, dry_run=dry_run)


@pytest.fixture
def recipe(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump({
        "model": str(tiny_checkpoint), "name": "tiny", "builds": BUILDS,
        "limits": {"max_batch_size": 1, "max_num_tokens": 1, "max_seq_len": 32}}))
    return path


@pytest.mark.parametrize("jobs", [1, 2])
def test_outcomes_come_in_order_and_a_failure_stops_none(cache_folder: Path, tiny_checkpoint: Path, tmp_path: Path,
                                                         jobs: int) -> None:
    asked = [request(tiny_checkpoint, tmp_path, "fp8", "a100"), request(tiny_checkpoint, tmp_path, "int8"),
             request(tiny_checkpoint, tmp_path, "fp32")]
    told: list[Outcome] = []
    outcomes = build_all(asked, BuildCache(cache_folder), jobs, told.append)
    assert [outcome.request for outcome in outcomes] == asked and len(told) == 3
    assert outcomes[0].status == 2 and outcomes[0].error.startswith("UnsupportedPrecision: a100 has no")
    for outcome in outcomes[1:]:
        assert outcome.result is not None and outcome.result.path is not None and outcome.result.path.exists()
        assert outcome.result.reused["graph"] == (1, 1)


def test_jobs_are_bounded_by_cores_and_memory(tiny_checkpoint: Path, tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    asked, needed = [request(tiny_checkpoint, tmp_path, "w4a8")] * 10, matrix.BUILD_BYTES + matrix.CALIBRATION_BYTES
    monkeypatch.setattr(matrix, "available_cores", lambda: 8)
    monkeypatch.setattr(matrix, "available_memory_bytes", lambda: 1 << 50)
    assert default_jobs(asked) == 8 and default_jobs(asked[:3]) == 3
    monkeypatch.setattr(matrix, "available_memory_bytes", lambda: 2 * needed + 1)
    assert default_jobs(asked) == 2
    monkeypatch.setattr(matrix, "available_memory_bytes", lambda: 0)
    assert default_jobs(asked) == 1
    assert default_jobs([replace(asked[0], model="/nowhere")]) == 1


def test_what_fails_all_builds_is_told_once(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["build", "./nowhere", "--recipe", str(recipe), "--target", "cpu*", "-o", str(tmp_path)])
    *_, last = capsys.readouterr().out.strip().split("\n\n")
    assert status == 2 and last.count("does not exist") == 1
    assert last.startswith("tiny cpu:x86-64-v3 fp32, tiny cpu:x86-64-v3 int8: CheckpointError: nowhere")


def test_the_command(cache_folder: Path, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Engines, a table of results, and the exit status of what failed."""
    words = ["build", "--recipe", str(recipe), "-o", str(tmp_path)]
    assert main([*words, "--target", "cpu*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["model", "target", "precision", "weights"] and len(lines) == 3
    engines = sorted(path.name for path in tmp_path.glob("*.engine"))
    assert engines == ["tiny.cpu-x86-64-v3.fp32.engine", "tiny.cpu-x86-64-v3.int8.engine"]
    assert main([*words, "--precision", "*8", "--force"]) == 2
    out = capsys.readouterr().out
    assert "UnsupportedPrecision" in out and "a100 has no precision 'fp8'" in out


def test_a_dry_run_for_machines(cache_folder: Path, recipe: Path, tmp_path: Path,
                                capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--recipe", str(recipe), "-o", str(tmp_path), "--dry-run", "--json"]) == 2
    rows = json.loads(capsys.readouterr().out)
    assert [(row["target"], row["precision"], row["error"] is None) for row in rows] == [
        ("cpu:x86-64-v3", "fp32", True), ("cpu:x86-64-v3", "int8", True), ("a100", "fp8", False)]
    assert rows[0]["manifest"]["memory"]["arena_bytes"] > 0 and list(tmp_path.glob("*.engine")) == []


@pytest.mark.parametrize(("words", "message"), [
    (["--max-seq-len", "8"], "--max-seq-len stands in the recipe"),
    (["--no-calibration"], "--no-calibration stands in the recipe"),
    (["--target", "gpu*"], "no build of the recipe matches; it has: cpu:x86-64-v3 fp32"),
    (["-o", "/nowhere"], "/nowhere is no folder"),
    (["--jobs", "0"], "--jobs is 0"),
])
def test_wrong_words(recipe: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["build", "--recipe", str(recipe), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("words", "message"), [
    ([], "MODEL is missing"), (["m"], "--target is missing"), (["m", "--target", "cpu"], "--precision is missing")])
def test_without_a_recipe(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["build", *words]) == 2
    assert message in capsys.readouterr().err
