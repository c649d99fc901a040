"""Section "kernels": every test of the kernels, on the device instead of the interpreter."""
from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ingot.plugins.gpu.kernel import GpuKernel, TensorMap
from ingot.runtime.devices.cuda_driver import CudaError

from .cases import Case
from .runner import DeviceRunner, NoCode

_SUMS = 1e-4
"""Of the largest value: what sums in float32 may be off on a device, where the interpreter's tests allow 2e-5: their
order differs, and exponentials and roots are approximate."""
_FP8_SUMS = 1e-2
"""The same for fp8 products on sm_90, whose Tensor Cores add them up with about 13 bits."""


@dataclass(frozen=True)
class Outcome:
    """status: "passed", "failed" or "skipped"; detail: why."""

    name: str
    status: str
    detail: str
    seconds: float


class Runner(Protocol):
    """What runs a case. launched: kernels of its last run."""

    @property
    def launched(self) -> Collection[GpuKernel]: ...


def check_kernels(cases: list[Case], runner: DeviceRunner, arch: str,
                  progress: Callable[[str], None] = lambda text: None) -> list[Outcome]:
    """Every case; an error of the driver ends it, since the context is lost with it."""
    outcomes: list[Outcome] = []
    for case in cases:
        begin = time.perf_counter()
        status, detail = "passed", ""
        try:
            with device_tolerance(case, runner, arch):
                case.run(runner)
        except NoCode as error:
            status, detail = "skipped", str(error)
        except Exception as error:  # whatever a check raises is its result
            status, detail = "failed", f"{type(error).__name__}: {_first_lines(error)}"
            if isinstance(error, CudaError):
                outcomes.append(Outcome(case.name, status, detail, time.perf_counter() - begin))
                progress(f"{case.name}: the device failed, the other {len(cases) - len(outcomes)} cases are not run")
                return outcomes
        outcomes.append(Outcome(case.name, status, detail, time.perf_counter() - begin))
        progress(f"{status} {case.name}")
    return outcomes


def _first_lines(error: Exception) -> str:
    return " | ".join(line.strip() for line in str(error).splitlines()[:4])[:300]


@contextmanager
def device_tolerance(case: Case, runner: Runner, arch: str) -> Iterator[None]:
    """Sums may be off by what hardware does, for as long as the case runs."""
    original = getattr(case.module, "assert_close", None)
    if original is None:
        yield
        return

    def on_device(got: np.ndarray, wanted: np.ndarray, kind: str, sums: float = 1e-5) -> None:
        least = _FP8_SUMS if arch.startswith("sm_90") and any(map(multiplies_fp8, runner.launched)) else _SUMS
        original(got, wanted, kind, max(sums, least))

    setattr(case.module, "assert_close", on_device)  # noqa: B010 - a module's attribute
    try:
        yield
    finally:
        setattr(case.module, "assert_close", original)  # noqa: B010


def multiplies_fp8(kernel: GpuKernel) -> bool:
    """Whether a matrix is multiplied in fp8."""
    constants = dict(kernel.constants)
    kinds = dict(kernel.parameters)
    x = kinds.get("x")
    name = x.dtype if isinstance(x, TensorMap) else str(x)
    return kernel.function == "linear" and ("fp8" in name or constants.get("QUANTIZE") == "fp8")


def summary(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """One row a file of tests."""
    rows = []
    for group in dict.fromkeys(outcome.name.partition(".")[0] for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.name.partition(".")[0] == group]
        counts = Counter(outcome.status for outcome in mine)
        rows.append({"group": group, "passed": counts["passed"], "failed": counts["failed"],
                     "skipped": counts["skipped"], "seconds": sum(outcome.seconds for outcome in mine)})
    return rows


class Recorder:
    """Stands before another interpreter and notes what is launched. arch: what it will be compiled for."""

    def __init__(self, inner: Any, arch: str) -> None:
        self._inner = inner
        self.arch = arch
        self.kernels: dict[GpuKernel, None] = {}

    def run(self, calls: Any, arrays: Any) -> Any:
        self.kernels |= dict.fromkeys(launch.kernel for launch, _ in calls)
        return self._inner.run(calls, arrays)
