"""tools/gpu_check on the fake driver: kernels' cases, rates, packs, and what it says without a GPU."""
from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from ingot.compiler.gpu.triton_compile import CompiledKernel
from ingot.plugins.gpu.kernel import GpuKernel
from ingot.runtime.devices.cuda_driver import Driver, find_gpu
from ingot.runtime.devices.cuda_memory import CudaContext
from tests.runtime.devices.fake_cuda import FakeCuda
from tools.gpu_check.cases import Case, list_cases, stand_in
from tools.gpu_check.code import Compiler, NoCode, find_target
from tools.gpu_check.kernels import check_kernels, device_tolerance, multiplies_fp8
from tools.gpu_check.rates import measure_rates, rate_cases
from tools.gpu_check.runner import DeviceRunner, GuardTouched, runtime_kernel

H200 = find_target("h200")


class Learning:
    """Compiles, and tells the fake driver what it has compiled."""

    def __init__(self, fake: FakeCuda) -> None:
        self.fake, self.compiler = fake, Compiler(H200)

    def __call__(self, kernel: GpuKernel) -> CompiledKernel:
        compiled = self.compiler(kernel)
        self.fake.kernels[hashlib.sha256(compiled.cubin).hexdigest()] = runtime_kernel(kernel, compiled)  # type: ignore[index]
        return compiled


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceRunner]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    fake = FakeCuda({}, memory_bytes=4 << 30)
    fake.cuInit(0)
    driver = Driver(fake)
    context = CudaContext(driver, find_gpu(driver, 0))
    yield DeviceRunner(context, Learning(fake), H200.isa)
    context.close()
    fake.assert_nothing_held()


def case(name: str) -> Case:
    (found,) = [one for one in list_cases() if one.name == name]
    return found


def test_cases_are_those_of_the_tests() -> None:
    cases = list_cases()
    names = [one.name for one in cases]
    assert len(names) == len(set(names)) > 150
    assert {name.partition(".")[0] for name in names} == {"linear", "attention", "rope", "rows", "experts", "sampling",
                                                          "layer"}
    assert "linear.test_formats[False-fp8-fp8]" in names or "linear.test_formats[fp8-fp8-False]" in names


def test_kernels_pass_on_the_device(runner: DeviceRunner) -> None:
    wanted = ("linear.test_residual_and_rows_of_logits", "linear.test_groups_and_minimums[split-fp8-int4_g32m",
              "rope.test_static_scales", "rows.test_rows")
    chosen = [next(one for one in list_cases() if one.name.startswith(name)) for name in wanted]
    outcomes = check_kernels(chosen, runner, "sm_90")
    assert [(o.status, o.detail) for o in outcomes] == [("passed", "")] * len(wanted)


def test_what_fails_is_told(runner: DeviceRunner) -> None:
    def wrong(interpreter: Any) -> None:
        raise AssertionError("at (0, 1): got 1.0, wanted 2.0\nand more")

    def missing(interpreter: Any) -> None:
        raise NoCode("not for sm_90a")

    module = case("linear.test_residual_and_rows_of_logits").module
    outcomes = check_kernels([Case("a.wrong", module, wrong), Case("a.missing", module, missing)], runner, "sm_90")
    assert [(o.status, o.detail) for o in outcomes] == [
        ("failed", "AssertionError: at (0, 1): got 1.0, wanted 2.0 | and more"), ("skipped", "not for sm_90a")]


def test_a_device_that_fails_ends_the_section(runner: DeviceRunner) -> None:
    fake = runner.context.driver.api
    cases = [case("rope.test_static_scales"), case("linear.test_residual_and_rows_of_logits")]
    fake.fail("cuLaunchKernelEx", 1, "CUDA_ERROR_LAUNCH_FAILED")
    outcomes = check_kernels(cases, runner, "sm_90")
    assert len(outcomes) == 1 and "CUDA_ERROR_LAUNCH_FAILED" in outcomes[0].detail


