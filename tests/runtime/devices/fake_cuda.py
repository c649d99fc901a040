"""A CUDA driver for tests: the part of `cuda.bindings.driver` that the runtime uses, on memory of this host.

It checks what the documentation of the driver API asks of a caller, and computes: code is real cubins, read as the
driver would read them, and a kernel runs from its source in Triton's interpreter. Structures, enumerations and handles
are those of cuda-bindings, so that wrong names and types are found.

Streams are lazy: nothing that was put into one happens before somebody waits for it, so that a result which is read too
early, or an array that is changed too early, gives a wrong result here as it might on a device. Memory is handed out
filled with 0xff: NaN in every floating type.
"""
from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, permutations
from typing import Any

import numpy as np
from cuda.bindings import driver as real

from ingot.plugins.gpu.interpret import Prepared, prepare
from ingot.plugins.gpu.kernel import GpuKernel, TensorMap
from ingot.runtime.devices.gpu_kernels import Kernel, TensorMapType

from .cubin import Function, capability, functions
from .fake_cuda_memory import FakeMemory, Refused

_ANYWHERE = ("cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString", "cuDeviceGetCount", "cuDeviceGet",
             "cuDeviceGetName", "cuDeviceTotalMem", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain",
             "cuDevicePrimaryCtxRelease", "cuCtxSetCurrent", "cuGetProcAddress", "cuDeviceCanAccessPeer")
_ENCODE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint32), ctypes.c_int,
    ctypes.c_int, ctypes.c_int, ctypes.c_int)
_MAP = np.dtype([("magic", "<u8"), ("address", "<u8"), ("extents", "<u8", 2), ("stride", "<u8"), ("box", "<u4", 2),
                 ("element_type", "<u4"), ("swizzle", "<u4"), ("rest", "u1", 72)])
_MAGIC = 0x746F676E69
_CONTEXT = 77
"""Handle of the first device's."""


