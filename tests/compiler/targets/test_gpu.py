"""GPU targets: the shipped figures are whole and plausible; what a user writes is read or refused by name."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ingot.compiler.build import BuildRequest, build
from ingot.compiler.targets import BadTarget, Target, UnknownTarget, architectures, find_target, list_targets
from ingot.compiler.targets.target import UnsupportedPrecision
from ingot.runtime.cli import main
from ingot.runtime.errors import RequestError

GPUS = [target for target in list_targets() if target.gpu is not None]
MINE: dict[str, Any] = {
    "arch": "sm_89", "note": "lent by a friend", "num_sms": 46, "memory_gib": 12, "bandwidth_gb_s": 504.2, "l2_mib": 36,
    "tflops": {"fp32": 29.1, "bf16": 58.3, "fp16": 58.3, "fp8": 116.6, "int8": 233.2},
    "sources": {"its data sheet": ["memory_gib", "bandwidth_gb_s", "tflops"], "deviceQuery": ["num_sms", "l2_mib"]},
}


def test_the_gpus_that_people_have_are_there() -> None:
    assert {"a100", "a10g", "l4", "l40s", "rtx4090", "h100-sxm", "h100-pcie", "h200", "b200", "b300", "rtx5090",
            "rtx-pro-6000"} <= {target.name for target in GPUS}


@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
def test_figures_are_plausible(target: Target) -> None:
    """A figure in the wrong unit, or with sparsity counted in, falls out of these bounds."""
    gpu = target.gpu
    assert gpu is not None and target.kind == "cuda" and target.isa == gpu.arch.name
    assert 1.3e9 < gpu.clock_hz < 2.7e9
    flops_per_byte = gpu.flops_per_s("bf16") / gpu.bytes_per_s
    assert 70 < flops_per_byte < 425
    assert gpu.tflops["bf16"] == gpu.tflops["fp16"]
    assert set(gpu.sources) == {"num_sms", "memory_gib", "bandwidth_gb_s", "l2_mib", "link_gb_s", "tflops"}
    assert gpu.arch.shared_per_block < gpu.arch.shared_per_sm <= 228 * 1024


@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
def test_rates_follow_from_multiprocessors_operations_a_clock_and_one_clock(target: Target) -> None:
    """Matrix rates of a device imply one clock, or half of it where its maker halves them; it is the clock of fp32 but
    on the large chips, whose data sheets give their rates at a lower one (H100: 1.83 and 1.98 GHz)."""
    gpu = target.gpu
    assert gpu is not None and set(gpu.tflops) == set(gpu.arch.ops_per_clock)
    matrix = {kind: gpu.implied_clock_hz(kind) for kind in gpu.tflops if kind != "fp32"}
    fastest = max(matrix.values())
    ratios = {kind: clock / fastest for kind, clock in matrix.items()}
    assert all(ratio == pytest.approx(1, rel=0.015) or ratio == pytest.approx(0.5, rel=0.015)
               for ratio in ratios.values()), ratios
    slower = 0.86 if gpu.arch.capability in (90, 100, 103) else 0.98
    share = 0.5 if target.name in ("a10g", "l40") else 1.0  # by their data sheets, in all types
    assert slower < fastest / gpu.clock_hz / share < 1.01


@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
def test_each_figure_has_a_document_or_its_derivation(target: Target) -> None:
    gpu = target.gpu
    assert gpu is not None
    for figure, source in gpu.sources.items():
        assert source.startswith(("NVIDIA ", "derived: ")), f"{figure}: {source}"
        assert not source.startswith("derived: ") or len(source.split()) > 3, f"{figure}: how is it derived?"
    assert not gpu.sources["tflops"].startswith("derived: "), "rates are the vendor's"


def test_eight_bits_by_architecture() -> None:
    precisions = {name: set(arch.precisions) for name, arch in architectures().items()}
    assert "fp8" not in precisions["sm_80"] | precisions["sm_86"]
    assert all("fp8" in precisions[name] for name in precisions if name not in ("sm_80", "sm_86"))
    assert {name for name in precisions if "nvfp4" in precisions[name]} == {"sm_100a", "sm_103a", "sm_120a"}
    a100, h200 = find_target("a100").gpu, find_target("h200").gpu
    assert a100 is not None and h200 is not None
    assert a100.operand_type("w4a8") == "int8" and a100.flops_per_s("w4a8") == 624e12
    assert h200.operand_type("w4a8") == "fp8" and h200.flops_per_s("int4") == 989.5e12
    assert h200.memory_bytes == 141 * 2**30 and h200.bytes_per_s == 4.8e12


def test_fp8_on_an_a100_is_told_what_it_has() -> None:
    message = r"a100 has no precision 'fp8'; it has: fp32, bf16, fp16, int8, int4, w4a8"
    with pytest.raises(UnsupportedPrecision, match=message):
        build(BuildRequest("/no/model", "a100", "fp8"))


@pytest.mark.parametrize(("precision", "kv", "message"), [
    ("bf16", "fp32", "in bf16 for h200 computes in bf16; its KV cache may be bf16, fp8 or int8, not fp32"),
    ("fp16", "bf16", "in fp16 for h200 computes in fp16; its KV cache may be fp16, fp8 or int8, not bf16"),
    ("bf16", "int4", "h200 has no KV cache in 'int4'; it has: fp32, bf16, fp16, fp8, int8")])
def test_caches_that_kernels_do_not_read(precision: str, kv: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        build(BuildRequest("/no/model", "h200", precision, kv_precision=kv))


def test_quality_is_not_measured_while_a_gpu_engine_is_built() -> None:
    with pytest.raises(RequestError, match="h200 is not measured while it is built"):
        build(BuildRequest("/no/model", "h200", "bf16", measure_quality=True))


def write(path: Path, **targets: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(targets, sort_keys=False))
    return path


def test_a_users_own_target(tmp_path: Path) -> None:
    one = write(tmp_path / "one.yaml", mine=MINE)
    target = find_target(str(one))
    assert (target.name, target.isa, target.kind) == ("mine", "sm_89", "cuda")
    assert target.gpu is not None and target.gpu.sources["l2_mib"] == "deviceQuery"
    assert target.gpu.link_bytes_per_s == 32e9
    assert target.gpu.sources["link_gb_s"].startswith("derived: PCI Express 4.0")
    two = write(tmp_path / "two.yaml", first=MINE, second=MINE | {"num_sms": 60})
    assert find_target(f"{two}:second").gpu.num_sms == 60  # type: ignore[union-attr]
    with pytest.raises(UnknownTarget, match=r"several targets: first, second[\s\S]*two\.yaml:first"):
        find_target(str(two))
    with pytest.raises(UnknownTarget, match=r"holds no target 'secnd'. Did you mean second\?"):
        find_target(f"{two}:secnd")
    assert find_target(f"{tmp_path}:mine") == target
    write(tmp_path / "three.yaml", mine=MINE)
    with pytest.raises(BadTarget, match=r"three\.yaml: target 'mine' also stands"):
        find_target(f"{tmp_path}:mine")


@pytest.mark.parametrize(("change", "message"), [
    ({"num_sms": None}, "num_sms must be a positive number, got None"),
    ({"num_sms": 46.5}, "num_sms must be a whole number"),
    ({"memory_gib": True}, "memory_gib must be a positive number"),
    ({"bandwidth_gb_s": float("inf")}, "bandwidth_gb_s must be a positive number"),
    ({"arch": "sm_91"}, "unknown architecture 'sm_91'; known: sm_80"),
    ({"speed": 3}, "unknown key 'speed'; the keys are: arch"),
    ({"tflops": {"fp32": 1, "bf16": 2, "fp16": 2, "int8": 4}}, "sm_89 computes in fp8, but tflops has no rate of fp8"),
    ({"tflops": {"fp7": 1}}, "tflops of unknown operand type 'fp7'"),
    ({"tflops": MINE["tflops"] | {"fp8": 466.4}},
     "tflops of fp8: 46 multiprocessors of sm_89 at 2.47 GHz, which the rate of fp32 implies, reach 93.12 to 279.4, "
     "got 466.4. Rates are dense"),
    ({"num_sms": 23}, "23 multiprocessors of sm_89 need a clock of 4.94 GHz for the rate of fp32"),
    ({"tflops": {"fp8": -1}}, "tflops must map operand types to positive numbers"),
    ({"sources": {"a": ["num_sms"]}}, "memory_gib has no source"),
    ({"sources": {"a": ["num_sms"], "b": ["num_sms"]}}, "num_sms has two sources: 'a' and 'b'"),
    ({"sources": {"a": ["clock"]}}, "source 'a' gives 'clock'; the figures are: num_sms"),
    ({"sources": ["a"]}, "sources must map documents to lists of figures"),
])
def test_what_is_wrong_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "mine.yaml", mine=MINE | change)
    with pytest.raises(BadTarget) as caught:
        find_target(str(path))
    assert f"{path}: target 'mine': {message}" in str(caught.value)


def test_missing_figures(tmp_path: Path) -> None:
    for key in MINE:
        path = write(tmp_path / "mine.yaml", mine={k: v for k, v in MINE.items() if k != key})
        with pytest.raises(BadTarget, match=f"'{key}' is missing"):
            find_target(str(path))


@pytest.mark.parametrize(("text", "message"), [
    ("a: [", "not a YAML file"), ("", "expected targets by name"), ("- a", "expected targets by name"),
    ("a: 3", "expected a mapping of figures, got 3")])
def test_files_that_hold_no_targets(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(BadTarget, match=message):
        find_target(str(path))
    with pytest.raises(BadTarget, match=r"absent\.yaml: cannot be read: No such file"):
        find_target(str(tmp_path / "absent.yaml"))


def test_listed_for_people_and_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["targets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    h200 = next(line for line in lines if line.startswith("h200 "))
    assert all(word in h200 for word in ("sm_90a", "132", "141 GiB", "4800 GB/s", "1979", "fp8", "w4a8"))
    path = write(tmp_path / "mine.yaml", mine=MINE)
    assert main(["targets", str(path), "--json"]) == 0
    entry, = json.loads(capsys.readouterr().out)
    assert entry["name"] == "mine" and entry["gpu"]["limits"]["shared_per_block"] == 101376
    assert main(["targets", str(tmp_path / "empty")]) == 2
