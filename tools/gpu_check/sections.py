"""The sections one after the other; each one's results are kept as soon as it has ended."""
from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ingot.compiler.targets import Target
from ingot.runtime.devices import cuda_driver
from ingot.runtime.devices.cuda_driver import GpuInfo
from ingot.runtime.devices.cuda_memory import CudaContext
from ingot.runtime.errors import RequestError

from . import engines, team, throughput
from .cases import list_cases
from .ceilings import measure_ceilings
from .code import CodeSource, Pack, find_target, target_of
from .kernels import check_kernels, summary
from .pack import default_pack, make_pack
from .rates import measure_rates, rate_cases
from .runner import DeviceRunner

Progress = Callable[[str], None]


def run(arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """The results of all sections, those of earlier runs with them. Raises NoGpu before anything else is done."""
    driver = cuda_driver.load_driver()
    ordinal = _ordinal(arguments.device)
    gpu = cuda_driver.find_gpu(driver, ordinal)
    target = find_target(arguments.target) if arguments.target else target_of(gpu.arch, gpu.name)
    results = _earlier(arguments.results)
    results["facts"] = facts(gpu, target, int(driver.call("cuDriverGetVersion")))
    with ExitStack() as stack:
        source = _source(arguments, target, progress)
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ingot-gpu-check-")))
        context = CudaContext(driver, gpu)
        stack.callback(context.close)
        sections = Sections(source, target, gpu, DeviceRunner(context, source, target.isa),
                            folder, progress, arguments.model, driver)
        for section in arguments.only:
            begin = time.perf_counter()
            results[section] = getattr(sections, section)()
            progress(f"{section}: {time.perf_counter() - begin:.0f} s")
            arguments.results.write_text(json.dumps(results, indent=1))
    return results


class Sections:
    """One method a section; what it returns goes into a JSON file."""

    def __init__(self, source: CodeSource, target: Target, gpu: GpuInfo, runner: DeviceRunner, folder: Path,
                 progress: Progress, model: str | None = None, driver: cuda_driver.Driver | None = None) -> None:
        """model: a real checkpoint, for `engines`. driver: for `team`."""
        assert target.gpu is not None
        self.source, self.target, self.gpu, self.runner = source, target, gpu, runner
        self.folder, self.progress, self.figures, self.model = folder, progress, target.gpu, model
        self.driver = driver

    def kernels(self) -> dict[str, Any]:
        outcomes = check_kernels(list_cases(), self.runner, self.gpu.arch, self.progress)
        return {"summary": summary(outcomes), "outcomes": [asdict(outcome) for outcome in outcomes]}

    def ceilings(self) -> dict[str, Any]:
        import torch

        with torch.cuda.device(self.gpu.ordinal):
            return measure_ceilings(torch, self.progress)

    def rates(self) -> list[dict[str, Any]]:
        return [asdict(rate) for rate in
                measure_rates(rate_cases(self.target), self.runner, self.figures, self.progress)]

    def engines(self) -> list[dict[str, Any]]:
        device = f"cuda:{self.gpu.ordinal}"
        found = engines.check_engines(self.source, self.folder, engines.combinations(self.target), device,
                                      self.progress)
        if self.model is not None:
            found += engines.check_model(self.source, self.folder, self.model, device, self.progress)
        return [asdict(result) for result in found]

    def team(self) -> list[dict[str, Any]]:
        assert self.driver is not None
        return [asdict(result) for result in
                team.check_teams(self.source, self.folder, self.driver, self.gpu.ordinal, self.progress)]

    def throughput(self) -> list[dict[str, Any]]:
        import torch

        from . import torch_peer

        found = []
        for precision in throughput.precisions(self.target):
            who = f"ingot {precision}"
            stripped = self.source.member(f"engines/throughput.{precision}.engine", self.folder)
            if stripped is None:
                found.append(throughput.Speed(who, "generation", 1, 1, float("nan"), problem="not in the pack"))
                continue
            self.progress(f"weights of the large engine, {precision}")
            whole = throughput.with_weights(stripped, self.folder)
            found += throughput.engine_speeds(whole, who, self.gpu.ordinal)
            whole.unlink()
        model = torch_peer.load(throughput.checkpoint(self.folder), f"cuda:{self.gpu.ordinal}")
        for compiled in (False, True):
            found += torch_peer.peer_speeds(model, compiled, progress=self.progress)
        del model
        torch.cuda.empty_cache()
        return [asdict(speed) for speed in found]


def dry(sections: tuple[str, ...], target_name: str) -> list[str]:
    """What would be checked, a line each."""
    target = find_target(target_name)
    found = []
    if "kernels" in sections:
        cases = list_cases()
        found += [f"kernels: {len(cases)} cases", *(f"  {case.name}" for case in cases)]
    if "ceilings" in sections:
        found.append("ceilings: copy; products of bf16, fp16, fp32, int8, fp8")
    if "rates" in sections:
        found += [f"rates on {target.name}:", *(
            f"  {case.name}, {case.precision}: {', '.join(candidate.name for candidate in case.candidates)}"
            for case in rate_cases(target))]
    if "engines" in sections:
        found += ["engines:", *(f"  {family}, {precision}" for family, precision in engines.combinations(target))]
    if "team" in sections:
        found.append(f"team: a llama in bf16 divided among {', '.join(map(str, team.RANKS))} GPUs, where so many are")
    if "throughput" in sections:
        found.append(f"throughput: {throughput.MODEL.parameters / 1e9:.2f} billion parameters, "
                     f"{', '.join(throughput.precisions(target))}; generation of {throughput.BATCHES} sequences at "
                     f"{throughput.CONTEXT} tokens, a prompt of {throughput.PROMPT}; PyTorch eager and compiled")
    return found


def facts(gpu: GpuInfo, target: Target, driver_version: int) -> dict[str, Any]:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "none"
    return {"GPU": f"{gpu.name}, {gpu.arch}, {gpu.multiprocessors} multiprocessors, {gpu.memory_bytes / 2**30:.0f} GiB",
            "target": target.name, "driver": f"CUDA {driver_version // 1000}.{driver_version % 1000 // 10}",
            "Python": platform.python_version(),
            **{name: installed(name) for name in ("torch", "transformers", "triton", "cuda-bindings", "numpy")}}


def _source(arguments: argparse.Namespace, target: Target, progress: Progress) -> CodeSource:
    """The pack that was given, or one made here."""
    if arguments.pack is None:
        path = default_pack(target)
        make_pack(path, target, arguments.only, progress, arguments.model)
        return Pack(path)
    pack = Pack(arguments.pack)
    if pack.target.isa != target.isa:
        raise RequestError(f"{arguments.pack} was made for {pack.target.name} ({pack.target.isa}); this GPU is "
                           f"{target.name} ({target.isa}).\n  Make one for it: "
                           f"python -m tools.gpu_check pack --target {target.name} -o FILE")
    return pack


def _ordinal(device: str) -> int:
    name, _, number = device.partition(":")
    if name != "cuda" or not (number or "0").isdecimal():
        raise RequestError(f"--device is {device!r}; expected cuda:NUMBER")
    return int(number or 0)


def _earlier(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found