@dataclass
class Node:
    """A launch of a kernel with its parameters as they were copied, or an event. overlaps: it may begin while the one
    before it runs."""

    run: Callable[[], None]
    after: tuple[int, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    kernel: Kernel | None = None
    overlaps: bool = False


@dataclass
class Loaded:
    """A function: what its code says, what it is compiled from, and attributes that were set."""

    name: str
    told: Function
    kernel: Kernel
    dynamic_shared: int = 48 << 10


class FakeCuda(FakeMemory):
    """kernels: SHA-256 of a cubin -> the kernel that it was compiled from. sources: module -> text of generated ones.

    fail(name, number, status): the number-th call from now on of that function fails.
    faulty: symbol of a kernel that touches memory which is not its own, on every device or on the one of its number.
    apart: pairs of devices, the first of which does not reach the memory of the second.
    """

    def __init__(self, kernels: Mapping[str, Kernel], sources: Mapping[str, str] | None = None, *,
                 memory_bytes: int | tuple[int, ...] = 1 << 30, arch: tuple[int, int] = (9, 0),
                 shared_per_block: int = 227 << 10, num_gpus: int = 1, version: int = 13000,
                 apart: tuple[tuple[int, int], ...] = (), multiprocessors: int = 132) -> None:
        super().__init__(memory_bytes)
        self.kernels, self.sources = kernels, sources or {}
        self.arch, self.shared_per_block = arch, shared_per_block
        self.num_gpus, self.version = num_gpus, version
        self.calls: dict[str, int] = {}
        self.apart, self.multiprocessors = apart, multiprocessors
        self.peers: set[tuple[int, int]] = set()
        self.faulty: str | tuple[str, int] | None = None
        self.launched: list[str] = []
        self.overlapping = 0  # nodes of instantiated graphs that may begin while the one before them runs
        self._failures: dict[str, list[Any]] = {}
        self._retained: dict[int, int] = {}
        self._current = threading.local()
        self._initialised = False
        self._encode = _ENCODE(self._encode_tiled)

    # What tests say and ask

    def fail(self, name: str, number: int, status: str = "CUDA_ERROR_OUT_OF_MEMORY") -> None:
        self._failures[name] = [number, status]

    def assert_nothing_held(self) -> None:
        super().assert_nothing_held()
        assert not self._retained, f"contexts are retained: {self._retained}"
        assert not self.peers, f"access to other devices is still enabled: {self.peers}"

    # How a call is made

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(real, name)
        try:
            function = object.__getattribute__(self, f"_{name}")
        except AttributeError:
            raise AttributeError(f"the fake driver has no {name}") from None
        assert hasattr(real, name), f"cuda-bindings has no {name}"

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls[name] = self.calls.get(name, 0) + 1
            try:
                if name not in ("cuGetErrorName", "cuGetErrorString"):
                    self._allow(name)
                result = function(*args)
            except Refused as refusal:
                return (getattr(real.CUresult, str(refusal)),) + (None,) * 2
            return (real.CUresult.CUDA_SUCCESS, *(result if isinstance(result, tuple) else
                                                  () if result is None else (result,)))
        return call

    def _allow(self, name: str) -> None:
        if (failure := self._failures.get(name)) is not None:
            failure[0] -= 1
            if failure[0] == 0:
                del self._failures[name]
                raise Refused(failure[1])
        if name not in ("cuInit", "cuDriverGetVersion") and not self._initialised:
            raise Refused("CUDA_ERROR_NOT_INITIALIZED")
        if name not in _ANYWHERE:
            if self.here() not in self._retained:
                raise Refused("CUDA_ERROR_INVALID_CONTEXT")
            if self.here() in self._sticky:
                raise Refused(self._sticky[self.here()])

    def here(self) -> int:
        return int(getattr(self._current, "device", -1))

    # Devices and contexts

    def _cuInit(self, flags: int) -> None:
        assert flags == 0
        if not self.num_gpus:
            raise Refused("CUDA_ERROR_NO_DEVICE")
        self._initialised = True

    def _cuDriverGetVersion(self) -> int:
        return self.version

    def _cuGetErrorName(self, status: Any) -> bytes:
        return str(real.CUresult(int(status)).name).encode()

    def _cuGetErrorString(self, status: Any) -> bytes:
        return {2: b"out of memory", 700: b"an illegal memory access was encountered"}.get(int(status), b"as it says")

    def _cuDeviceGetCount(self) -> int:
        return self.num_gpus

    def _cuDeviceGet(self, ordinal: int) -> Any:
        if not 0 <= ordinal < self.num_gpus:
            raise Refused("CUDA_ERROR_INVALID_DEVICE")
        return real.CUdevice(ordinal)

    def _cuDeviceGetName(self, length: int, device: Any) -> bytes:
        return b"Fake GPU".ljust(length, b"\0")

    def _cuDeviceTotalMem(self, device: Any) -> int:
        return self.memory_of(int(device))

    def _cuDeviceGetAttribute(self, attribute: Any, device: Any) -> int:
        assert isinstance(device, real.CUdevice)
        kinds = real.CUdevice_attribute
        return {kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: self.arch[0],
                kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: self.arch[1],
                kinds.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: self.shared_per_block,
                kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: self.multiprocessors}[attribute]

    def _cuDevicePrimaryCtxRetain(self, device: Any) -> Any:
        assert isinstance(device, real.CUdevice)
        self._retained[int(device)] = self._retained.get(int(device), 0) + 1
        return real.CUcontext(_CONTEXT + int(device))

    def _cuDevicePrimaryCtxRelease(self, device: Any) -> None:
        number = int(device)
        assert self._retained.get(number, 0) > 0, "released more often than retained"
        self._retained[number] -= 1
        if not self._retained[number]:
            del self._retained[number]
            self.peers = {pair for pair in self.peers if number != pair[0]}
        if not self._retained:
            self._current = threading.local()

    def _cuCtxSetCurrent(self, context: Any) -> None:
        assert int(context) - _CONTEXT in self._retained
        self._current.device = int(context) - _CONTEXT

    def _cuDeviceCanAccessPeer(self, device: Any, peer: Any) -> int:
        assert isinstance(device, real.CUdevice) and isinstance(peer, real.CUdevice) and int(device) != int(peer)
        return int((int(device), int(peer)) not in self.apart)

    def _cuCtxEnablePeerAccess(self, context: Any, flags: int) -> None:
        pair = self.here(), int(context) - _CONTEXT
        assert flags == 0 and pair[1] in self._retained
        if pair in self.apart:
            raise Refused("CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
        if pair in self.peers:
            raise Refused("CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED")
        self.peers.add(pair)

    def _cuCtxDisablePeerAccess(self, context: Any) -> None:
        self.peers.remove((self.here(), int(context) - _CONTEXT))

    def _cuGetProcAddress(self, name: bytes, version: int, flags: int) -> tuple[int, Any]:
        assert (name, version, flags) == (b"cuTensorMapEncodeTiled", 12000, 0)
        return ctypes.cast(self._encode, ctypes.c_void_p).value or 0, None

    # Code

    def _cuModuleLoadData(self, image: bytes) -> Any:
        if capability(image) // 10 != self.arch[0] or capability(image) > 10 * self.arch[0] + self.arch[1]:
            raise Refused("CUDA_ERROR_NO_BINARY_FOR_GPU")
        return self._new("CUmodule", image)

    def _cuModuleUnload(self, module: Any) -> None:
        self._destroy("CUmodule", module)

    def _cuModuleGetFunction(self, module: Any, name: bytes) -> Any:
        image = self._get("CUmodule", module)
        told = functions(image).get(name.decode())
        if told is None:
            raise Refused("CUDA_ERROR_NOT_FOUND")
        kernel = self.kernels[hashlib.sha256(image).hexdigest()]
        handle = self._new("CUfunction", Loaded(name.decode(), told, kernel))
        del self._held["CUfunction"][int(handle)]  # belongs to its module
        self.__dict__.setdefault("_functions", {})[int(handle)] = (int(module), Loaded(name.decode(), told, kernel))
        return handle

    def _function(self, handle: Any) -> Loaded:
        assert isinstance(handle, real.CUfunction)
        module, loaded = self._functions[int(handle)]
        assert module in self._held["CUmodule"], "the function's module is unloaded"
        return loaded

    def _cuFuncGetParamInfo(self, function: Any, index: int) -> tuple[int, int]:
        sizes = self._function(function).told.parameter_sizes
        if index >= len(sizes):
            raise Refused("CUDA_ERROR_INVALID_VALUE")
        return 0, sizes[index]

    def _cuFuncGetAttribute(self, attribute: Any, function: Any) -> int:
        assert attribute == real.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        self._function(function)
        return 0

    def _cuFuncSetAttribute(self, function: Any, attribute: Any, value: int) -> None:
        kinds = real.CUfunction_attribute
        if attribute == kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
            if value > self.shared_per_block:
                raise Refused("CUDA_ERROR_INVALID_VALUE")
            self._function(function).dynamic_shared = value
        else:
            assert attribute == kinds.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED and value == 1

    def _encode_tiled(self, out: int, element_type: int, rank: int, address: int, extents: Any, strides: Any, box: Any,
                      steps: Any, interleave: int, swizzle: int, promotion: int, fill: int) -> int:
        """Status 1, an invalid value, for what the documentation does not allow."""
        if out % 64 or rank != 2 or address % 16 or not self._inside(self.device_memory, address, 1):
            return 1
        if strides[0] % 16 or not 0 < strides[0] < 2**40 or any(not 1 <= box[i] <= 256 for i in range(2)):
            return 1
        if (steps[0], steps[1], interleave, promotion, fill) != (1, 1, 0, 2, 0) or not 0 <= element_type <= 12:
            return 1
        element = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2, 10: 4, 11: 4, 12: 4}[element_type]
        inner = box[0] * element
        if inner % 16 or (swizzle and inner > 16 << swizzle):
            return 1
        written = np.ctypeslib.as_array((ctypes.c_uint8 * _MAP.itemsize).from_address(out)).view(_MAP)
        written["magic"], written["address"], written["stride"] = _MAGIC, address, strides[0]
        written["extents"], written["box"] = [extents[0], extents[1]], [box[0], box[1]]
        written["element_type"], written["swizzle"] = element_type, swizzle
        return 0

    # Launches and graphs

    def _parameters(self, loaded: Loaded, array: int) -> list[bytes]:
        """Copies as the driver makes them: the sizes are those of the code."""
        sizes = loaded.told.parameter_sizes
        pointers = (ctypes.c_uint64 * len(sizes)).from_address(int(array))
        for pointer, size in zip(pointers, sizes, strict=True):
            assert pointer % (64 if size == 128 else size) == 0, "a parameter is not aligned as its type"
        return [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]

    def _launch(self, function: Any, grid: Sequence[int], block: Sequence[int], shared: int, array: int,
                attributes: Mapping[str, Any]) -> Callable[[], None]:
        loaded = self._function(function)
        kernel = loaded.kernel
        if shared > loaded.dynamic_shared or not all(
                1 <= count <= most for count, most in zip(grid, (2**31 - 1, 65535, 65535), strict=True)):
            raise Refused("CUDA_ERROR_INVALID_VALUE")
        assert tuple(block) == loaded.told.threads, f"{kernel.symbol} is compiled for blocks of {loaded.told.threads}"
        assert shared == kernel.shared_bytes
        values = self._values(kernel, self._parameters(loaded, array))
        prepared: list[Prepared] = []
        device = self.here()

        def run() -> None:
            cluster = attributes.get("clusterDim", 1)
            assert cluster == kernel.cluster and grid[0] % cluster == 0, (kernel.symbol, cluster, grid)
            self.launched.append(kernel.symbol)
            if self.faulty in (kernel.symbol, (kernel.symbol, device)):
                raise Refused("CUDA_ERROR_ILLEGAL_ADDRESS")
            if kernel.exchanges:
                team = {gpu for pair in self.peers if device in pair for gpu in pair}
                assert team and set(permutations(team, 2)) <= self.peers, "the memory of a GPU that is not reached"
            if not prepared:
                prepared.append(interpreted(kernel, (grid[0] // cluster, grid[1], grid[2]), values, self.sources))
            prepared[0].run()
        return run

    def _values(self, kernel: Kernel, data: list[bytes]) -> list[int | float | tuple[int, TensorMap]]:
        """Of each parameter of the kernel; tensor maps as their address and rectangle."""
        assert [int.from_bytes(part, "little") for part in data[-2:]] == [0, 0], "scratch pointers"
        parts = iter(data[:-2])
        values: list[int | float | tuple[int, TensorMap]] = []
        for name, kind in kernel.parameters:
            first = next(parts)
            if isinstance(kind, TensorMapType):
                told = np.frombuffer(first, _MAP)[0]
                assert told["magic"] == _MAGIC, f"{name}: no descriptor"
                rows, columns, stride, one = (int.from_bytes(next(parts), "little") for _ in range(4))
                assert (columns, rows) == tuple(told["extents"].tolist()) and one == 1
                assert stride * kind.element_size == told["stride"] and not kind.is_padded
                address = int(told["address"])
                self._device(address, (rows - 1) * int(told["stride"]) + columns * kind.element_size)
                values.append((address, TensorMap(kind.dtype, (rows, columns), stride, kind.block)))
            elif kind.startswith("*"):
                pointer = int.from_bytes(first, "little")
                values.append(self._device(pointer, 1) if pointer else 0)
            else:
                values.append(float(np.frombuffer(first, np.float32)[0]) if kind == "fp32" else
                              int.from_bytes(first, "little", signed=True))
        assert next(parts, None) is None
        return values

    def _cuLaunchKernelEx(self, config: Any, function: Any, parameters: int, extra: int) -> None:
        assert isinstance(config, real.CUlaunchConfig) and extra == 0 and config.numAttrs == len(config.attrs)
        attributes = {}
        for attribute in config.attrs:
            if attribute.id == real.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
                attributes["clusterDim"] = int(attribute.value.clusterDim.x)
        run = self._launch(function, (config.gridDimX, config.gridDimY, config.gridDimZ),
                           (config.blockDimX, config.blockDimY, config.blockDimZ), config.sharedMemBytes, parameters,
                           attributes)
        self._put(config.hStream, "kernel", run)

    def _cuGraphCreate(self, flags: int) -> Any:
        assert flags == 0
        return self._new("CUgraph", [])

    def _add(self, graph: Any, dependencies: list[Any], count: int, run: Callable[[], None],
             attributes: dict[str, Any] | None = None, kernel: Kernel | None = None) -> Any:
        nodes = self._get("CUgraph", graph)
        assert count == len(dependencies) and all(isinstance(node, real.CUgraphNode) for node in dependencies)
        self._next += 1
        nodes.append((self._next, Node(run, tuple(int(node) for node in dependencies),
                                        {} if attributes is None else attributes, kernel)))
        return real.CUgraphNode(self._next)

    def _cuGraphAddKernelNode(self, graph: Any, dependencies: list[Any], count: int, node: Any) -> Any:
        assert isinstance(node, real.CUDA_KERNEL_NODE_PARAMS) and not int(node.extra) and not int(node.kern)
        attributes: dict[str, Any] = {}
        run = self._launch(node.func, (node.gridDimX, node.gridDimY, node.gridDimZ),
                           (node.blockDimX, node.blockDimY, node.blockDimZ), node.sharedMemBytes, node.kernelParams,
                           attributes)
        return self._add(graph, dependencies, count, run, attributes, self._function(node.func).kernel)

    def _cuGraphAddDependencies(self, graph: Any, sources: list[Any], targets: list[Any], edges: list[Any],
                                count: int) -> None:
        """Programmatic edges: between kernels, to one whose code waits (an event's node waits for nothing)."""
        assert len(sources) == len(targets) == len(edges) == count == 1
        nodes = dict(self._get("CUgraph", graph))
        before, after = nodes[int(sources[0])], nodes[int(targets[0])]
        told = (edges[0].from_port, edges[0].to_port, edges[0].type)
        assert told == (1, 0, 1) and before.kernel and after.kernel and after.kernel.programmatic_launch
        after.after, after.overlaps = (int(sources[0]),), True

    def _cuGraphAddEventRecordNode(self, graph: Any, dependencies: list[Any], count: int, event: Any) -> Any:
        found = self._get("CUevent", event)

        def run() -> None:
            found.pending += 1
            self._mark(found)
        return self._add(graph, dependencies, count, run)

    def _cuGraphKernelNodeSetAttribute(self, node: Any, attribute: Any, value: Any) -> None:
        assert isinstance(attribute, real.CUkernelNodeAttrID) and isinstance(value, real.CUkernelNodeAttrValue)
        (attributes,) = (found.attributes for nodes in self._held["CUgraph"].values() for number, found in nodes
                         if number == int(node))
        if attribute == real.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
            attributes["clusterDim"] = int(value.clusterDim.x)

    def _cuGraphInstantiate(self, graph: Any, flags: int) -> Any:
        assert flags == 0
        nodes = self._get("CUgraph", graph)
        for (before, _), (_, node) in pairwise(nodes):
            assert node.after == (before,), "launches of a step run one after the other"
        self.overlapping += sum(node.overlaps for _, node in nodes)
        return self._new("CUgraphExec", list(nodes))

    def _cuGraphDestroy(self, graph: Any) -> None:
        self._destroy("CUgraph", graph)

    def _cuGraphExecDestroy(self, graph: Any) -> None:
        self._destroy("CUgraphExec", graph)

    def _cuGraphUpload(self, graph: Any, stream: Any) -> None:
        self._get("CUgraphExec", graph)
        self._put(stream, "upload", lambda: None)

    def _cuGraphLaunch(self, graph: Any, stream: Any) -> None:
        for _, node in self._get("CUgraphExec", graph):
            self._put(stream, "node", node.run)


def interpreted(kernel: Kernel, grid: tuple[int, int, int], values: Sequence[Any],
                sources: Mapping[str, str]) -> Prepared:
    """A launch for Triton's interpreter, in this process."""
    parameters = tuple((name, value[1] if isinstance(value, tuple) else str(kind))
                       for (name, kind), value in zip(kernel.parameters, values, strict=True))
    source = GpuKernel(kernel.symbol, kernel.module, kernel.function, parameters, kernel.constants, kernel.num_warps,
                       kernel.num_stages, source=sources.get(kernel.module, ""))
    return prepare(source, grid, {name: value[0] if isinstance(value, tuple) else value
                                  for (name, _), value in zip(kernel.parameters, values, strict=True)})
