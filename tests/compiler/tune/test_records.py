"""Tuning records: read, refused, used."""
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingot.compiler.tune.problems import KERNELS, distinct, key_of, name_of, problem_of, tactics_of, with_tactic
from ingot.compiler.tune.records import BadRecords, Record, Records, StaleRecords, current_sources
from ingot.plugins.attention.cpu import Attention
from ingot.plugins.attention.cpu import Tactic as AttentionTactic
from ingot.plugins.linear.cpu import Problem, Tactic
from ingot.plugins.scheme import SCHEMES

MATRIX = Problem(576, 1536, SCHEMES["w4a8"], 64, bias=True)
ATTENTION = Attention(9, 3, 64, 64, 16, 30 * 12288, 0.125, window=512, q_stride=960, kv_dtype="i8")


def records(**changes: Any) -> Records:
    found = (Record("linear", key_of(MATRIX), {"rows": 4, "block_rows": 128}, 80.0, 100.0),
             Record("attention", key_of(ATTENTION), {"keys": 96}, 9.5, 10.0))
    return replace(Records("cpu:x86-64-v3", "some CPU", 2, current_sources(KERNELS), found), **changes)


def test_file_and_back(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(records().to_json()))
    assert Records.read(path) == records()


def test_a_record_serves_all_problems_of_its_key() -> None:
    tuned = records().tuned(replace(MATRIX, m=512, bias=False, x_stride=4000))
    assert tuned is not None and tuned.tactic == Tactic(rows=4, block_rows=128) and tuned.m == 512
    found = records().tuned(replace(ATTENTION, scale=0.5, softcap=3.0))
    assert found is not None and found.tactic == AttentionTactic(keys=96) and found.scale == 0.5
    for other in (replace(MATRIX, m=8), replace(MATRIX, n=577), replace(MATRIX, scheme=SCHEMES["int8"])):
        assert records().tuned(other) is None
    for reach in (replace(ATTENTION, window=0), replace(ATTENTION, kv_dtype="bf16")):
        assert records().tuned(reach) is None


@pytest.mark.parametrize("problem", [MATRIX, replace(MATRIX, m=1), replace(MATRIX, m=3), ATTENTION])
def test_every_candidate_can_be_recorded(problem: Problem | Attention) -> None:
    key = key_of(problem)
    assert key_of(problem_of(name_of(problem), key)) == key
    tactics = tactics_of(problem)
    assert len(set(tactics)) == len(tactics) > 5 and not any(vars(tactics[0]).values())
    for tactic in tactics:
        record = Record(name_of(problem), key, {n: v for n, v in vars(tactic).items() if v}, 1.0, 1.0)
        value = records(records=(record,)).to_json()
        assert Records.of(json.loads(json.dumps(value)), "x").tuned(problem) == with_tactic(problem, tactic)


def test_problems_of_one_key_are_measured_once() -> None:
    found = distinct([MATRIX, ATTENTION, replace(MATRIX, m=128), replace(ATTENTION, scale=1.0), replace(MATRIX, m=1)])
    assert [name_of(p) for p in found] == ["linear", "attention", "linear"]


def test_other_targets_and_sources_are_refused() -> None:
    records().require("cpu:x86-64-v3", "x.json")
    with pytest.raises(StaleRecords, match=r"x\.json was measured for cpu:x86-64-v3; this build is for cpu:x86-64-v4"):
        records().require("cpu:x86-64-v4", "x.json")
    stale = records(sources={**current_sources(KERNELS), "attention": "0123456789abcdef"})
    with pytest.raises(StaleRecords, match="attention kernels of source 0123456789ab; those of this Ingot are "):
        stale.require("cpu:x86-64-v3", "x.json")


def test_only_what_a_build_uses_is_kept() -> None:
    used = records().only([replace(MATRIX, m=100)])
    assert [record.kernel for record in used.records] == ["linear"] and list(used.sources) == ["linear"]
    assert not records().only([]).records


def test_newer_records_win() -> None:
    newer = records(records=(Record("linear", key_of(MATRIX), {}, 1.0, 1.0),
                             Record("linear", key_of(replace(MATRIX, m=1)), {"panels": 2}, 1.0, 2.0)))
    both = records().merged(newer, "x.json")
    assert [(r.kernel, r.tactic) for r in both.records] == [
        ("linear", {}), ("attention", {"keys": 96}), ("linear", {"panels": 2})]
    with pytest.raises(StaleRecords):
        records(target="cpu:x86-64-v4").merged(newer, "x.json")


@pytest.mark.parametrize(("change", "message"), [
    (lambda v: v.pop("sources"), "expected tuning records, an object of version, target"),
    (lambda v: v.update(version=7), "version 7; this Ingot reads 1"),
    (lambda v: v.update(workers="2"), "workers: expected int, got '2'"),
    (lambda v: v["records"].append(3), r"records\[2\]: malformed record 3"),
    (lambda v: v["records"][0].pop("tactic"), r"records\[0\]: malformed record"),
    (lambda v: v["records"][0]["tactic"].update(speed=3), "unexpected keyword argument 'speed'"),
    (lambda v: v["records"][1]["tactic"].update(keys=50), r"records\[1\]: malformed record"),
    (lambda v: v["records"][0]["problem"].update(scheme="int3"), "int3"),
    (lambda v: v["records"][0].update(kernel="norm"), "there is no kernel 'norm'; there are linear, attention"),
    (lambda v: v["records"][0]["problem"].update(extra=1), r"records\[0\]: malformed record"),
])
def test_malformed_files_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    value = json.loads(json.dumps(records().to_json()))
    change(value)
    path = tmp_path / "x.json"
    path.write_text(json.dumps(value))
    with pytest.raises(BadRecords, match=message):
        Records.read(path)


def test_what_is_no_json_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(BadRecords, match="no JSON"):
        Records.read(tmp_path / "x.json")
    with pytest.raises(BadRecords, match="cannot be read"):
        Records.read(tmp_path / "y.json")
