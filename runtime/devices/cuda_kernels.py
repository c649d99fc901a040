"""Kernels of an engine on a GPU: their code loaded, and the parameters of launches laid out as the driver reads them.

The driver takes an array of pointers, one for each parameter of the function; how large each is it knows from the code,
and `CudaKernels` compares that with what the plan says. By Triton's convention a function has

    a pointer or a number       itself
    a tensor map                the descriptor (128 bytes, by value), its two extents (i32), its two strides (i64)
    at the end                  two pointers to scratch memory, which no kernel of an engine uses: null
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..engine_format import EngineFormatError
from .cuda_driver import CudaError
from .cuda_memory import CudaContext
from .gpu_kernels import Kernel, TensorMapType
from .gpu_plan import BoundLaunch, BoundTensorMap

_MAP_BYTES = 128
_MAP_ALIGNMENT = 128
"""Of a CUtensorMap on the host: the driver asks for 64, the headers of CUDA 13 for 128."""
_POINTER = 8
_NUMBERS = {"i32": "<i", "u32": "<I", "i64": "<q", "u64": "<Q", "fp32": "<f"}
_STATIC_SHARED_BYTES = 48 << 10
"""What a block may have without asking."""
_PORTABLE_CLUSTER = 8

# Triton numbers the types of descriptors as the device does, which differs in three places from the driver's
# CUtensorMapDataType (triton/backends/nvidia/driver.py).
_ELEMENT_TYPES = {number: number for number in range(14)} | {8: 10, 9: 8, 10: 9}
_SWIZZLE_BYTES = {0: 0, 1: 32, 2: 64, 3: 128}
_L2_PROMOTION_128B = 2
_ENCODE_VERSION = 12000
"""CUDA version of the function's form."""
_EncodeTiled = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int)


def parameter_sizes(kernel: Kernel) -> list[int]:
    """Bytes of each parameter of the compiled function."""
    sizes: list[int] = []
    for _, kind in kernel.parameters:
        if isinstance(kind, TensorMapType):
            sizes += [_MAP_BYTES, 4, 4, 8, 8]
        else:
            sizes.append(_POINTER if kind.startswith("*") else struct.calcsize(_NUMBERS[kind]))
    return [*sizes, _POINTER, _POINTER]


