"""The CUDA driver API through cuda-bindings: every call checked, every error with the call's name.

Nothing here needs a CUDA toolkit: the driver's library, which comes with the NVIDIA driver, is all. What is imported is
`cuda.bindings.driver`; tests put a module of their own in its place.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError, WorkFailed

LEAST_DRIVER = 13000
"""1000 * major + 10 * minor of CUDA. Cubins of one major version of the toolkit run on all drivers of that version
(CUDA minor version compatibility); Triton's assembler is of CUDA 13."""
LEAST_DRIVER_TEXT = "CUDA 13.0 (driver 580)"

_HINTS = {
    "CUDA_ERROR_NO_DEVICE": "No NVIDIA GPU is visible to this process{visible}.",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "The driver's library and its kernel module are of different versions: "
                                         "restart the machine, or give a container the library of its host.",
    "CUDA_ERROR_SYSTEM_NOT_READY": "The machine's fabric manager has not started.",
    "CUDA_ERROR_OPERATING_SYSTEM": "This process may not open the GPU's device files (/dev/nvidia*).",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "A kernel touched memory outside of its buffers. Please report it; "
                                  "`ingot compare ENGINE CHECKPOINT` runs the launches one by one.",
}


class NoGpu(RequestError):
    """This machine has no GPU that the runtime can use, or not the one that was asked for."""


class CudaError(WorkFailed):
    """A call of the driver failed. call, name, text: "cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"."""

    def __init__(self, call: str, name: str, text: str) -> None:
        self.call, self.name, self.text = call, name, text
        hint = _HINTS.get(name, "").format(visible=_visible())
        super().__init__(f"{call} failed: {name} ({text})" + (f"\n  {hint}" if hint else ""))


def _visible() -> str:
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if mask is None else f" (CUDA_VISIBLE_DEVICES is {mask!r})"


class Driver:
    """api: the module `cuda.bindings.driver`, or one that stands for it."""

    def __init__(self, api: Any) -> None:
        self.api = api

    def call(self, name: str, *args: Any) -> Any:
        """What the function returns beside its status: nothing, one value, or several. Raises CudaError."""
        try:
            status, *results = getattr(self.api, name)(*args)
        except RuntimeError as error:
            if type(error).__name__ != "FunctionNotFoundError":  # of cuda-bindings, which keep it to themselves
                raise
            raise CudaError(name, "CUDA_ERROR_NOT_FOUND", "this driver has no such function: update it") from None
        if int(status):
            raise self.error(name, status)
        return results[0] if len(results) == 1 else tuple(results)

    def error(self, call: str, status: Any) -> CudaError:
        name, text = self._told("cuGetErrorName", status), self._told("cuGetErrorString", status)
        return CudaError(call, name or f"CUDA error {int(status)}", text or "the driver tells no more")

    def _told(self, function: str, status: Any) -> str:
        found, text = getattr(self.api, function)(status)
        return "" if int(found) or text is None else bytes(text).decode()

    def enum(self, kind: str, member: str) -> Any:
        """A member of one of the API's enumerations."""
        return getattr(getattr(self.api, kind), member)


@dataclass(frozen=True)
class GpuInfo:
    """One GPU of this machine.

    ordinal           its number, as in --device cuda:1
    capability        compute capability, (9, 0) for sm_90
    memory_bytes      of the whole device
    shared_per_block  shared memory that a block may ask for
    """

    ordinal: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    shared_per_block: int
    multiprocessors: int

    @property
    def arch(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"


def load_driver() -> Driver:
    """The driver of this machine, initialised. Raises NoGpu that says what is missing."""
    instead = "\n  Without a GPU, an engine runs on the CPU with --device emulator, slowly."
    try:
        from cuda.bindings import driver as api
    except ImportError as error:
        raise NoGpu(f"the package cuda-bindings is missing ({error}).\n  pip install 'ingot-llm[cuda]'") from None
    driver = Driver(api)
    try:
        version = int(driver.call("cuDriverGetVersion"))
        if version < LEAST_DRIVER:
            raise NoGpu(f"the NVIDIA driver of this machine supports CUDA {version // 1000}.{version % 1000 // 10}; "
                        f"engines need {LEAST_DRIVER_TEXT} or newer.\n  Update the driver.{instead}")
        driver.call("cuInit", 0)
    except CudaError as error:
        raise NoGpu(f"the NVIDIA driver does not start: {error}{instead}") from None
    except RuntimeError as error:  # DynamicLibNotFoundError of cuda-pathfinder
        raise NoGpu(f"this machine has no NVIDIA driver: libcuda.so.1 is not found.{instead}") from error
    return driver


def list_gpus(driver: Driver) -> list[GpuInfo]:
    """All GPUs that this process sees."""
    return [_info(driver, ordinal) for ordinal in range(int(driver.call("cuDeviceGetCount")))]


def find_gpu(driver: Driver, ordinal: int) -> GpuInfo:
    """Raises NoGpu that lists the GPUs there are."""
    gpus = list_gpus(driver)
    if 0 <= ordinal < len(gpus):
        return gpus[ordinal]
    if not gpus:
        raise NoGpu(f"there is no GPU{_visible()}")
    listed = "\n  ".join(f"cuda:{gpu.ordinal}  {gpu.name}, {gpu.arch}, {gpu.memory_bytes / 2**30:.0f} GiB"
                         for gpu in gpus)
    raise NoGpu(f"there is no GPU cuda:{ordinal}; this process sees:\n  {listed}")


def reaches(driver: Driver, one: GpuInfo, other: GpuInfo) -> bool:
    """Whether kernels on `one` can read and write the memory of `other`."""
    first, second = (driver.call("cuDeviceGet", gpu.ordinal) for gpu in (one, other))
    return bool(int(driver.call("cuDeviceCanAccessPeer", first, second)))


def teams(driver: Driver, gpus: Sequence[GpuInfo]) -> list[list[GpuInfo]]:
    """GPUs that all reach each other, at least two of them: each with the first team that takes it."""
    found: list[list[GpuInfo]] = []
    for gpu in gpus:
        for team in found:
            if all(reaches(driver, gpu, other) and reaches(driver, other, gpu) for other in team):
                team.append(gpu)
                break
        else:
            found.append([gpu])
    return [team for team in found if len(team) > 1]


def _info(driver: Driver, ordinal: int) -> GpuInfo:
    device = driver.call("cuDeviceGet", ordinal)

    def attribute(name: str) -> int:
        return int(driver.call("cuDeviceGetAttribute", driver.enum("CUdevice_attribute", f"CU_DEVICE_ATTRIBUTE_{name}"),
                               device))

    name = bytes(driver.call("cuDeviceGetName", 256, device)).split(b"\0")[0].decode()
    return GpuInfo(ordinal, name,
                   (attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
                   int(driver.call("cuDeviceTotalMem", device)), attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
                   attribute("MULTIPROCESSOR_COUNT"))
