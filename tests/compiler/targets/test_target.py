from __future__ import annotations

import json

import pytest

from ingot.compiler.cpu.isa import ISAS
from ingot.compiler.precision import PRECISIONS
from ingot.compiler.targets import UnknownTarget, find_target, list_targets
from ingot.compiler.targets import target as module
from ingot.compiler.targets.target import UnsupportedPrecision
from ingot.runtime.errors import RequestError


def test_every_instruction_set_is_a_target() -> None:
    targets = {target.name: target for target in list_targets() if target.kind == "cpu"}
    assert set(targets) == {f"cpu:{isa}" for isa in ISAS}
    for name, target in targets.items():
        assert target.gpu is None and f"cpu:{target.isa}" == name and target.note
        assert set(target.precisions) <= set(PRECISIONS) and all(target.precisions.values())
        assert set(target.kv_precisions) <= {"fp32", "bf16", "int8"}


def test_each_target_is_found_by_its_name() -> None:
    assert all(find_target(target.name) == target for target in list_targets())


def runs(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """The host runs these instruction sets, the last one best."""
    monkeypatch.setattr(module, "host_isas", lambda: [ISAS[name] for name in names])
    monkeypatch.setattr(module, "host_isa", lambda: ISAS[names[-1]])


def test_cpu_is_the_best_that_the_host_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    runs(monkeypatch, "x86-64-v3", "x86-64-v4")
    assert find_target("cpu").name == "cpu:x86-64-v4"


def test_the_hosts_own_target_is_listed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    runs(monkeypatch, "aarch64-dotprod")
    assert list_targets()[0].name == "cpu:aarch64-dotprod"


def test_a_host_that_runs_none_lists_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "host_isas", list)
    assert len([target for target in list_targets() if target.kind == "cpu"]) == len(ISAS)


@pytest.mark.parametrize(("name", "near"), [("cpu:x86-64-v5", "cpu:x86-64-v3"), ("cpu:aarch64", "cpu:aarch64-dotprod"),
                                            ("cup", "cpu")])
def test_unknown_names_are_told_the_nearest(name: str, near: str) -> None:
    with pytest.raises(UnknownTarget) as caught:
        find_target(name)
    message = str(caught.value)
    assert f"unknown target {name!r}" in message and near in message.split("\n")[0] and "ingot targets" in message


def test_names_like_no_other_get_the_list() -> None:
    with pytest.raises(UnknownTarget) as caught:
        find_target("?")
    assert "Did you mean" not in str(caught.value) and "Known: cpu, cpu:x86-64-v3" in str(caught.value)


def test_a_precision_that_a_target_lacks() -> None:
    target = find_target("cpu:x86-64-v3")
    target.require_precision("w4a8")
    with pytest.raises(UnsupportedPrecision, match="cpu:x86-64-v3 has no precision 'fp8'; it has: fp32, bf16"):
        target.require_precision("fp8")
    assert issubclass(UnsupportedPrecision, RequestError) and issubclass(UnknownTarget, RequestError)


def test_targets_are_json() -> None:
    data = json.loads(json.dumps(find_target("cpu:aarch64-dotprod").to_json()))
    assert data["isa"] == "aarch64-dotprod" and data["precisions"]["w4a8"] == "sdot"
    assert data["kv_precisions"] == ["fp32", "bf16", "int8"]
