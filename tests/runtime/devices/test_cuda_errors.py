"""What goes wrong on a GPU: the message says what is missing, and nothing is held afterwards."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from ingot.runtime.devices import cuda_driver, load_program
from ingot.runtime.devices.cuda import CudaProgram
from ingot.runtime.devices.cuda_driver import CudaError, Driver, NoGpu, find_gpu, list_gpus, load_driver
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.engine_format import EngineFormatError
from ingot.runtime.errors import IngotError, RequestError, WorkFailed
from ingot.runtime.program import EngineMismatch, step_logits
from tests.conftest import why_no_gpu
from tests.runtime import mock_gpu_engine as mock

from .conftest import Load
from .fake_cuda import FakeCuda, real
from .test_cuda import TOKENS, fill

if TYPE_CHECKING:
    Fake = Callable[..., FakeCuda]


def refused(fake_driver: Fake, path: Path, kind: type[IngotError], match: str, kv_cache_tokens: int | None = 256,
            change: Callable[[FakeCuda], object] = lambda fake: None, kv_cache_fraction: float = 0.9,
            ordinals: tuple[int, ...] = (), **options: Any) -> str:
    """Loading raises such an error, and leaves nothing behind."""
    with EngineFile.open(path) as engine:
        fake = fake_driver(engine, **options)
        change(fake)
        with pytest.raises(kind, match=match) as caught:
            CudaProgram(engine, kv_cache_tokens, 64, driver=Driver(fake), ordinals=ordinals,
                        kv_cache_fraction=kv_cache_fraction)
        assert type(caught.value) is kind
        fake.assert_nothing_held()
        return str(caught.value)


def test_every_call_may_fail(fake_driver: Fake, gpu_engine: Path) -> None:
    """Each function of the driver that loading calls, at its first and at its last call."""
    with EngineFile.open(gpu_engine) as engine:
        fake = fake_driver(engine)
        CudaProgram(engine, 256, 64, driver=Driver(fake)).close()
        fake.assert_nothing_held()
        counts = dict(fake.calls)
    quiet = {"cuInit", "cuGetErrorName", "cuGetErrorString", "cuFuncGetParamInfo"}
    released = {name for name in counts if "Free" in name or "Destroy" in name or name.endswith(("Release", "Unload"))}
    for name, count in counts.items():
        closing = name in ("cuStreamSynchronize", "cuCtxSetCurrent")  # the last calls are those of close()
        for number in () if name in quiet | released else {1} if closing else {1, count}:
            with EngineFile.open(gpu_engine) as engine:
                fake = fake_driver(engine)
                fake.fail(name, number, "CUDA_ERROR_UNKNOWN")
                try:
                    CudaProgram(engine, 256, 64, driver=Driver(fake)).close()
                except IngotError as error:
                    assert name in str(error) and "CUDA_ERROR_UNKNOWN" in str(error)
                else:
                    raise AssertionError(f"{name} failed, and nobody told")
                fake.assert_nothing_held()


def test_memory_runs_out_at_any_allocation(fake_driver: Fake, gpu_engine: Path) -> None:
    for number in range(1, 6):
        told = refused(fake_driver, gpu_engine, WorkFailed, "not enough memory on cuda:0",
                       change=lambda fake, number=number: fake.fail("cuMemAlloc", number))  # type: ignore[misc]
        for part in ("weights", "arena", "workspace", "KV cache of 256 tokens", "together", "free on the GPU now",
                     "KV of one sequence of full length", "--kv-cache-tokens", "CUDA_ERROR_OUT_OF_MEMORY"):
            assert part in told
    for function in ("cuGraphInstantiate", "cuGraphUpload", "cuGraphAddKernelNode"):
        refused(fake_driver, gpu_engine, WorkFailed, f"not enough memory on cuda:0 .*{function} failed",
                change=lambda fake, function=function: fake.fail(function, 1))  # type: ignore[misc]
    for number in (1, 2, 3):
        refused(fake_driver, gpu_engine, WorkFailed, "no pinned memory for",
                change=lambda fake, number=number: fake.fail("cuMemHostAlloc", number))  # type: ignore[misc]


def test_an_engine_that_does_not_fit_is_not_tried(fake_driver: Fake, gpu_engine: Path) -> None:
    seen: list[FakeCuda] = []
    refused(fake_driver, gpu_engine, WorkFailed, "the engine does not fit", 10**7, change=seen.append)
    assert "cuMemAlloc" not in seen[0].calls
    refused(fake_driver, gpu_engine, WorkFailed, "no block of the KV cache fits", None, kv_cache_fraction=1e-9)
    for fraction in (0.0, 1.5):
        with EngineFile.open(gpu_engine) as engine, pytest.raises(RequestError, match="above 0 and at most 1"):
            CudaProgram(engine, None, kv_cache_fraction=fraction)


def test_another_architecture(fake_driver: Fake, gpu_engine: Path, tmp_path: Path) -> None:
    told = refused(fake_driver, gpu_engine, EngineMismatch, r"was built for h200 \(sm_90a\)", arch=(8, 0))
    assert "cuda:0 is Fake GPU (sm_80)" in told and "ingot build mock --target NAME --precision bf16" in told
    told = refused(fake_driver, gpu_engine, EngineMismatch, "bytes of shared memory", shared_per_block=8 << 10)
    assert "has 8192" in told
    # The manifest says sm_80, the code is for sm_90a: what the driver says is told.
    path = mock.write_engine(tmp_path / "wrong.engine", target={"name": "a100", "kind": "cuda", "isa": "sm_80"})
    refused(fake_driver, path, EngineFormatError, "CUDA_ERROR_NO_BINARY_FOR_GPU", arch=(8, 0))


def test_which_gpu(fake_driver: Fake, gpu_engine: Path, load: Load) -> None:
    told = refused(fake_driver, gpu_engine, NoGpu, "there is no GPU cuda:3", ordinals=(3,), num_gpus=2)
    assert "cuda:1  Fake GPU, sm_90, 1 GiB" in told
    program, fake = load(num_gpus=2)
    assert program.gpu.ordinal == 0 and len(list_gpus(Driver(fake))) == 2
    assert find_gpu(Driver(fake), 1).multiprocessors == 132
    program.close()


@pytest.mark.parametrize(("options", "match"), [
    ({"version": 12080}, "supports CUDA 12.8; engines need CUDA 13.0"), ({"num_gpus": 0}, "No NVIDIA GPU is visible")])
def test_drivers_that_do_not_do(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], match: str) -> None:
    import cuda.bindings

    monkeypatch.setattr(cuda.bindings, "driver", FakeCuda({}, **options))
    with pytest.raises(NoGpu, match=match) as caught:
        load_driver()
    assert "--device emulator" in str(caught.value) and caught.value.exit_status == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "CUDA_VISIBLE_DEVICES is '7'" in cuda_driver._visible()


@pytest.mark.skipif(why_no_gpu() is None, reason="this machine has a GPU")
def test_a_machine_without_a_driver() -> None:
    with pytest.raises(NoGpu, match=r"no NVIDIA driver|does not start|No NVIDIA GPU"):
        load_driver()


@pytest.mark.skipif(why_no_gpu() is None, reason="this machine has a GPU")
def test_the_emulator_is_named_once_where_there_is_no_gpu(gpu_engine: Path) -> None:
    with EngineFile.open(gpu_engine) as engine, pytest.raises(NoGpu) as caught:
        load_program(engine)
    assert f"{gpu_engine} was built for h200; this machine has no" in str(caught.value)
    assert str(caught.value).count("--device emulator") == 1


def test_a_kernel_that_faults(load: Load) -> None:
    program, fake = load()
    fake.faulty = next(symbol for symbol in (kernel.symbol for kernel in fake.kernels.values()) if "sample" in symbol)
    program.launch(fill(program, 0, TOKENS))
    with pytest.raises(CudaError, match="cuEventSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
        program.wait()
    assert "ingot compare" in str(caught.value)
    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):  # the context is lost
        program.launch(fill(program, 1, TOKENS))
    program.close()
    fake.forget()


def test_a_launch_that_fails(load: Load) -> None:
    program, fake = load()
    for name in ("cuGraphLaunch", "cuEventRecord", "cuMemcpyHtoDAsync"):
        fake.fail(name, 1, "CUDA_ERROR_LAUNCH_FAILED")
        with pytest.raises(CudaError, match=f"{name} failed: CUDA_ERROR_LAUNCH_FAILED"):
            program.launch(fill(program, 0, TOKENS[:2]))
    step_logits(program, fill(program, 0, TOKENS[:2]))


def edited(tmp_path: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    return mock.write_engine(tmp_path / "edited.engine", edit_plan=edit)


def test_parameters_other_than_those_of_the_code(fake_driver: Fake, tmp_path: Path) -> None:
    def drop(plan: dict[str, Any]) -> None:
        symbol = next(symbol for symbol in plan["kernels"] if "embedding" in symbol)
        plan["kernels"][symbol]["parameters"].pop()
        for bucket in plan["buckets"]:
            bucket["launches"][0]["args"].pop()

    told = refused(fake_driver, edited(tmp_path, drop), EngineFormatError, "takes parameters of")
    assert "[8, 8, 8, 8, 8, 8]" in told and "[8, 8, 8, 8, 8]" in told and str(tmp_path) in told


@pytest.mark.parametrize(("change", "match"), [
    ({"swizzle": 1}, "more than the 32 of its swizzle"), ({"block_size": [64, 4]}, "expected a multiple of 16"),
    ({"elem_type": 15}, "element type 15 is unknown"), ({"swizzle": 9}, "swizzle 9 is unknown"),
    ({"block_size": [64]}, "1 extents of a copy, expected 2")])
def test_descriptors_that_the_hardware_does_not_have(fake_driver: Fake, tmp_path: Path, change: dict[str, Any],
                                                     match: str) -> None:
    def edit(plan: dict[str, Any]) -> None:
        symbol = next(symbol for symbol in plan["kernels"] if "tma" in symbol)
        plan["kernels"][symbol]["tensor_maps"][0] |= change

    refused(fake_driver, edited(tmp_path, edit), EngineFormatError, match)


def test_one_blob_of_two_sizes(fake_driver: Fake, tmp_path: Path) -> None:
    """The second weight would reach behind the first one's data."""
    def alias(plan: dict[str, Any]) -> None:
        plan["weights"]["other"] = plan["weights"]["matrix"] | {"size": 1 << 20}

    refused(fake_driver, edited(tmp_path, alias), EngineFormatError, "plan.weights.other: size 1048576")


