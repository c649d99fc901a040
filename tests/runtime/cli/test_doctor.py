"""ingot doctor on machines with other GPUs, drivers and packages than this one."""
from __future__ import annotations

import importlib.metadata

import pytest

from ingot.runtime import amx
from ingot.runtime.cli import absent, doctor
from ingot.runtime.errors import WorkFailed


def test_gpus_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    import cuda.bindings

    from tests.runtime.devices.fake_cuda import FakeCuda

    monkeypatch.setattr(cuda.bindings, "driver", FakeCuda({}, num_gpus=2, memory_bytes=80 << 30))
    check = doctor._gpu()
    assert check.status == "ok"
    assert "cuda:1 Fake GPU, sm_90" in check.detail and "driver for CUDA 13.0" in check.detail
    assert "; cuda:0,1 reach each other's memory; " in check.detail
    monkeypatch.setattr(cuda.bindings, "driver", FakeCuda({}, num_gpus=2, apart=((1, 0),)))
    assert "none reaches another's memory" in doctor._gpu().detail
    monkeypatch.setattr(cuda.bindings, "driver", FakeCuda({}))
    assert "reach" not in doctor._gpu().detail
    monkeypatch.setattr(cuda.bindings, "driver", FakeCuda({}, version=12040))
    check = doctor._gpu()
    assert check.status == "warn" and "supports CUDA 12.4" in check.detail and "\n" not in check.detail


def test_tile_registers_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(what: str) -> None:
        raise WorkFailed(f"{what} needs tile registers, which are refused: a reason.\n  Build for less")

    monkeypatch.setattr(doctor, "cpu_features", lambda: frozenset({"avx2", "fma", "amx_tile", "amx_int8", "amx_bf16"}))
    monkeypatch.setattr(amx, "request_tiles", refuse)
    check = doctor._cpu()
    assert check.status == "warn" and "amx_int8 amx_bf16; cpu:x86-64-amx needs" in check.detail
    assert "a reason. Build for less" in check.detail
    monkeypatch.setattr(amx, "request_tiles", lambda what: None)
    assert doctor._cpu().status == "ok" and "refuses" not in doctor._cpu().detail


def test_one_version_of_triton() -> None:
    from ingot.runtime.devices.emulator import TRITON_VERSION

    assert absent.TRITON == TRITON_VERSION, "written twice, since the doctor runs where numpy is missing"


def test_compiler_of_gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, status, text in (("3.9.0", "ok", "triton 3.9.0"), ("3.6.0", "warn", "this is 3.6.0")):
        monkeypatch.setattr(doctor, "version", lambda name, found=found: found)
        assert doctor._gpu_compiler().status == status and text in doctor._gpu_compiler().detail

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", missing)
    assert "pip install --no-deps triton==3.9.0" in doctor._gpu_compiler().detail
