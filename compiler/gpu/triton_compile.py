"""Triton ahead of time: kernels x an architecture -> cubins, without a GPU.

Kernels are compiled by worker processes, so that triton is imported in a clean one: its switches are environment
variables, and a process that interprets kernels cannot compile. The same kernel gives the same bytes on every machine
and in every folder (line tables, which hold paths, are left out), and is compiled once: a cache on disk is addressed by
everything that takes part.
"""
from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ingot.plugins.gpu.kernel import GpuKernel
from ingot.plugins.gpu.sources import source_digest
from ingot.runtime.errors import WorkFailed
from ingot.runtime.folders import cache_folder

from ..targets import Architecture
from .disassemble import count_instructions, disassemble, matrix_instructions, resources, spills, tool
from .programmatic_launch import waits_first

CACHE_VERSION = 3


class CompileError(WorkFailed):
    """Triton or ptxas refused a kernel, or the kernel needs more than the architecture has."""


@dataclass(frozen=True)
class CompiledKernel:
    """entry        name of the function in the cubin
    registers    of a thread; stack_bytes of a thread
    spill_stores, spill_loads  instructions that move registers to and from local memory
    shared_bytes dynamic shared memory that a launch must ask for
    num_warps    warps of a block that the launch asks for
    cluster      blocks of a cluster
    scratch_bytes, scratch_align  global memory of each block, passed as the last but one argument; the last one, for
                 profiling, is null
    tensor_maps  for each descriptor parameter what the driver must be told: swizzle, element size and type, block
    matrix       matrix instruction -> how often it stands in the code
    programmatic_launch  may be started while the kernel before it runs: it waits for its end itself
    cubin        the code
    """

    entry: str
    arch: str
    registers: int
    stack_bytes: int
    spill_stores: int
    spill_loads: int
    shared_bytes: int
    num_warps: int
    cluster: int
    scratch_bytes: int
    scratch_align: int
    tensor_maps: tuple[dict[str, Any], ...]
    matrix: dict[str, int]
    programmatic_launch: bool
    cubin: bytes

    def occupancy(self, arch: Architecture) -> int:
        """Blocks of this kernel that one multiprocessor holds at a time."""
        return blocks_held(arch, self.registers, self.shared_bytes, self.num_warps)

    def to_json(self) -> dict[str, Any]:
        """Everything but the code, for the manifest."""
        return {name: value for name, value in asdict(self).items() if name != "cubin"}


