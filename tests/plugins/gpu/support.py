"""What tests of GPU kernels share: devices, arrays as bits, tolerances, and the instructions of compiled candidates."""
from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ingot.compiler.gpu.triton_compile import CompiledKernel, compile_kernels
from ingot.compiler.targets import architectures, list_targets
from ingot.plugins.gpu.device import Device
from ingot.plugins.gpu.floats import from_bf16, to_bf16
from ingot.plugins.gpu.kernel import Candidate, GpuKernel, GpuLaunch

ARCHITECTURES = tuple(architectures())
QUICK = ("sm_80", "sm_90a")
"""Architectures that the default tests compile for; the others run with --slow."""

_REPRESENTATIVE = {"sm_80": "a100", "sm_86": "a10g", "sm_89": "l40s", "sm_90a": "h200", "sm_100a": "b200",
                   "sm_103a": "b300", "sm_120a": "rtx5090"}


def device(arch: str) -> Device:
    target = next(target for target in list_targets() if target.name == _REPRESENTATIVE[arch])
    assert target.gpu is not None
    return target.gpu.device


def device_of(runner: object) -> Device:
    """The device whose tiles a test takes: of the architecture that its kernels run on; in the interpreter an H200."""
    return device(getattr(runner, "arch", "sm_90a"))


def compiled(kernels: Iterable[GpuKernel], arch: str) -> dict[GpuKernel, CompiledKernel]:
    """From the user's cache, so that a second run of the tests compiles nothing."""
    return compile_kernels(kernels, architectures()[arch])


def chosen(ways: Iterable[Sequence[Candidate]], arch: str) -> dict[GpuKernel, CompiledKernel]:
    """Of each problem the first of its candidates whose kernel does not spill, as a build chooses; of the first three,
    so that a change which makes most of them spill is seen."""
    found: dict[GpuKernel, CompiledKernel] = {}
    left = list(ways)
    for turn in range(3):
        code = compiled({way[turn].launches[0].kernel for way in left if turn < len(way)}, arch)
        found |= {kernel: one for kernel, one in code.items() if not one.spill_stores}
        left = [way for way in left if not any(c.launches[0].kernel in found for c in way[:turn + 1])]
    assert not left, [[c.launches[0].kernel.symbol for c in way[:3]] for way in left]
    return found


def store(x: np.ndarray, kind: str) -> np.ndarray:
    """float values -> the bits of a floating type."""
    return to_bf16(x.astype(np.float32)) if kind == "bf16" else x.astype(np.float16 if kind == "fp16" else np.float32)


def load(bits: np.ndarray, kind: str) -> np.ndarray:
    return (from_bf16(bits) if kind == "bf16" else bits).astype(np.float64)


def unwritten(shape: tuple[int, ...], kind: str) -> np.ndarray:
    """NaN in every element: what a kernel forgets to write is found."""
    return store(np.full(shape, np.nan), kind)


def scratch(launch: GpuLaunch) -> dict[str, np.ndarray]:
    """Memory for partial results (NaN) and arrivals (zero)."""
    if not launch.scratch_bytes:
        return {}
    return {"partial": np.full(launch.scratch_bytes // 4, np.nan, np.float32),
            "arrived": np.zeros(launch.zeroed_bytes // 4, np.int32)}


ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 1e-6}
"""Largest relative error of one rounding."""


def assert_close(got: np.ndarray, wanted: np.ndarray, kind: str, sums: float = 1e-5) -> None:
    """Equal but for one rounding to `kind`, and for sums taken in float32: `sums` of the largest value."""
    assert got.shape == wanted.shape and np.isfinite(got).all(), "not all of the result was written"
    allowed = 1.01 * ROUNDING[kind] * np.abs(wanted) + sums * np.abs(wanted).max(initial=0)
    excess = np.abs(got - wanted) - allowed
    worst = np.unravel_index(excess.argmax(), excess.shape)
    assert excess.max() <= 0, f"at {worst}: got {got[worst]}, wanted {wanted[worst]}"
