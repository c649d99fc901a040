"""GPU launches on a GPU, behind the interface of the interpreter (ingot.compiler.gpu.interpret.Interpreter).

The tests of the kernels run on it unchanged: arrays are copied to the device, each followed by bytes that nothing may
touch, the launches run in order, and the arrays come back.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.compiler.gpu.interpret import Binding, Call
from ingot.compiler.gpu.triton_compile import CompiledKernel
from ingot.plugins.gpu.kernel import GpuKernel, GpuLaunch, TensorMap
from ingot.runtime.devices.cuda_graph import StepGraph, launch_alone
from ingot.runtime.devices.cuda_kernels import CudaKernels
from ingot.runtime.devices.cuda_memory import CudaContext
from ingot.runtime.devices.gpu_kernels import Kernel, Parameter, TensorMapType
from ingot.runtime.devices.gpu_plan import Argument, BoundLaunch, BoundTensorMap
from ingot.runtime.errors import WorkFailed

_GUARD_BYTES = 512
_GUARD = 0xA5
_ALIGNMENT = 256
_MOST_REPEATS, _LEAST_S = 50, 0.02


class NoCode(WorkFailed):
    """There is no compiled code for a kernel, and the reason."""


class GuardTouched(WorkFailed):
    """A kernel wrote behind an array."""


Code = Callable[[GpuKernel], CompiledKernel]


@dataclass
class Held:
    """Arrays on the device: name -> (address, host array)."""

    places: dict[str, tuple[int, np.ndarray]]


class DeviceRunner:
    """code: the compiled form of a kernel for the architecture, or NoCode raised. launched: kernels of the last run."""

    def __init__(self, context: CudaContext, code: Code, arch: str) -> None:
        self.context, self.arch = context, arch
        self.launched: list[GpuKernel] = []
        self._code = code
        self._kernels: dict[str, tuple[GpuKernel, Kernel]] = {}
        self._cubins: dict[str, bytes] = {}
        self._loaded = CudaKernels(context, self._cubins.__getitem__)

    def run(self, calls: Sequence[Call], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """As Interpreter.run. Raises NoCode, GuardTouched, CudaError."""
        self.launched = [launch.kernel for launch, _ in calls]
        for kernel in self.launched:
            self._kernel(kernel)  # code stays loaded; what follows does not
        with self.context.temporary():
            held = self.hold(arrays)
            for launch, bindings in calls:
                launch_alone(self.context, self._loaded, self.bound(launch, bindings, held))
            return self._fetched(held)

    def hold(self, arrays: Mapping[str, np.ndarray]) -> Held:
        """The arrays, copied to memory of the context."""
        sizes = {name: -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for name, array in arrays.items()}
        total = sum(size + _GUARD_BYTES for size in sizes.values())
        staging = np.full(max(total, 1), _GUARD, np.uint8)
        base = self.context.allocate(staging.size)
        places, at = {}, 0
        for name, array in arrays.items():
            data = np.ascontiguousarray(array)
            staging[at : at + data.nbytes] = data.reshape(-1).view(np.uint8)
            places[name] = base + at, data
            at += sizes[name] + _GUARD_BYTES
        self.context.write(base, staging)
        return Held(places)

    def _fetched(self, held: Held) -> dict[str, np.ndarray]:
        found = {}
        for name, (address, array) in held.places.items():
            size = -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
            data = self.context.read(address, size + _GUARD_BYTES)
            if (data[array.nbytes :] != _GUARD).any():
                at = int(np.flatnonzero(data[array.nbytes :] != _GUARD)[0])
                raise GuardTouched(f"{', '.join(k.symbol for k in self.launched)} wrote {at} bytes behind {name}, an "
                                   f"array of {array.nbytes}")
            found[name] = data[: array.nbytes].view(array.dtype).reshape(array.shape).copy()
        return found

    def bound(self, launch: GpuLaunch, bindings: Mapping[str, Binding], held: Held) -> BoundLaunch:
        """The launch with addresses of what is held."""
        kernel = self._kernel(launch.kernel)
        arguments = []
        for (name, kind), (_, parameter) in zip(launch.kernel.parameters, kernel.parameters, strict=True):
            to = bindings.get(name, name)
            arguments.append(_argument(kind, parameter, _value(to, held)))
        return BoundLaunch(kernel, launch.grid, tuple(arguments), "", "", {})

    def _kernel(self, kernel: GpuKernel) -> Kernel:
        known = self._kernels.get(kernel.symbol)
        if known is None or known[0] != kernel:
            compiled = self._code(kernel)
            found = runtime_kernel(kernel, compiled, f"{kernel.symbol}.{len(self._kernels)}")
            self._cubins[found.code] = compiled.cubin
            self._loaded.load([found])
            known = self._kernels[kernel.symbol] = kernel, found
        return known[1]

    def seconds(self, launches: Iterable[BoundLaunch]) -> float:
        """The least time of a launch, of those that are given, one after the other in one graph; the caller sees to it
        that they do not find their data in a cache. As often as it takes for 20 ms, at most 50 times."""
        listed = list(launches)
        with self.context.temporary():
            graph = StepGraph(self.context, self._loaded, listed)
            begin, end = self.context.event(timed=True), self.context.event(timed=True)
            best = float("inf")
            number, total = 0, 0.0
            while number < 2 or (number < _MOST_REPEATS and total < _LEAST_S):
                self.context.record(begin)
                graph.launch()
                self.context.record(end)
                self.context.synchronize()
                elapsed = 1e-3 * float(self.context.driver.call("cuEventElapsedTime", begin, end))
                best = min(best, elapsed) if number else best  # the first one warms up
                number, total = number + 1, total + elapsed
        return best / len(listed)


def runtime_kernel(kernel: GpuKernel, compiled: CompiledKernel, symbol: str | None = None) -> Kernel:
    """As a plan tells it."""
    maps = iter(compiled.tensor_maps)
    parameters: list[tuple[str, Parameter]] = []
    for name, kind in kernel.parameters:
        if isinstance(kind, TensorMap):
            told = next(maps)
            parameters.append((name, TensorMapType(
                kind.dtype, kind.block, tuple(told["block_size"]), told["swizzle"], told["elem_size"],
                told["elem_type"], told["fp4_padded"])))
        else:
            parameters.append((name, kind))
    symbol = symbol or kernel.symbol
    return Kernel(symbol, f"code/{symbol}.cubin", compiled.entry, 32 * compiled.num_warps, compiled.shared_bytes,
                  compiled.cluster, tuple(parameters), kernel.module, kernel.function, kernel.constants,
                  kernel.num_warps, kernel.num_stages, "", compiled.programmatic_launch)


def _value(to: Binding, held: Held) -> int | float:
    if isinstance(to, str):
        return held.places[to][0]
    return held.places[to[0]][0] + to[1] if isinstance(to, tuple) else to


def _argument(kind: Any, parameter: Parameter, value: int | float) -> Argument:
    if isinstance(kind, TensorMap):
        assert isinstance(parameter, TensorMapType)
        return BoundTensorMap(int(value), parameter, kind.shape, kind.stride)
    return value
