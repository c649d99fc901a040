"""Profiles of a GPU engine, on the fake driver; its clock gives every launch the same time."""
from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from ingot.runtime.devices.cuda_driver import Driver
from ingot.runtime.devices.gpu_kernels import read_kernels
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.errors import RequestError
from ingot.runtime.profile import gpu_ceilings, report
from ingot.runtime.profile.work import Phase, work_of
from tests.conftest import why_no_gpu
from tests.runtime import mock_gpu_engine as mock
from tests.runtime.devices.conftest import no_sleep
from tests.runtime.devices.fake_cuda import FakeCuda
from tests.runtime.devices.fake_cuda_memory import STEP_MS


@pytest.fixture
def engine(tmp_path: Path) -> EngineFile:
    return EngineFile.open(mock.write_engine(tmp_path / "mock.engine"))


@pytest.fixture
def fake(engine: EngineFile, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    kernels = {hashlib.sha256(engine.read(kernel.code)).hexdigest(): kernel
               for kernel in read_kernels(engine.plan).values()}
    found = FakeCuda(kernels)
    found.cuInit(0)
    for module in ("ingot.runtime.devices.cuda", "ingot.runtime.profile.gpu_ceilings"):
        monkeypatch.setattr(f"{module}.load_driver", lambda: Driver(found))
    monkeypatch.setattr(report, "_SECONDS", 0.0)
    no_sleep(monkeypatch)
    return found


def test_profile(engine: EngineFile, fake: FakeCuda) -> None:
    facts = report.profile_engine(engine, 12, None, lambda text: None, None)
    assert facts["device"] == "cuda:0" and facts["num_workers"] is None
    generation = facts["phases"][0]
    launches = {row["name"]: row["launches"] for row in generation["operator"]}
    assert launches == {"embedding": 1, "linear": 2, "sample": 1}
    whole = sum(row["num_bytes"] for row in facts["phases"][-1]["operator"])
    assert whole > mock.MATRIX.nbytes + mock.HEAD.nbytes, "also of matrices that are read by descriptors"
    times = {row["name"]: row["seconds"] / row["launches"] for row in generation["operator"]}
    assert set(times) == {"embedding", "linear", "sample"}
    assert all(time == pytest.approx(2e-3 * STEP_MS) for time in times.values()), "a launch and its event"
    text = report.profiles_text(facts, ["operator", "part"])
    assert "measured now on cuda:0" in text and "linear" in text
    fake.assert_nothing_held()


def test_memory_bandwidth(fake: FakeCuda) -> None:
    found = gpu_ceilings.measure_gpu_ceilings(0)
    assert found.read_bytes_s == pytest.approx(2 * ((1 << 30) // 8) / (2e-3 * STEP_MS))
    assert not found.operations_s
    fake.assert_nothing_held()


def test_roofline(engine: EngineFile, fake: FakeCuda) -> None:
    facts = report.engine_roofline(engine)
    assert facts["phases"][0]["bytes"] > 0 and facts["phases"][0]["least_s"] > 0
    assert "read and written by a copy" in report.roofline_text(facts)


@pytest.mark.skipif(why_no_gpu() is None, reason="this machine has a GPU")
def test_roofline_without_a_gpu(engine: EngineFile) -> None:
    facts = report.engine_roofline(engine)
    assert facts["ceilings"] is None and "no NVIDIA driver" in facts["why_not_here"]
    assert "No times: this machine has no NVIDIA driver" in report.roofline_text(facts)


def test_the_emulator_tells_no_times(engine: EngineFile) -> None:
    with pytest.raises(RequestError, match=r"the emulator tells nothing about time[\s\S]*inspect .* --kernels"):
        report.profile_engine(engine, 12, None, lambda text: None, "emulator")


def test_gates_multiply_twice() -> None:
    plan = {"weights": {"w": {"size": 640, "shape": [2 * 8, 20], "scheme": "bf16"}}}
    launch = {"op": "linear", "args": [["arena", 0], ["weight", "w"]],
              "writes": {"y": {"arg": 0, "shape": [1, "T", 8], "dtype": "bf16"}}}
    assert work_of(plan, launch, Phase("", 3, 1, 10)).multiplies == 3 * 16 * 20
    heads = {**launch, "writes": {"y": {"arg": 0, "shape": ["T", 2, 8], "dtype": "bf16"}}}
    assert work_of(plan, heads, Phase("", 3, 1, 10)).multiplies == 3 * 16 * 20