def blocks_held(arch: Architecture, registers: int, shared_bytes: int, num_warps: int) -> int:
    """Blocks that a multiprocessor holds at a time. Registers are given out in eights, and every block's shared memory
    comes with one more kilobyte (CUDA C++ Programming Guide)."""
    by_registers = arch.registers_per_sm // (max(1, -(-registers // 8)) * 8 * 32 * num_warps)
    by_shared = arch.shared_per_sm // (shared_bytes + 1024)
    return min(by_registers, by_shared, arch.threads_per_sm // (32 * num_warps), arch.blocks_per_sm)


def default_cache() -> Path:
    """The user's cache folder of compiled kernels."""
    return cache_folder() / "kernels"


def compile_kernels(kernels: Iterable[GpuKernel], arch: Architecture, cache: Path | None = None, jobs: int = 1,
                    progress: Callable[[str], None] = lambda symbol: None) -> dict[GpuKernel, CompiledKernel]:
    """Every kernel compiled for the architecture, by `jobs` processes at a time; those that are in the cache come
    from there. Raises CompileError for the first kernel that cannot be compiled or does not fit."""
    done: dict[GpuKernel, CompiledKernel] = {}
    for kernel, compiled in try_compile(kernels, arch, cache, jobs, progress).items():
        if isinstance(compiled, CompileError):
            raise compiled
        done[kernel] = compiled
    return done


def try_compile(kernels: Iterable[GpuKernel], arch: Architecture, cache: Path | None = None, jobs: int = 1,
                progress: Callable[[str], None] = lambda symbol: None,
                ) -> dict[GpuKernel, CompiledKernel | CompileError]:
    """As compile_kernels, with the error in the place of each kernel that cannot be compiled or does not fit."""
    cache = cache or default_cache()
    done: dict[GpuKernel, CompiledKernel | CompileError] = {}
    waiting: dict[str, list[GpuKernel]] = {}
    for kernel in dict.fromkeys(kernels):
        key = cache_key(kernel, arch)
        if (found := _read(cache, key)) is not None:
            done[kernel] = found
        else:
            waiting.setdefault(key, []).append(kernel)
    workers: SimpleQueue[_Worker] = SimpleQueue()
    started = [_Worker() for _ in range(min(jobs, len(waiting)))]
    for worker in started:
        workers.put(worker)

    def one(key: str, kernel: GpuKernel) -> CompiledKernel | CompileError:
        worker = workers.get()
        try:
            progress(kernel.symbol)
            compiled = _compile(kernel, arch, worker)
        except CompileError as error:
            return error
        finally:
            workers.put(worker)
        _write(cache, key, compiled)
        return compiled

    try:
        with ThreadPoolExecutor(max(1, len(started))) as pool:
            for (_, same), compiled in zip(waiting.items(), pool.map(
                    lambda item: one(item[0], item[1][0]), waiting.items()), strict=True):
                done |= dict.fromkeys(same, compiled)
    finally:
        for worker in started:
            worker.close()
    return {kernel: _misfit(kernel, compiled, arch) or compiled for kernel, compiled in done.items()}


def cache_key(kernel: GpuKernel, arch: Architecture) -> str:
    """SHA-256 over everything that the bytes depend on. The compiler's programs come with triton, in its version."""
    parts = {"cache": CACHE_VERSION, "triton": version("triton"), "arch": arch.name, "kernel": kernel.to_json(),
             "order": [name for name, _ in kernel.parameters], "source": source_digest(kernel.module, kernel.source)}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class PtxKernel:
    """What a cubin is assembled from, for tools that read or run it. ptx: the text; the rest as in CompiledKernel."""

    ptx: str
    shared_bytes: int
    num_warps: int
    scratch_bytes: int
    tensor_maps: tuple[dict[str, Any], ...]


class PtxCompiler:
    """Compiles kernels for an architecture one by one, as compile_kernels does; what was compiled is kept in a folder
    of its own. To be used as a context."""

    def __init__(self, arch: Architecture, cache: Path | None = None) -> None:
        self.arch = arch
        self._cache = cache or cache_folder() / "ptx"
        self._worker: _Worker | None = None

    def __enter__(self) -> PtxCompiler:
        return self

    def __exit__(self, *details: object) -> None:
        if self._worker is not None:
            self._worker.close()

    def __call__(self, kernel: GpuKernel) -> PtxKernel:
        """Raises CompileError if it cannot be compiled or needs more shared memory than there is."""
        path = self._cache / f"{cache_key(kernel, self.arch)}.json"
        try:
            entry = json.loads(path.read_text())
        except (OSError, ValueError):
            entry = self._compile(kernel, path)
        found = PtxKernel(**entry | {"tensor_maps": tuple(entry["tensor_maps"])})
        if found.shared_bytes > self.arch.shared_per_block:
            raise CompileError(f"kernel {kernel.symbol} needs {found.shared_bytes} bytes of shared memory; a block of "
                               f"{self.arch.name} has {self.arch.shared_per_block}")
        return found

    def _compile(self, kernel: GpuKernel, path: Path) -> dict[str, Any]:
        self._worker = self._worker or _Worker()
        answer = self._worker.ask({"kernel": kernel.to_json(), "source": source_digest(kernel.module, kernel.source),
                                   "capability": self.arch.capability, "ptx": True})
        if "error" in answer:
            raise CompileError(f"kernel {kernel.symbol} does not compile for {self.arch.name}: {answer['error']}")
        metadata = answer["metadata"]
        entry = {"ptx": answer["ptx"], "shared_bytes": metadata["shared"], "num_warps": metadata["num_warps"],
                 "scratch_bytes": metadata["global_scratch_size"], "tensor_maps": metadata["tensordesc_meta"] or ()}
        with contextlib.suppress(OSError):  # a cache that cannot be written is no reason to fail
            path.parent.mkdir(parents=True, exist_ok=True)
            sibling = path.with_suffix(f".{os.getpid()}")
            sibling.write_text(json.dumps(entry))
            os.replace(sibling, path)
        return entry


class _Worker:
    """One compiling process. Its environment holds nothing that would change what triton does."""

    def __init__(self) -> None:
        tool("ptxas")  # tells that triton is missing, before a process is started
        self._folder = tempfile.TemporaryDirectory(prefix="ingot-triton-")
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        env = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PTXAS_", "LLVM_"))}
        env |= {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_CACHE_DIR": self._folder.name, "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen([sys.executable, "-m", "ingot.compiler.gpu.worker"], env=env, text=True,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self._stderr.seek(0)
        told = self._stderr.read().strip().splitlines()[-8:]
        return {"error": f"the compiling process ended (exit status {self._process.wait()}): " + " | ".join(told)}

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._stderr.close()
        self._folder.cleanup()


def _compile(kernel: GpuKernel, arch: Architecture, worker: _Worker) -> CompiledKernel:
    """With as many registers as a thread may have where registers spill otherwise: left alone, the assembler now and
    then spills a few to hold more blocks. Raises CompileError."""
    def ask(kernel: GpuKernel) -> CompiledKernel:
        return _finish(kernel, arch, worker.ask({
            "kernel": kernel.to_json(), "source": source_digest(kernel.module, kernel.source),
            "capability": arch.capability}))

    compiled = ask(kernel)
    most = min(255, arch.registers_per_sm // (32 * compiled.num_warps) // 8 * 8)
    if compiled.spill_stores and kernel.max_registers is None and compiled.registers < most:
        return min(compiled, ask(replace(kernel, max_registers=most)), key=lambda found: found.spill_stores)
    return compiled


def _finish(kernel: GpuKernel, arch: Architecture, answer: dict[str, Any]) -> CompiledKernel:
    """The worker's answer and what the code itself tells."""
    if "error" in answer:
        lines = [line for line in answer["error"].splitlines() if line.strip()]
        shown = lines if len(lines) <= 12 else [*lines[:4], "…", *lines[-7:]]
        raise CompileError(f"kernel {kernel.symbol} ({kernel.module}.{kernel.function}) does not compile for "
                           f"{arch.name}:\n  " + "\n  ".join(shown))
    cubin, metadata = base64.b64decode(answer["cubin"]), answer["metadata"]
    sass = disassemble(cubin)
    used, counts = resources(cubin), count_instructions(sass)
    stores, loads = spills(counts)
    return CompiledKernel(
        entry=metadata["name"], arch=arch.name, registers=used.registers, stack_bytes=used.stack_bytes,
        spill_stores=stores, spill_loads=loads, shared_bytes=metadata["shared"], num_warps=metadata["num_warps"],
        cluster=metadata["num_ctas"], scratch_bytes=metadata["global_scratch_size"],
        scratch_align=metadata["global_scratch_align"], tensor_maps=tuple(metadata["tensordesc_meta"] or ()),
        matrix=matrix_instructions(counts), programmatic_launch=waits_first(sass), cubin=cubin)


def _misfit(kernel: GpuKernel, compiled: CompiledKernel | CompileError, arch: Architecture) -> CompileError | None:
    if isinstance(compiled, CompileError):
        return None
    if compiled.shared_bytes > arch.shared_per_block:
        return CompileError(f"kernel {kernel.symbol} needs {compiled.shared_bytes} bytes of shared memory; a block of "
                           f"{arch.name} has {arch.shared_per_block}.\n  Smaller tiles or fewer stages need less.")
    if compiled.occupancy(arch) == 0:
        return CompileError(f"kernel {kernel.symbol} needs {compiled.registers} registers in each of "
                           f"{32 * compiled.num_warps} threads; {arch.name} has {arch.registers_per_sm}.")
    return None


def _read(cache: Path, key: str) -> CompiledKernel | None:
    """The entry of that key; None if there is none, or if it is damaged."""
    folder = cache / key[:2] / key
    try:
        entry = json.loads((folder / "kernel.json").read_text())
        cubin = (folder / "kernel.cubin").read_bytes()
        if entry.pop("cubin_sha256") != hashlib.sha256(cubin).hexdigest():
            return None
        return CompiledKernel(**entry | {"tensor_maps": tuple(entry["tensor_maps"]), "cubin": cubin})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(cache: Path, key: str, compiled: CompiledKernel) -> None:
    """Whole or not at all: a sibling folder, then a rename. A cache that cannot be written is no reason to fail."""
    folder = cache / key[:2] / key
    entry = compiled.to_json() | {"cubin_sha256": hashlib.sha256(compiled.cubin).hexdigest()}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        sibling = Path(tempfile.mkdtemp(prefix=f".{key[:8]}-", dir=folder.parent))
    except OSError:
        return
    try:
        (sibling / "kernel.cubin").write_bytes(compiled.cubin)
        (sibling / "kernel.json").write_text(json.dumps(entry, sort_keys=True))
        if folder.exists():  # damaged, or another process was faster
            shutil.rmtree(folder, ignore_errors=True)
        os.replace(sibling, folder)
    except OSError:
        pass
    finally:
        shutil.rmtree(sibling, ignore_errors=True)
