"""ingot tune, from the measurement to an engine that was built with it; and the settings of --serving."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.compiler.build import BuildRequest, build
from ingot.compiler.cpu.isa import ISAS, host_isa
from ingot.compiler.errors import CannotCompile
from ingot.compiler.rebuild import rebuild
from ingot.compiler.tune.kernels import Settings, tune
from ingot.compiler.tune.problems import key_of, problem_of, tactics_of
from ingot.compiler.tune.records import Records
from ingot.compiler.tune.serving import Grid, Setting
from ingot.plugins.attention.cpu import Attention
from ingot.plugins.linear.cpu import Problem
from ingot.plugins.scheme import SCHEMES
from ingot.runtime.cli import main
from ingot.runtime.engine import Engine
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.errors import RequestError
from ingot.runtime.program import Limits
from ingot.runtime.sampling import SamplingParams

SETTINGS = Settings(workers=1, rounds=1, max_tokens=16, cold_bytes=1 << 18)


def test_every_problem_gets_a_record_with_a_legal_tactic() -> None:
    problems = [Problem(48, 64, SCHEMES["w4a8"], m) for m in (1, 4)]
    problems += [Problem(48, 64, SCHEMES["bf16"], 16), Problem(48, 64, SCHEMES["w4a8"], 1, bias=True)]
    told: list[str] = []
    found = tune([*problems, Attention(2, 1, 16, 16, 16, 64, 0.25, kv_dtype="i8")], host_isa().name, SETTINGS,
                 progress=told.append)
    assert [(record.kernel, record.problem.get("tokens")) for record in found.records] == [
        ("linear", "1"), ("linear", "2-8"), ("linear", "9 and more"), ("attention", None)]
    for record in found.records:
        problem = problem_of(record.kernel, record.problem)
        assert {n: v for n, v in record.tactic.items() if v} == record.tactic
        assert any(record.tactic == {n: v for n, v in vars(t).items() if v} for t in tactics_of(problem))
        assert record.median_us > 0 and record.model_us > 0 and (record.tactic or record.median_us == record.model_us)
    assert found.target == f"cpu:{host_isa().name}" and told[0].endswith("for 4 problems") and "4 of 4" in told[-1]


def test_kernels_of_another_machine_cannot_be_measured() -> None:
    other = next(isa for isa in ISAS.values() if isa.machine != host_isa().machine)
    with pytest.raises(CannotCompile, match=f"kernels for {other.name} cannot be measured here"):
        tune([Problem(48, 64, SCHEMES["fp32"], 1)], other.name, SETTINGS)


@pytest.fixture(scope="module")
def records(speaking_engine: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the engine's own problems; with one tactic that no model chooses, so that its use shows."""
    with EngineFile.open(speaking_engine("cpu", "w4a8")) as engine:
        told = [entry["problem"] for entry in engine.manifest["kernels"] if "problem" in entry]
        assert {entry["tuned_by"] for entry in engine.manifest["kernels"]} == {"model"}
    problems = [problem_of(p["kernel"], {n: v for n, v in p.items() if n != "kernel"}) for p in told]
    first = next(p for p in problems if isinstance(p, Problem) and p.size_class == 1)
    found = tune([*problems[:1], first], host_isa().name, SETTINGS).to_json()
    for record in found["records"]:
        if record["problem"] == key_of(first):
            record["tactic"] = {"panels": 2, "ahead": 1024}
    path = tmp_path_factory.mktemp("records") / "x.json"
    path.write_text(json.dumps(found))
    return path


def test_an_engine_is_built_with_records(speaking_engine: Callable[..., Path], speaking_checkpoint: Path, records: Path,
                                         tmp_path: Path) -> None:
    def built(name: str, tuning: Path) -> Path:
        path = tmp_path / name
        build(BuildRequest(str(speaking_checkpoint), "cpu", "w4a8", path, max_batch_size=2, max_num_tokens=8,
                           calibrate=False, tuning_records=tuning))
        return path
    tuned, again = built("a.engine", records), built("b.engine", records)
    with EngineFile.open(tuned) as first, EngineFile.open(again) as second:
        assert first.hash == second.hash
        kernels = {entry["name"]: entry for entry in first.manifest["kernels"]}
        measured = [entry for entry in kernels.values() if entry["tuned_by"] == "measured"]
        assert any(entry["tactic"] == {"panels": 2, "ahead": 1024} for entry in measured)
        assert all("problem" in entry for entry in measured) and len(measured) < len(kernels)
        assert Records.of(first.manifest["recipe"]["tuning_records"], "manifest").target == f"cpu:{host_isa().name}"
        assert rebuild(first, str(speaking_checkpoint)).hash == first.hash
    answers = []
    for path in (tuned, speaking_engine("cpu", "w4a8")):
        with Engine.load(str(path)) as engine:
            answers.append(engine.generate([5, 6, 7], SamplingParams(max_tokens=6, temperature=0)).token_ids)
    assert answers[0] == answers[1]


