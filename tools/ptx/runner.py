"""GPU launches on the PTX machine, behind the interface of the interpreter (ingot.compiler.gpu.interpret.Interpreter).

The tests of the kernels run on it unchanged."""
from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ingot.compiler.gpu.interpret import Binding, Call
from ingot.compiler.gpu.triton_compile import PtxKernel
from ingot.plugins.gpu.kernel import GpuKernel, GpuLaunch, TensorMap
from ingot.runtime.devices.cuda_kernels import Parameters, parameter_sizes
from ingot.runtime.devices.gpu_kernels import Kernel, Parameter, TensorMapType
from ingot.runtime.devices.gpu_plan import Argument, BoundLaunch, BoundTensorMap

from .code import Code
from .instruction import PtxError
from .machine import Launch, Options
from .memory import GlobalMemory
from .parser import Program, parse


class PtxRunner:
    """compile: the PTX of a kernel for the architecture. launched: kernels of the last run; executed: opcode -> by how
    many warps, of all runs; seconds: of running alone."""

    def __init__(self, compile: Callable[[GpuKernel], PtxKernel], options: Options | None = None,
                 arch: str = "sm_90a") -> None:
        self.arch = arch
        self.launched: list[GpuKernel] = []
        self.executed: Counter[str] = Counter()
        self.kernels: set[str] = set()
        self.seconds = 0.0
        self.options = options or Options()
        self._compile = compile
        self._codes: dict[GpuKernel, tuple[PtxKernel, Code]] = {}

    def run(self, calls: Sequence[Call], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """As Interpreter.run. Raises PtxError, CompileError."""
        self.launched = [launch.kernel for launch, _ in calls]
        codes = [self._code(kernel) for kernel in self.launched]
        begin = time.perf_counter()
        tables = {_table(launch.kernel, name): np.frombuffer(data, np.uint8)
                  for (launch, _), (_, code) in zip(calls, codes, strict=True)
                  for name, data in code.program.data.items()}
        memory = GlobalMemory({**arrays, **tables})
        for (launch, bindings), (compiled, code) in zip(calls, codes, strict=True):
            self._launch(launch, bindings, compiled, code, memory)
        self.seconds += time.perf_counter() - begin
        found = memory.arrays()
        return {name: found[name] for name in arrays}

    def _launch(self, launch: GpuLaunch, bindings: Mapping[str, Binding], compiled: PtxKernel, code: Code,
                memory: GlobalMemory) -> None:
        if compiled.scratch_bytes:
            raise PtxError(f"{launch.kernel.symbol} wants {compiled.scratch_bytes} bytes of scratch memory")
        values = _values(launch, bindings, compiled, code.program, memory)
        params = dict(zip((param.name for param in code.program.params), values, strict=True))
        params |= {name: memory.addresses[_table(launch.kernel, name)] for name in code.program.data}
        try:
            Launch(code, memory, params, launch.grid, 32 * compiled.num_warps, compiled.shared_bytes,
                   self.options).run()
        except PtxError as error:
            raise PtxError(f"{launch.kernel.symbol}: {error}") from error
        finally:
            for stretch in code.stretches.values():
                for op in [step.op for step in stretch.steps] + ([stretch.last] if stretch.last else []):
                    self.executed[op.opcode] += stretch.executions
                stretch.executions = 0
        self.kernels.add(launch.kernel.symbol)

    def _code(self, kernel: GpuKernel) -> tuple[PtxKernel, Code]:
        known = self._codes.get(kernel)
        if known is None:
            compiled = self._compile(kernel)
            try:
                known = self._codes[kernel] = compiled, Code(parse(compiled.ptx))
            except PtxError as error:
                raise PtxError(f"{kernel.symbol}: {error}") from None
        return known


def _table(kernel: GpuKernel, name: str) -> str:
    """What a table of a program is called among the arrays."""
    return f"{name} of {kernel.symbol}"


def _values(launch: GpuLaunch, bindings: Mapping[str, Binding], compiled: PtxKernel, program: Program,
            memory: GlobalMemory) -> list[Any]:
    """What is passed, packed as the runtime does it for the driver: bits of each parameter; of a tensor map what it is.
    Raises PtxError if the code has others."""
    maps = iter(compiled.tensor_maps)
    parameters: list[tuple[str, Parameter]] = []
    arguments: list[Argument] = []
    for name, kind in launch.kernel.parameters:
        to = bindings.get(name, name)
        value = (memory.addresses[to] if isinstance(to, str) else
                 memory.addresses[to[0]] + to[1] if isinstance(to, tuple) else to)
        if isinstance(kind, TensorMap):
            told = _tensor_map_type(kind, next(maps))
            parameters.append((name, told))
            arguments.append(BoundTensorMap(int(value), told, kind.shape, kind.stride))
        else:
            parameters.append((name, kind))
            arguments.append(value)
    kernel = Kernel(launch.kernel.symbol, "", program.name, program.num_threads, compiled.shared_bytes, 1,
                    tuple(parameters), launch.kernel.module, launch.kernel.function, launch.kernel.constants,
                    launch.kernel.num_warps, launch.kernel.num_stages, "")
    sizes, wanted = parameter_sizes(kernel), [param.size for param in program.params]
    if sizes != wanted:
        raise PtxError(f"{kernel.symbol}: parameters of {sizes} bytes are passed, the code has {wanted}")
    encoded: dict[int, BoundTensorMap] = {}

    def encode(address: int, argument: BoundTensorMap, where: str) -> None:
        encoded[address] = argument
    packed = Parameters(BoundLaunch(kernel, launch.grid, tuple(arguments), "", "", {}), encode)
    places = (ctypes.c_uint64 * len(sizes)).from_address(packed.address)
    return [encoded[place] if place in encoded else int.from_bytes(ctypes.string_at(place, size), "little")
            for place, size in zip(places, sizes, strict=True)]


def _tensor_map_type(kind: TensorMap, told: Mapping[str, Any]) -> TensorMapType:
    return TensorMapType(kind.dtype, kind.block, tuple(told["block_size"]), told["swizzle"], told["elem_size"],
                         told["elem_type"], told["fp4_padded"])
