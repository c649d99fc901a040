"""A whole engine as compiled code: the cuda device over the fake driver, whose launches run on the machine for PTX."""
from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from ingot.compiler.build import BuildRequest, build
from ingot.compiler.gpu.interpret import Binding
from ingot.compiler.gpu.triton_compile import PtxCompiler
from ingot.compiler.targets import find_target
from ingot.plugins.gpu.kernel import GpuKernel, GpuLaunch
from ingot.runtime.devices.cuda_driver import Driver
from ingot.runtime.devices.gpu_kernels import Kernel, read_kernels
from ingot.runtime.engine import Engine
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.sampling import SamplingParams
from tests.runtime.devices import fake_cuda
from tools.ptx.runner import PtxRunner
from tools.small_models import save_random, small_config

PROMPT = [5, 99, 17, 200, 3]


@dataclass
class OnMachine:
    """A launch, in the place of one that the interpreter runs. Its memory is that of the fake driver."""

    fake: fake_cuda.FakeCuda
    runner: PtxRunner
    launch: GpuLaunch
    values: Mapping[str, Any]

    def run(self) -> None:
        held = {f"at {address:#x}": np.ctypeslib.as_array((ctypes.c_uint8 * region.size).from_address(address))
                for address, region in self.fake.device_memory.items()}
        found = self.runner.run([(self.launch, {name: self._binding(value) for name, value in self.values.items()})],
                                held)
        for name, array in held.items():
            array[:] = found[name]

    def _binding(self, value: Any) -> Binding:
        address = value[0] if isinstance(value, tuple) else value
        for begin, region in self.fake.device_memory.items():
            if isinstance(address, int) and begin <= address < begin + region.size:
                return f"at {begin:#x}", address - begin
        return address


@pytest.mark.slow
@pytest.mark.parametrize(("target", "arch", "precision"), [("a100", (8, 0), "int8"), ("rtx4090", (8, 9), "fp8")])
def test_tokens_of_the_emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, arch: tuple[int, int],
                                precision: str) -> None:
    save_random(small_config("llama"), tmp_path / "model")
    path = tmp_path / "small.engine"
    build(BuildRequest(model=str(tmp_path / "model"), target=target, precision=precision, output=path,
                       max_batch_size=2, max_num_tokens=8, max_seq_len=64, calibrate=False))
    with EngineFile.open(path) as file:
        kernels = read_kernels(file.plan).values()
        fake = fake_cuda.FakeCuda({hashlib.sha256(file.read(kernel.code)).hexdigest(): kernel for kernel in kernels},
                                  {kernel.module: file.read(kernel.source).decode() for kernel in kernels
                                   if kernel.source}, arch=arch)
    fake.cuInit(0)
    gpu = find_target(target).gpu
    assert gpu is not None
    with PtxCompiler(gpu.arch) as compiler:
        runner = PtxRunner(compiler)

        def on_machine(kernel: Kernel, grid: tuple[int, int, int], values: Sequence[Any],
                       sources: Mapping[str, str]) -> OnMachine:
            parameters = tuple((name, value[1] if isinstance(value, tuple) else str(kind))
                               for (name, kind), value in zip(kernel.parameters, values, strict=True))
            source = GpuKernel(kernel.symbol, kernel.module, kernel.function, parameters, kernel.constants,
                               kernel.num_warps, kernel.num_stages, source=sources.get(kernel.module, ""))
            names = [name for name, _ in kernel.parameters]
            return OnMachine(fake, runner, GpuLaunch(source, grid), dict(zip(names, values, strict=True)))
        monkeypatch.setattr(fake_cuda, "interpreted", on_machine)
        monkeypatch.setattr("ingot.runtime.devices.cuda.load_driver", lambda: Driver(fake))
        monkeypatch.setattr("ingot.runtime.devices.cuda.sleep", lambda seconds: None)
        found = {}
        for device in ("emulator", "cuda"):
            with Engine.load(path, device=device, kv_cache_tokens=64) as engine:
                answer = engine.generate(PROMPT, SamplingParams(max_tokens=3, temperature=0.0))
                found[device] = answer.token_ids, np.array(engine.logits(PROMPT))
    fake.assert_nothing_held()
    assert len(runner.kernels) > 5 and sum(runner.executed.values()) > 10_000
    assert found["cuda"][0] == found["emulator"][0]
    wanted, got = (found[device][1] for device in ("emulator", "cuda"))
    assert np.sqrt(np.mean((got - wanted) ** 2) / np.mean(wanted**2)) < 0.02
