"""The table of what kernels compile to."""
from __future__ import annotations

from dataclasses import replace

import pytest

from ingot.compiler.targets import find_target
from tools import gpu_table


def test_rows_tell_the_preferred_kernel() -> None:
    gpu = find_target("h200").gpu
    assert gpu is not None
    only = replace(gpu, arch=replace(gpu.arch, precisions={"fp8": "QGMMA"}))
    row, = gpu_table.rows(only, [8], 4096, 4096)
    arch, precision, tokens, kernel, matrix, registers, spills, *_ = row
    assert (arch, precision, tokens, spills) == ("sm_90a", "fp8", "8", "0")
    assert "split" in kernel and "QGMMA.64x16x32.F32.E4M3.E4M3" in matrix and 0 < int(registers) < 256


def test_problems_follow_the_precision() -> None:
    h200, a100 = find_target("h200").gpu, find_target("a100").gpu
    assert h200 is not None and a100 is not None
    assert gpu_table.problem("w4a8", h200, 8, 64, 128).activation == "fp8"
    assert gpu_table.problem("w4a8", a100, 8, 64, 128).activation == "int8"
    assert gpu_table.problem("int4", a100, 8, 64, 128).activation == "bf16"


def test_unknown_architectures_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_table", "sm_10"])
    with pytest.raises(SystemExit) as caught:
        gpu_table.main()
    assert caught.value.code == 2 and "sm_90a" in capsys.readouterr().err
