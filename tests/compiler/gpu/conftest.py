"""One interpreting process for all tests of GPU programs, and programs without compiled code."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from ingot.compiler.gpu import choose
from ingot.compiler.gpu.interpret import Interpreter
from ingot.compiler.gpu.triton_compile import CompiledKernel
from ingot.compiler.targets import Architecture
from ingot.plugins.gpu.kernel import GpuKernel

_MATRIX = {"bf16": "HGMMA.64x16x16.F32.BF16", "fp16": "HGMMA.64x16x16.F32", "int4": "HGMMA.64x16x16.F32.BF16",
           "fp8": "QGMMA.64x16x32.F32.E4M3.E4M3", "int8": "IGMMA.64x16x32.S8.S8", "w4a8": "QGMMA.64x16x32",
           "nvfp4": "OMMA.SF.16864"}


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter() as running:
        yield running


def uncompiled_kernel(kernel: GpuKernel, arch: Architecture, **changes: Any) -> CompiledKernel:
    """As if it had been compiled, into code that needs little."""
    words = kernel.symbol.split("_")
    named = words[1:2] if kernel.function == "linear" else words if kernel.function == "route" else []
    matrix = {_MATRIX[word]: 8 for word in [word for word in named if word in _MATRIX][:1]}
    maps = [{"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [64, 64], "fp4_padded": False}
            for _, kind in kernel.parameters if not isinstance(kind, str)]
    fields: dict[str, Any] = {
        "entry": kernel.function, "arch": arch.name, "registers": 64, "stack_bytes": 0, "spill_stores": 0,
        "spill_loads": 0, "shared_bytes": 1024, "num_warps": kernel.num_warps, "cluster": 1, "scratch_bytes": 0,
        "scratch_align": 1, "tensor_maps": tuple(maps), "matrix": matrix, "programmatic_launch": arch.capability >= 90,
        "cubin": kernel.symbol.encode()}
    return CompiledKernel(**fields | changes)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels are chosen without being compiled; the symbols that were asked for, in order."""
    asked: list[str] = []

    def compiled(kernels: Iterable[GpuKernel], arch: Architecture, *rest: object) -> dict[GpuKernel, CompiledKernel]:
        found = {kernel: uncompiled_kernel(kernel, arch) for kernel in kernels}
        asked.extend(kernel.symbol for kernel in found)
        return found

    monkeypatch.setattr(choose, "try_compile", compiled)
    return asked