class Parameters:
    """The parameters of one launch in host memory. address: of the array of pointers to them; they live as long as
    this object."""

    def __init__(self, launch: BoundLaunch, encode: Callable[[int, BoundTensorMap, str], None]) -> None:
        """encode: writes a descriptor to an address."""
        sizes = parameter_sizes(launch.kernel)
        offsets, end = [], 0
        for size in sizes:
            alignment = _MAP_ALIGNMENT if size == _MAP_BYTES else _POINTER
            end = -(-end // alignment) * alignment
            offsets.append(end)
            end += size
        self._data = np.zeros(end + _MAP_ALIGNMENT, np.uint8)
        base = int(self._data.ctypes.data)
        shift = -base % _MAP_ALIGNMENT
        data, places = self._data[shift:].data, iter(offsets)
        for (name, kind), argument in zip(launch.kernel.parameters, launch.arguments, strict=True):
            if isinstance(kind, TensorMapType):
                assert isinstance(argument, BoundTensorMap), name
                encode(base + shift + next(places), argument, f"{launch.kernel.symbol}, {name}")
                for form, value in (("<i", argument.shape[0]), ("<i", argument.shape[1]), ("<q", argument.stride),
                                    ("<q", 1)):
                    struct.pack_into(form, data, next(places), value)
            else:
                struct.pack_into("<Q" if kind.startswith("*") else _NUMBERS[kind], data, next(places), argument)
        self._pointers = np.array(offsets, np.uint64) + np.uint64(base + shift)  # the scratch pointers are zero
        self.address = int(self._pointers.ctypes.data)


class CudaKernels:
    """The functions of an engine's kernels in a context, to which they belong."""

    def __init__(self, context: CudaContext, read: Callable[[str], bytes]) -> None:
        """read: a member of the engine."""
        self._context = context
        self._read = read
        self._functions: dict[str, Any] = {}
        self._images: dict[str, Any] = {}
        self._encode_tiled: Any = None

    def load(self, kernels: Iterable[Kernel]) -> None:
        """Raises EngineFormatError if the code is not what the plan says, CudaError."""
        for kernel in kernels:
            if kernel.symbol not in self._functions:
                self._functions[kernel.symbol] = self._load(kernel)

    def function(self, kernel: Kernel) -> Any:
        return self._functions[kernel.symbol]

    def _load(self, kernel: Kernel) -> Any:
        driver, where = self._context.driver, f"plan.kernels.{kernel.symbol}"
        try:
            if kernel.code not in self._images:
                module = driver.call("cuModuleLoadData", self._read(kernel.code))
                self._images[kernel.code] = self._context.own(module, "cuModuleUnload")
            function = driver.call("cuModuleGetFunction", self._images[kernel.code], kernel.entry.encode())
        except CudaError as error:
            raise EngineFormatError(f"{where}: {kernel.code} does not load, function {kernel.entry}: {error}") from None
        found, expected = self._sizes(function), parameter_sizes(kernel)
        if found is not None and found != expected:
            raise EngineFormatError(f"{where}: the function in {kernel.code} takes parameters of {found} bytes; by the "
                                    f"plan's list and Triton's convention they have {expected}")
        self._set(function, kernel)
        return function

    def _sizes(self, function: Any) -> list[int] | None:
        """As the code has them; None if the driver is too old to tell."""
        info = getattr(self._context.driver.api, "cuFuncGetParamInfo", None)
        if info is None:
            return None
        sizes: list[int] = []
        while True:  # an index beyond the last one is an error: there is no other way to learn their number
            status, *found = info(function, len(sizes))
            if int(status):
                return sizes
            sizes.append(int(found[1]))

    def _set(self, function: Any, kernel: Kernel) -> None:
        driver = self._context.driver
        static = int(driver.call("cuFuncGetAttribute", driver.enum(
            "CUfunction_attribute", "CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES"), function))
        if static + kernel.shared_bytes > _STATIC_SHARED_BYTES:
            driver.call("cuFuncSetAttribute", function, driver.enum(
                "CUfunction_attribute", "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"), kernel.shared_bytes)
        if kernel.cluster > _PORTABLE_CLUSTER:
            driver.call("cuFuncSetAttribute", function, driver.enum(
                "CUfunction_attribute", "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED"), 1)

    def parameters(self, launch: BoundLaunch) -> Parameters:
        """Raises EngineFormatError for a descriptor that the hardware does not have."""
        return Parameters(launch, self._encode)

    def _encode(self, address: int, argument: BoundTensorMap, where: str) -> None:
        kind, driver = argument.type, self._context.driver
        check_tensor_map(argument, where)
        if self._encode_tiled is None:
            # cuda-bindings' own function writes into an object of Python, which is not aligned as a descriptor must be.
            pointer, _ = driver.call("cuGetProcAddress", b"cuTensorMapEncodeTiled", _ENCODE_VERSION, 0)
            self._encode_tiled = _EncodeTiled(int(pointer))
        rows, columns = argument.shape
        extents = (ctypes.c_uint64 * 2)(columns * (2 if kind.is_padded else 1), rows)
        strides = (ctypes.c_uint64 * 1)(argument.stride * kind.element_size)
        box = (ctypes.c_uint32 * 2)(kind.box[1], kind.box[0])
        steps = (ctypes.c_uint32 * 2)(1, 1)
        status = self._encode_tiled(address, _ELEMENT_TYPES[kind.element_type], 2, argument.address, extents, strides,
                                    box, steps, 0, kind.swizzle, _L2_PROMOTION_128B, 0)
        if status:
            error = driver.error("cuTensorMapEncodeTiled", driver.api.CUresult(status))
            raise EngineFormatError(f"{where}: {argument} is refused: {error}")


def check_tensor_map(argument: BoundTensorMap, where: str) -> None:
    """Raises EngineFormatError unless it keeps to what cuTensorMapEncodeTiled asks for (CUDA Driver API)."""
    kind, (rows, columns) = argument.type, argument.shape
    row_bytes = argument.stride * kind.element_size
    inner_bytes = kind.box[-1] * kind.element_size
    swizzle_bytes = _SWIZZLE_BYTES.get(kind.swizzle)
    wrong = (
        f"{len(kind.box)} extents of a copy, expected 2" if len(kind.box) != 2 else
        f"element type {kind.element_type} is unknown" if kind.element_type not in _ELEMENT_TYPES else
        f"swizzle {kind.swizzle} is unknown" if swizzle_bytes is None else
        f"address {argument.address:#x} is not aligned to 16 bytes" if argument.address % 16 else
        f"{rows} rows of {columns}, expected 1 to 2^32" if not (1 <= rows <= 2**32 and 1 <= columns <= 2**32) else
        f"rows are {row_bytes} bytes apart, expected a multiple of 16 below 2^40"
        if row_bytes % 16 or not 0 < row_bytes < 2**40 else
        f"copies of {kind.box}, expected 1 to 256 each" if not all(1 <= extent <= 256 for extent in kind.box) else
        f"{inner_bytes} bytes of a copied row, expected a multiple of 16" if inner_bytes % 16 else
        f"{inner_bytes} bytes of a copied row, more than the {swizzle_bytes} of its swizzle"
        if swizzle_bytes and inner_bytes > swizzle_bytes else "")
    if wrong:
        raise EngineFormatError(f"{where}: no tensor map: {wrong}")
