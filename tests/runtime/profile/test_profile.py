"""Profiles and rooflines of the mock engine, as the command line gives them."""

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.plugins.cpu import ceilings as kernels
from ingot.runtime.cli import main
from ingot.runtime.profile import ceilings
from ingot.runtime.profile.profile import Measured, part_of, summed, usual_phases
from ingot.runtime.profile.work import Work
from ingot.runtime.program import Limits
from tests.runtime.mock_engine import TABLE, write_engine


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    from ingot.runtime.profile import report

    monkeypatch.setattr(report, "_SECONDS", 0.01)
    monkeypatch.setattr(ceilings, "_READ_BYTES", 1 << 20)


def test_constants_are_those_of_the_kernels() -> None:
    assert (ceilings.READ_PIECE_BYTES, ceilings.CHAINS, ceilings.OUT_BYTES) == (
        kernels.READ_PIECE_BYTES, kernels.CHAINS, kernels.OUT_BYTES)
    assert {"read", *ceilings.KINDS} == set(kernels.CEILINGS)


def test_phases_keep_within_the_limits() -> None:
    def sizes(limits: Limits) -> list[tuple[int, int, int]]:
        return [(p.num_seqs, p.num_new, p.context) for p in usual_phases(limits, 512)]

    assert sizes(Limits(64, 1024, 4096)) == [(1, 1, 512), (16, 1, 512), (1, 512, 512)]
    assert sizes(Limits(4, 16, 48)) == [(1, 1, 48), (4, 1, 48), (1, 16, 16)]
    assert sizes(Limits(1, 1, 48)) == [(1, 1, 48)]


def test_parts_and_sums() -> None:
    assert part_of("model.layers.13.mlp.up_proj (modeling.py:7)") == "model.layers.*.mlp.up_proj"
    assert part_of("h.3") == "h.*" and part_of("") == "(none)"
    found = [Measured("a", "linear", "x", 2.0, Work(100, 10, "int8")), Measured("b", "norm", "x", 1.0, Work()),
             Measured("c", "linear", "y", 3.0, Work(10, 500, "int8"))]
    rows = summed(found, lambda m: m.op, ceilings.Ceilings(100.0, {"int8": 1000.0, "float": 1.0}))
    assert [(r.name, r.launches, r.seconds, r.num_bytes, r.operations, r.roofline_s) for r in rows] == [
        ("linear", 2, 5.0, 110, 1020, 2.0), ("norm", 1, 1.0, 0, 0, 0.0)]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main([*words])
    streams = capsys.readouterr()
    return status, streams.out + streams.err


def test_profile(mock_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, "bench", str(mock_path), "--profile", "--num-workers", "2", "--json", "--context", "40")
    assert status == 0, text
    facts: dict[str, Any] = json.loads(text)
    assert facts["ceilings"]["read_bytes_s"] > 1e8 and set(facts["ceilings"]["operations_s"]) == set(ceilings.KINDS)
    sizes = [(phase["num_seqs"], phase["num_new"], phase["context"]) for phase in facts["phases"]]
    assert sizes == [(1, 1, 40), (4, 1, 40), (1, 16, 16)]
    for phase in facts["phases"]:
        for kind in ("operator", "part", "kernel"):
            assert sum(row["launches"] for row in phase[kind]) == 7, "every launch of the step, once"
            assert all(row["seconds"] > 0 for row in phase[kind])
        names = {row["name"] for row in phase["operator"]}
        assert names == {"embedding", "kv_write", "attention", "linear", "sampling"}
        linear, = (row for row in phase["operator"] if row["name"] == "linear")
        assert linear["num_bytes"] == TABLE.nbytes and linear["operations"] == 2 * phase["num_seqs"] * TABLE.size
    status, text = run(capsys, "bench", str(mock_path), "--profile", "--num-workers", "1", "--by", "kernel")
    assert status == 0 and "mock_mean" in text and "of roofline" in text and "generation, batch 4" in text


def test_roofline_says_how_far_a_step_could_go(mock_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, "inspect", str(mock_path), "--roofline", "--json")
    assert status == 0, text
    facts = json.loads(text)
    one, batch, _ = facts["phases"]
    assert one["bytes"] < batch["bytes"] and one["operations"]["float"] < batch["operations"]["float"]
    assert one["least_s"] >= one["reading_s"] > 0 and one["most_tokens_s"] == pytest.approx(1 / one["least_s"])
    assert "tok/s at most" in run(capsys, "inspect", str(mock_path), "--roofline")[1]


def test_roofline_of_an_engine_for_another_machine_has_no_times(
        mock_code: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = {"name": "cpu:other", "isa": "other", "machine": "riscv", "features": []}
    path = write_engine(tmp_path / "other.engine", mock_code, target=target)
    status, text = run(capsys, "inspect", str(path), "--roofline")
    assert status == 0 and "No times" in text and "needs a riscv machine" in text and "tok/s at most" not in text


def test_engines_of_before_profiles_are_refused(
        mock_code: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def without_ops(plan: dict[str, Any]) -> None:
        for bucket in plan["buckets"]:
            for launch in bucket["launches"]:
                del launch["op"]

    path = str(write_engine(tmp_path / "old.engine", mock_code, edit_plan=without_ops))
    for words in (("bench", path, "--profile"), ("inspect", path, "--roofline")):
        status, text = run(capsys, *words)
        assert status == 2 and "does not say what each launch computes" in text and "Build it again" in text


@pytest.mark.parametrize(("words", "message"), [
    (["--profile"], "give an engine file"),
    (["x.engine", "--profile", "--by", "operator,colour"], "unknown 'colour'"),
    (["x.engine", "--profile", "--context", "0"], "at least 1"),
])
def test_wrong_questions(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, "bench", *words)
    assert status == 2 and message in text