def test_writing_behind_an_array_is_found(runner: DeviceRunner) -> None:
    with runner.context.temporary():
        held = runner.hold({"x": np.arange(5, dtype=np.int32), "y": np.zeros(3, np.uint8)})
        assert runner._fetched(held)["x"].tolist() == [0, 1, 2, 3, 4]
        address, _ = held.places["y"]
        runner.context.clear(address + 3, 1)
        with pytest.raises(GuardTouched, match="wrote 0 bytes behind y, an array of 3"):
            runner._fetched(held)


def test_tolerances_of_a_device(runner: DeviceRunner) -> None:
    one = case("linear.test_residual_and_rows_of_logits")
    original = one.module.assert_close
    got, wanted = np.array([1.0, 1.00005]), np.array([1.0, 1.0])
    with pytest.raises(AssertionError):
        original(got, wanted, "fp32")
    with device_tolerance(one, runner, "sm_90"):
        one.module.assert_close(got, wanted, "fp32")
        with pytest.raises(AssertionError):
            one.module.assert_close(got * 1.001, wanted, "fp32")
    assert one.module.assert_close is original


def test_rates_are_checked_and_timed(runner: DeviceRunner) -> None:
    assert H200.gpu is not None
    cases = [one for one in rate_cases(H200, ((80, 256),), (3,), ((2, 1, 40), (1, 10, 20)), (4, 2, 32))
             if one.precision in ("fp8", "w4a8")]
    assert len(cases) == 2 + 2
    rates = measure_rates(iter(cases), runner, H200.gpu, most_copies=2)
    for rate in rates:
        assert not rate.problem and rate.seconds > 0 and rate.error < 0.02 and rate.flops > 0, rate
    assert {rate.rank for rate in rates} == {0, 1}


def test_wrong_results_are_no_rates(runner: DeviceRunner) -> None:
    assert H200.gpu is not None
    (one,) = [c for c in rate_cases(H200, ((80, 256),), (3,), (), (4, 2, 32)) if c.precision == "bf16"]
    broken = type(one)(**vars(one) | {"error": lambda outputs: float("inf")})
    rates = measure_rates(iter([broken]), runner, H200.gpu, most_copies=1)
    assert all("wrong: relative error inf" in rate.problem for rate in rates)


def test_which_kernels_multiply_fp8() -> None:
    assert H200.gpu is not None
    kernels = {c.precision: c.candidates[0].launches[0].kernel for c in rate_cases(H200, ((80, 256),), (3,), ())}
    assert {precision for precision, kernel in kernels.items() if multiplies_fp8(kernel)} == {"fp8", "w4a8"}


def test_without_pytest() -> None:
    pytest_like = stand_in()

    @pytest_like.mark.slow
    @pytest_like.mark.parametrize("a", [1, pytest_like.param(2, marks=pytest_like.mark.slow)])
    def test_something(interpreter: Any, a: int) -> None:
        pass

    assert [mark.name for mark in test_something.pytestmark] == ["parametrize", "slow"]


def test_pack_and_unpack(tmp_path: Path) -> None:
    from tools.gpu_check.code import Pack, PackWriter

    (one, *_) = [c.candidates[0].launches[0].kernel for c in rate_cases(H200, ((80, 256),), (3,), ())]
    other = next(c.candidates[0].launches[0].kernel for c in rate_cases(H200, ((96, 256),), (3,), ()))
    compiled = Compiler(H200)(one)
    writer = PackWriter(tmp_path / "check.zip", H200)
    writer.add(one, compiled)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    writer.add_folder(tmp_path / "model", "models/tiny")
    writer.finish()
    pack = Pack(tmp_path / "check.zip")
    assert pack.target.name == "h200" and pack(one) == compiled
    with pytest.raises(NoCode, match="the pack does not have it"):
        pack(other)
    unpacked = pack.member("models/tiny", tmp_path / "out")
    assert unpacked is not None and (unpacked / "config.json").read_text() == "{}"
    assert pack.member("models/other", tmp_path) is None
