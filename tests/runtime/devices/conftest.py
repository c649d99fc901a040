"""A GPU engine on a fake CUDA driver."""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ingot.runtime.engine_file import EngineFile
from tests.runtime import mock_gpu_engine

if TYPE_CHECKING:
    from ingot.runtime.devices.cuda import CudaProgram

    from .fake_cuda import FakeCuda

Load = Callable[..., tuple["CudaProgram", "FakeCuda"]]


@pytest.fixture(scope="session")
def gpu_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mock_gpu_engine.write_engine(tmp_path_factory.mktemp("mock_gpu") / "mock.engine")


def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device sleeps through most of a step; the fake one does nothing meanwhile."""
    monkeypatch.setattr("ingot.runtime.devices.cuda.sleep", lambda seconds: None)


@pytest.fixture
def fake_driver(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeCuda]:
    """(engine, options) -> a driver that knows the engine's kernels, started."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    from ingot.runtime.devices.gpu_kernels import read_kernels

    from .fake_cuda import FakeCuda

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    no_sleep(monkeypatch)

    def made(engine: EngineFile, **options: Any) -> FakeCuda:
        plan_kernels = read_kernels(engine.plan).values()
        kernels = {hashlib.sha256(engine.read(kernel.code)).hexdigest(): kernel for kernel in plan_kernels}
        sources = {kernel.module: engine.read(kernel.source).decode() for kernel in plan_kernels if kernel.source}
        fake = FakeCuda(kernels, sources, **options)
        if fake.num_gpus:
            fake.cuInit(0)
        return fake
    return made


@pytest.fixture
def load(gpu_engine: Path, fake_driver: Callable[..., FakeCuda]) -> Iterator[Load]:
    """A program on a fake driver; after the test nothing may be held."""
    from ingot.runtime.devices.cuda import CudaProgram
    from ingot.runtime.devices.cuda_driver import Driver

    opened: list[tuple[EngineFile, CudaProgram, FakeCuda]] = []

    def loaded(kv_cache_tokens: int | None = 256, host_kv_tokens: int = 0, *, path: Path = gpu_engine,
               fraction: float = 0.9, **options: Any) -> tuple[CudaProgram, FakeCuda]:
        engine = EngineFile.open(path)
        fake = fake_driver(engine, **options)
        program = CudaProgram(engine, kv_cache_tokens, host_kv_tokens, kv_cache_fraction=fraction, driver=Driver(fake))
        opened.append((engine, program, fake))
        return program, fake

    yield loaded
    for engine, program, fake in opened:
        program.close()
        engine.close()
        fake.assert_nothing_held()
