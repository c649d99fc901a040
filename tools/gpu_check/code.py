"""Where the compiled code of a check comes from: a pack that was made on another machine, or the compiler.

A pack is a ZIP file: pack.json, cubins, and the engines and small checkpoints of the checks that need them. It lets a
machine check its GPU that has PyTorch, but not the Triton version that compiles Ingot's kernels.
"""
from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from ingot.compiler.gpu.triton_compile import CompiledKernel, CompileError, try_compile
from ingot.compiler.targets import Target, architectures, list_targets
from ingot.plugins.gpu.kernel import GpuKernel
from ingot.plugins.gpu.sources import source_digest
from ingot.runtime.devices.emulator import TRITON_VERSION
from ingot.runtime.errors import RequestError

from .runner import NoCode

PACK_VERSION = 1
LARGEST_PACK_BYTES = 64 * 10**6


class CodeSource(Protocol):
    """target: what the code is for."""

    target: Target

    def __call__(self, kernel: GpuKernel) -> CompiledKernel:
        """Raises NoCode with the reason."""

    def member(self, name: str, folder: Path) -> Path | None:
        """A file or folder of the pack, unpacked into `folder`; None if there is none."""


def find_target(name: str) -> Target:
    """Raises RequestError that lists the targets there are."""
    targets = {target.name: target for target in list_targets() if target.gpu is not None}
    if name not in targets:
        raise RequestError(f"there is no GPU target {name!r}; there are: {', '.join(targets)}")
    return targets[name]


def target_of(arch: str, device_name: str) -> Target:
    """The target that a device is: of those with its architecture the one whose name stands in the device's."""
    fitting = [target for target in list_targets() if target.gpu and target.gpu.arch.name.rstrip("a") == arch]
    if not fitting:
        raise RequestError(f"no target has the architecture {arch} of {device_name}; name one with --target")
    plain = device_name.lower().replace(" ", "").replace("-", "")
    named = [target for target in fitting if target.name.replace("-", "").partition("sxm")[0] in plain]
    return max(named or fitting[:1], key=lambda target: len(target.name))


def kernel_key(kernel: GpuKernel) -> str:
    """Identity of a kernel and of the source that it was compiled from, whoever compiles."""
    parts = [kernel.to_json(), [name for name, _ in kernel.parameters], source_digest(kernel.module, kernel.source)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class Compiler:
    """Compiles on this machine, which needs the right Triton."""

    def __init__(self, target: Target) -> None:
        self.target = target
        try:
            found = version("triton")
        except PackageNotFoundError:
            found = "none"
        if found != TRITON_VERSION:
            raise RequestError(
                f"kernels are compiled with triton {TRITON_VERSION}, this machine has {found}.\n"
                "  Make a pack elsewhere, no GPU needed, and bring it along:\n"
                f"    python -m tools.gpu_check pack --target {target.name} -o check.zip\n"
                "    python -m tools.gpu_check --pack check.zip    (here)")

    def __call__(self, kernel: GpuKernel) -> CompiledKernel:
        return self.compile([kernel])[kernel]

    def compile(self, kernels: Iterable[GpuKernel]) -> dict[GpuKernel, CompiledKernel]:
        """Raises NoCode for the first that cannot be compiled."""
        found = self.attempt(kernels)
        for one in found.values():
            if isinstance(one, CompileError):
                raise NoCode(" ".join(str(one).split())[:200])
        return {kernel: one for kernel, one in found.items() if not isinstance(one, CompileError)}

    def attempt(self, kernels: Iterable[GpuKernel]) -> dict[GpuKernel, CompiledKernel | CompileError]:
        return try_compile(kernels, architectures()[self.target.isa], None, len(os.sched_getaffinity(0)))

    def member(self, name: str, folder: Path) -> Path | None:
        return None


class Pack:
    """A pack that was made before."""

    def __init__(self, path: Path) -> None:
        """Raises RequestError unless it is one, of this version and of these sources."""
        try:
            self._file = zipfile.ZipFile(path)
            self.facts: dict[str, Any] = json.loads(self._file.read("pack.json"))
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise RequestError(f"{path} is no pack of gpu_check: {error}") from None
        if self.facts.get("version") != PACK_VERSION:
            raise RequestError(f"{path} has version {self.facts.get('version')}, this gpu_check reads {PACK_VERSION}")
        self.target = find_target(self.facts["target"])

    def __call__(self, kernel: GpuKernel) -> CompiledKernel:
        key = kernel_key(kernel)
        entry = self.facts["kernels"].get(key)
        if entry is None:
            reason = self.facts["refused"].get(key, "the pack does not have it: make it anew from these sources")
            raise NoCode(f"{kernel.symbol}: {reason}")
        cubin = self._file.read(f"cubins/{key}.cubin")
        return CompiledKernel(**entry | {"tensor_maps": tuple(entry["tensor_maps"]), "cubin": cubin})

    def member(self, name: str, folder: Path) -> Path | None:
        found = [entry for entry in self._file.namelist() if entry == name or entry.startswith(f"{name}/")]
        for entry in found:
            self._file.extract(entry, folder)
        return folder / name if found else None


class PackWriter:
    """Writes a pack: kernels are added as they are compiled, files whole."""

    def __init__(self, path: Path, target: Target) -> None:
        self._file = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED)
        self._facts: dict[str, Any] = {"version": PACK_VERSION, "target": target.name, "triton": TRITON_VERSION,
                                       "kernels": {}, "refused": {}}

    def add(self, kernel: GpuKernel, compiled: CompiledKernel | CompileError) -> None:
        key = kernel_key(kernel)
        if isinstance(compiled, CompileError):
            self._facts["refused"][key] = " ".join(str(compiled).split())[:200]
        elif key not in self._facts["kernels"]:
            self._facts["kernels"][key] = {k: v for k, v in asdict(compiled).items() if k != "cubin"}
            self._file.writestr(f"cubins/{key}.cubin", compiled.cubin)

    def add_folder(self, folder: Path, name: str) -> None:
        """A file, or a folder with all below it."""
        files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else [folder]
        for path in files:
            self._file.write(path, f"{name}/{path.relative_to(folder)}" if folder.is_dir() else name)

    def finish(self, **facts: Any) -> dict[str, Any]:
        self._file.writestr("pack.json", json.dumps(self._facts | facts, sort_keys=True))
        self._file.close()
        return self._facts
