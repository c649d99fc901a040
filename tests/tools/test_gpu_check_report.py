"""What gpu_check says: tables, Markdown, exit status; sections one by one on the fake driver."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from ingot.runtime.devices import cuda_driver
from ingot.runtime.devices.cuda_driver import Driver
from tests.conftest import why_no_gpu
from tests.runtime.devices.fake_cuda import FakeCuda
from tools.gpu_check import __main__ as program
from tools.gpu_check import sections
from tools.gpu_check.cases import list_cases
from tools.gpu_check.code import Compiler, Pack, PackWriter, find_target, target_of
from tools.gpu_check.pack import kernels_of_cases
from tools.gpu_check.report import as_markdown, as_text, failures

NAN = float("nan")
RATE = {"name": "linear 6144 x 4096, 8 rows", "precision": "fp8", "candidate": "linear.fp8 64x16x128", "rank": 0,
        "seconds": 1e-5, "expected_s": 9e-6, "num_bytes": 25e6, "flops": 4e8, "error": 1e-3, "problem": ""}
RESULTS: dict[str, Any] = {
    "facts": {"GPU": "NVIDIA H200, sm_90"},
    "kernels": {"summary": [{"group": "linear", "passed": 61, "failed": 1, "skipped": 4, "seconds": 9.5}],
                "outcomes": [{"name": "linear.test_gates[silu]", "status": "failed", "detail": "at (0, 1)",
                              "seconds": 0.1}]},
    "ceilings": {"copy_bytes_s": 4e12, "flops_s": {"bf16": 7.9e14, "fp8": "not measured: no such type"}},
    "rates": [RATE, RATE | {"precision": "bf16", "seconds": NAN, "problem": "wrong: relative error inf"}],
    "engines": [{"model": "llama", "precision": "bf16", "emulator_error": 1e-3, "model_error": 2e-3, "top1": 1.0,
                 "differing": 0, "num_tokens": 16, "problem": ""}],
    "throughput": [{"who": "ingot bf16", "phase": "generation", "batch": 8, "tokens_per_step": 8, "seconds": 1e-3,
                    "device_s": NAN, "problem": ""},
                   {"who": "PyTorch compiled", "phase": "generation", "batch": 8, "tokens_per_step": 8, "seconds": NAN,
                    "device_s": NAN, "problem": "no time left"}],
}


def test_failures_are_ours() -> None:
    assert failures(RESULTS) == ["linear.test_gates[silu]: at (0, 1)",
                                 "linear 6144 x 4096, 8 rows, bf16, linear.fp8 64x16x128: wrong: relative error inf"]
    assert not failures({"throughput": RESULTS["throughput"]}), "what a peer cannot do is no failure"


def test_tables() -> None:
    text = as_text(RESULTS)
    for part in ("4000 GB/s", "790 T/s", "not measured: no such type", "2500", "62%", "8000", "no time left",
                 "failed:"):
        assert part in text, part
    markdown = as_markdown(RESULTS)
    assert "- GPU: NVIDIA H200, sm_90" in markdown and "| linear | 61 | 1 | 4 | 9.5 s |" in markdown
    assert "nothing failed" in as_text({"engines": RESULTS["engines"]})


@pytest.mark.skipif(why_no_gpu() is None, reason="this machine has a GPU")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([]) == 2
    assert "no NVIDIA driver" in capsys.readouterr().err


def test_requests_that_are_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert program.main(["--only", "kernles"]) == 2 and "unknown section 'kernles'" in capsys.readouterr().err
    assert program.main(["pack"]) == 2 and "needs --target and -o" in capsys.readouterr().err
    assert program.main(["pack", "--target", "h999", "-o", str(tmp_path / "x.zip")]) == 2
    assert "there is no GPU target 'h999'" in capsys.readouterr().err


def test_dry(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--dry", "--only", "rates,engines", "--target", "b200"]) == 0
    told = capsys.readouterr().out
    assert "nvfp4: linear.nvfp4" in told and "mixtral, bf16" in told and "kernels:" not in told


@pytest.mark.parametrize(("arch", "name", "target"), [
    ("sm_90", "NVIDIA H200", "h200"), ("sm_90", "NVIDIA H100 80GB HBM3", None),
    ("sm_80", "NVIDIA A100-SXM4-80GB", "a100"), ("sm_100", "NVIDIA B200", "b200"), ("sm_89", "NVIDIA L40S", "l40s")])
def test_which_target_a_gpu_is(arch: str, name: str, target: str | None) -> None:
    found = target_of(arch, name)
    assert found.gpu is not None and found.gpu.arch.name.rstrip("a") == arch
    assert target is None or found.name == target


def test_a_run_with_a_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """From the pack to the report, on the fake driver, for one case of the kernels."""
    target = find_target("h200")
    chosen = [case for case in list_cases() if case.name == "rope.test_static_scales"]
    kernels = kernels_of_cases(chosen, target.isa, lambda text: None)
    writer, known = PackWriter(tmp_path / "check.zip", target), dict[str, Any]()
    for kernel, compiled in Compiler(target).compile(kernels).items():
        writer.add(kernel, compiled)
        known |= {_digest(compiled.cubin): _runtime(kernel, compiled)}
    writer.finish()
    fake = FakeCuda(known, memory_bytes=1 << 30)
    fake.cuInit(0)
    monkeypatch.setattr(cuda_driver, "load_driver", lambda: Driver(fake))
    monkeypatch.setattr(sections, "list_cases", lambda: chosen)
    results, report = tmp_path / "results.json", tmp_path / "report.md"
    results.write_text(json.dumps({"ceilings": RESULTS["ceilings"]}))
    status = program.main(["--pack", str(tmp_path / "check.zip"), "--only", "kernels", "--target", "h200",
                           "--results", str(results), "--report", str(report)])
    told = capsys.readouterr()
    assert status == 0, told
    assert "nothing failed" in told.out and "Ceilings" in report.read_text(), "results of before are kept"
    assert json.loads(results.read_text())["kernels"]["summary"][0] | {"seconds": 0} == {
        "group": "rope", "passed": 1, "failed": 0, "skipped": 0, "seconds": 0}
    fake.assert_nothing_held()
    assert program.main(["--pack", str(tmp_path / "check.zip"), "--target", "a100"]) == 2
    assert "was made for h200 (sm_90a)" in capsys.readouterr().err
    (tmp_path / "bad.zip").write_bytes(b"no zip")
    assert program.main(["--pack", str(tmp_path / "bad.zip"), "--target", "h200"]) == 2
    assert Pack(tmp_path / "check.zip").facts["version"] == 1


def _digest(cubin: bytes) -> str:
    import hashlib

    return hashlib.sha256(cubin).hexdigest()


def _runtime(kernel: Any, compiled: Any) -> Any:
    from tools.gpu_check.runner import runtime_kernel

    return runtime_kernel(kernel, compiled)