def test_stale_records_fail_the_build(speaking_checkpoint: Path, records: Path, tmp_path: Path,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    value = json.loads(records.read_text())
    value["sources"]["linear"] = "0" * 64
    (tmp_path / "stale.json").write_text(json.dumps(value))
    output = tmp_path / "x.engine"
    status = main(["build", str(speaking_checkpoint), "--target", "cpu", "--precision", "w4a8", "-o", str(output),
                   "--tuning-records", str(tmp_path / "stale.json"), "--json"])
    assert status == 2 and not output.exists()
    assert "was measured with the linear kernels of source 000000000000" in capsys.readouterr().err


def test_command(speaking_engine: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str],
                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.compiler.cli.tune.Settings", lambda workers, rounds, max_tokens: SETTINGS)
    monkeypatch.setattr("ingot.compiler.tune.kernels.tactics_of", lambda problem: tactics_of(problem)[:2])
    engine, output = str(speaking_engine("cpu", "fp32")), tmp_path / "x.json"
    assert main(["tune", engine, "-o", str(output), "--rounds", "1"]) == 0
    assert "Build with it: ingot build MODEL --target" in capsys.readouterr().out
    found = Records.read(output)
    assert {record.kernel for record in found.records} == {"linear", "attention"}
    assert main(["tune", engine, "-o", str(output)]) == 2
    assert "Replace it with --force" in capsys.readouterr().err
    assert main(["tune", engine, "-o", str(output), "--add", "--json"]) == 0
    assert {record.key for record in Records.read(output).records} == {record.key for record in found.records}
    assert main(["tune", str(tmp_path), "-o", str(tmp_path / "y.json")]) == 2
    assert "--precision is missing" in capsys.readouterr().err


def test_serving(speaking_engine: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    engine = str(speaking_engine("cpu", "fp32"))
    assert main(["tune", engine, "--serving", "--batch-sizes", "1", "2", "--num-tokens", "4", "8", "--isl", "6",
                 "--osl", "3", "--num-requests", "5", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(s["max_batch_size"], s["max_num_tokens"]) for s in report["settings"]] == [(1, 4), (1, 8), (2, 4), (2, 8)]
    assert report["best"] == max(report["settings"], key=lambda s: s["output_tokens_per_s"])
    assert main(["tune", engine, "--serving", "--batch-sizes", "3", "--isl", "6", "--osl", "3"]) == 2
    assert "--batch-sizes 3: expected 1 to 2, for which the engine was built" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "told"), [
    (["--max-itl-ms", "20"], "--max-itl-ms goes with --serving"),
    (["--serving", "-o", "x.json"], "--serving writes no records"),
    (["-o", "nowhere/x.json"], "the folder nowhere does not exist"),
])  # fmt: skip
def test_options_that_mean_nothing_are_refused_before_the_work(options: list[str], told: str,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "any.engine", *options]) == 2
    assert told in capsys.readouterr().err


def test_settings_of_a_grid() -> None:
    limits = Limits(max_batch_size=16, max_num_tokens=512, max_seq_len=2048)
    assert Grid().settings(limits) == [(b, t) for b in (4, 8, 16) for t in (128, 256, 512)]
    assert Grid([16], [8, 64]).settings(limits) == [(16, 64)]
    with pytest.raises(RequestError, match="is below every one of"):
        Grid([16], [8]).settings(limits)
    with pytest.raises(RequestError, match="2049 tokens; a sequence of this engine has 2048"):
        Grid(isl=2000, osl=49).settings(limits)
    slow, fast = (Setting(b, 512, 100.0 * b, 1, 2, 3, float(b)) for b in (8, 16))
    assert Grid().best([slow, fast]) is fast and Grid(max_itl_ms=10).best([slow, fast]) is slow
    assert Grid(max_itl_ms=5).best([slow, fast]) is None