def test_code_that_is_none(fake_driver: Fake, tmp_path: Path) -> None:
    def rename(plan: dict[str, Any]) -> None:
        next(iter(plan["kernels"].values()))["entry"] = "elsewhere"

    refused(fake_driver, edited(tmp_path, rename), EngineFormatError, "function elsewhere.*CUDA_ERROR_NOT_FOUND")


def test_errors_without_a_name() -> None:
    class Mute:
        CUresult = real.CUresult

        def cuGetErrorName(self, status: Any) -> tuple[Any, None]:
            return real.CUresult.CUDA_ERROR_INVALID_VALUE, None

        cuGetErrorString = cuGetErrorName

        def cuFails(self) -> tuple[Any]:
            return (real.CUresult.CUDA_ERROR_UNKNOWN,)

    with pytest.raises(CudaError, match=r"cuFails failed: CUDA error 999"):
        Driver(Mute()).call("cuFails")


def test_functions_that_a_driver_lacks() -> None:
    class FunctionNotFoundError(RuntimeError):
        """As cuda-bindings raise it."""

    class Old:
        def cuNew(self) -> tuple[Any]:
            raise FunctionNotFoundError("function cuNew is not found")

        def cuBroken(self) -> tuple[Any]:
            raise RuntimeError("something else")

    with pytest.raises(CudaError, match=r"cuNew failed: CUDA_ERROR_NOT_FOUND \(this driver has no such function"):
        Driver(Old()).call("cuNew")
    with pytest.raises(RuntimeError, match="something else"):
        Driver(Old()).call("cuBroken")
