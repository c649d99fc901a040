"""Makes a pack: everything that a check needs and that takes the compiler, on any machine, without a GPU."""
from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from ingot.compiler.gpu.interpret import Interpreter
from ingot.compiler.targets import Target
from ingot.plugins.gpu.kernel import GpuKernel
from ingot.runtime.errors import IngotError, RequestError
from ingot.runtime.folders import cache_folder

from . import engines, team, throughput
from .cases import Case, list_cases
from .code import LARGEST_PACK_BYTES, Compiler, PackWriter
from .kernels import Recorder
from .rates import rate_kernels

Progress = Callable[[str], None]


def make_pack(path: Path, target: Target, sections: tuple[str, ...], progress: Progress,
              model: str | None = None) -> int:
    """Writes the pack and returns its size. model: a checkpoint whose engines are wanted too.

    Raises RequestError if it is larger than it may be, WorkFailed if the model cannot be built."""
    compiler, writer = Compiler(target), PackWriter(path, target)
    kernels: list[GpuKernel] = []
    if "kernels" in sections:
        kernels += kernels_of_cases(list_cases(), target.isa, progress)
    if "rates" in sections:
        kernels += rate_kernels(target)
    progress(f"compile {len(set(kernels))} kernels for {target.isa}")
    for kernel, compiled in compiler.attempt(kernels).items():
        writer.add(kernel, compiled)
    with tempfile.TemporaryDirectory(prefix="ingot-gpu-check-") as name:
        folder = Path(name)
        if "engines" in sections:
            for file, member in engines.make(folder, target, engines.combinations(target), progress):
                writer.add_folder(file, member)
            if model is not None:
                progress(f"build {model}")
                for file, member in engines.make_model(folder, target, model):
                    writer.add_folder(file, member)
        if "team" in sections:
            for file, member in team.make(folder, target, progress):
                writer.add_folder(file, member)
        if "throughput" in sections:
            for precision in throughput.precisions(target):
                progress(f"build the large engine, {precision}")
                try:
                    file = throughput.build(folder, target, precision)
                except IngotError as error:
                    progress(f"left out: {precision}: {error}")
                    continue
                writer.add_folder(file, f"engines/{file.name}")
    facts = writer.finish(sections=list(sections))
    size = path.stat().st_size
    progress(f"{path}: {len(facts['kernels'])} kernels, {len(facts['refused'])} refused, {size / 1e6:.1f} MB")
    if size > LARGEST_PACK_BYTES:
        raise RequestError(f"{path} has {size / 1e6:.1f} MB; it should have at most {LARGEST_PACK_BYTES / 1e6:.0f}.\n"
                           "  Leave out a section: --only")
    return size


def kernels_of_cases(cases: list[Case], arch: str, progress: Progress) -> list[GpuKernel]:
    """What the cases launch on the architecture, found out by running them in the interpreter."""
    with Interpreter() as interpreter:
        recorder = Recorder(interpreter, arch)
        for number, case in enumerate(cases):
            try:
                case.run(recorder)
            except Exception as error:  # a test that fails here fails there too; its kernels are noted
                progress(f"{case.name} fails in the interpreter: {type(error).__name__}: {str(error)[:100]}")
            if number % 20 == 0:
                progress(f"kernels of the tests: {number} of {len(cases)} cases")
    return list(recorder.kernels)


def default_pack(target: Target) -> Path:
    """Where a pack that was made on the spot is kept."""
    folder = cache_folder() / "gpu_check"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{target.name}.zip"
