"""ingot inspect of GPU engines: kernels, instructions, memory, the GPUs they fit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ingot.runtime.cli import main
from tests.runtime import mock_gpu_engine as mock

GIB = 2**30
MEMORY = {"weights_bytes": 6 * GIB, "arena_bytes": GIB, "workspace_bytes": 4096, "fixed_bytes": 8 * GIB,
          "kv_block_size": 16, "kv_block_bytes": 16 << 20, "kv_bytes_per_token": 1 << 20,
          "kv_bytes_per_token_beyond_windows": 1 << 20, "kv_tables": [{"layers": 1, "window": None}]}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The manifest tells of its two linear kernels what a build would."""
    names = {launch.kernel.symbol for tokens in mock.BUCKETS for launch, _, _ in mock.launches(tokens)}
    split, tma = sorted(name for name in names if "residual" in name)
    kernels = [
        {"name": split, "op": "linear", "tactic": "linear.bf16 32x16x64 split 2", "tuned_by": "model",
         "launches": {"4": 1}, "seconds_model": 2.5e-6, "refused": [{"tactic": "x", "reason": "spills"}],
         "registers": 40, "spill_stores": 0, "spill_loads": 0, "stack_bytes": 0, "shared_bytes": 51200,
         "blocks_per_sm": 4, "matrix": {"HGMMA.64x16x16.F32.BF16": 8}, "precision": "bf16", "phase": "generation"},
        {"name": tma, "op": "linear", "tactic": "linear.bf16 64x64x64 tma", "tuned_by": "model", "launches": {"16": 1},
         "seconds_model": 3e-6, "refused": [], "registers": 90, "spill_stores": 2, "spill_loads": 3, "stack_bytes": 16,
         "shared_bytes": 0, "blocks_per_sm": 2, "matrix": {}, "precision": "bf16", "phase": "context"}]
    return mock.write_engine(tmp_path_factory.mktemp("inspect") / "mock.engine", kernels=kernels, memory=MEMORY,
                             launches_per_layer={"16": 8, "4": 5})


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    status = main(["inspect", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def facts(capsys: pytest.CaptureFixture[str], *arguments: Any) -> Any:
    status, out, err = run(capsys, *arguments, "--json")
    assert status == 0, err
    return json.loads(out)


def test_summary_without_a_gpu(capsys: pytest.CaptureFixture[str], engine: Path,
                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    found = facts(capsys, engine)
    assert found["why_not_here"] and found["kv_tokens_that_fit_here"] == 0
    text = run(capsys, engine)[1]
    assert "does not run on this machine, but for --device emulator" in text
    assert "a layer, by the tokens of a step: 4: 5, 16: 8" in text and f"ingot inspect {engine} --fits h200" in text


def test_kernels(capsys: pytest.CaptureFixture[str], engine: Path) -> None:
    assert [kernel["registers"] for kernel in facts(capsys, engine, "--kernels")] == [40, 90]
    split, tma = run(capsys, engine, "--kernels")[1].splitlines()[-2:]
    assert split.split()[:9] == ["linear.bf16", "32x16x64", "split", "2", "1", "0", "2.5", "40", "0"]
    assert "51.20 kB" in split and "8 HGMMA.64x16x16.F32.BF16" in split
    assert tma.split()[3:7] == ["0", "1", "3.0", "90"] and tma.split()[7] == "5", "spills: two stores, three loads"


def test_instructions_of_a_kernel(capsys: pytest.CaptureFixture[str], engine: Path) -> None:
    (name,) = {launch.kernel.symbol for launch, _, _ in mock.launches(4) if "residual" in launch.kernel.symbol}
    for wanted in (name, "s2_residual"):
        found = facts(capsys, engine, "--sass", wanted)
        assert found["name"] == name and found["registers"] == 40 and found["member"] == f"code/{name}.cubin"
        assert "HMMA.16816.F32.BF16" in found["sass"], "the code itself, not what the manifest says of it"
    text = run(capsys, engine, "--sass", "s2_residual")[1]
    assert "8 HGMMA.64x16x16.F32.BF16" in text and "1 tactics" in text and "\n        /*0000*/" in text
    assert "MMA" not in facts(capsys, engine, "--sass", "embedding")["sass"]


@pytest.mark.parametrize(("wanted", "told"), [("linear", "several kernels have 'linear' in their names"),
                                              ("conv", "no kernel has 'conv' in its name")])
def test_names_of_no_kernel_or_of_several(capsys: pytest.CaptureFixture[str], engine: Path, wanted: str,
                                          told: str) -> None:
    status, _, err = run(capsys, engine, "--sass", wanted)
    assert status == 2 and told in err and "Traceback" not in err
    assert ("embedding" in err) == (wanted == "conv"), "the names that fit, else all"


def test_a_cpu_engine_has_no_such_code(capsys: pytest.CaptureFixture[str], mock_path: Path) -> None:
    status, _, err = run(capsys, mock_path, "--sass", "embed")
    assert status == 2 and "--sass shows that of GPUs" in err


def test_what_fits(capsys: pytest.CaptureFixture[str], engine: Path) -> None:
    found = facts(capsys, engine, "--fits", "24GiB")
    (gpu,) = found["gpus"]
    assert found["fixed_bytes"] == 8 * GIB and found["kv_bytes_of_longest_sequence"] == 64 << 20
    assert gpu["memory_bytes"] == 24 * GIB and gpu["left_bytes"] == 16 * GIB and gpu["fits"]
    assert gpu["kv_tokens"] == int(0.9 * 16 * GIB) >> 20 and gpu["longest_sequences"] == gpu["kv_tokens"] // 64
    (small,) = facts(capsys, engine, "--fits", "6.5 GB")["gpus"]
    assert not small["fits"] and small["memory_bytes"] == 6_500_000_000 and small["kv_tokens"] == 0
    assert "no, 2.090 GB too few" in run(capsys, engine, "--fits", "6.5 GB")[1]


def test_what_fits_on_known_gpus(capsys: pytest.CaptureFixture[str], engine: Path) -> None:
    (h200,) = facts(capsys, engine, "--fits", "h200")["gpus"]
    assert h200["memory_bytes"] == 141 * GIB and h200["runs_code"]
    every = {gpu["gpu"]: gpu for gpu in facts(capsys, engine, "--fits", "all")["gpus"]}
    assert len(every) > 10 and every["h200"] == h200
    assert every["h100-sxm"]["runs_code"] and not every["a100"]["runs_code"] and not every["b200"]["runs_code"]
    status, _, err = run(capsys, engine, "--fits", "h2000")
    assert status == 2 and "unknown GPU 'h2000'" in err and "h200" in err


def test_known_gpus_come_with_the_compiler(capsys: pytest.CaptureFixture[str], engine: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ingot.compiler.targets", None)
    status, _, err = run(capsys, engine, "--fits", "h200")
    assert status == 2 and "--fits 80GiB" in err
    assert run(capsys, engine, "--fits", "80GiB")[0] == 0


def test_memory_and_layers(capsys: pytest.CaptureFixture[str], engine: Path) -> None:
    found = facts(capsys, engine, "--memory")
    assert found["workspace_bytes"] == 4096 and [entry["launches"] for entry in found["buckets"]] == [4, 4]
