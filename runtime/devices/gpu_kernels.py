"""The kernels of a GPU engine's plan, checked: what their code is called, what they take, and where their source is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..engine_format import EngineFormatError, check_name
from .plan_fields import count, field

# Limits of compute capabilities 8.0 to 12.0 (CUDA C++ Programming Guide); the device's own are checked by the driver.
MAX_THREADS, MAX_SHARED_BYTES, MAX_CLUSTER = 1024, 227 << 10, 16
MAX_BOX, MAX_BLOCK = 256, 1 << 16
"""Elements of a tensor map's box along one axis, and of a piece that takes several boxes."""

ELEMENT_BYTES = {"i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8, "fp16": 2, "bf16": 2,
                 "fp32": 4, "fp64": 8, "fp8e4nv": 1, "fp8e5": 1, "i1": 1}
"""Triton's name of an element type -> bytes in memory."""

SCALARS = ("i32", "i64", "fp32")
"""Types of parameters that are numbers."""

_GENERATED = "generated."
_MODULE = re.compile(r"(?:ingot\.plugins|generated)(?:\.[A-Za-z_0-9]\w*)+", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TENSOR_MAP = {"swizzle": 15, "elem_size": 16, "elem_type": 15}  # what Triton tells of one, and the largest value


@dataclass(frozen=True)
class TensorMapType:
    """A parameter that the Tensor Memory Accelerator reads: a rectangle, row-major, copied in pieces.

    dtype      Triton's name of the element type
    block      rows and columns of a piece, as the kernel's source asks for them
    box        as the compiled code copies them: a piece may take several copies
    swizzle, element_size, element_type  as the compiled code expects them, in Triton's numbers
    is_padded  fp4 elements in pairs of bytes
    """

    dtype: str
    block: tuple[int, int]
    box: tuple[int, ...]
    swizzle: int
    element_size: int
    element_type: int
    is_padded: bool


Parameter = str | TensorMapType
"""Type of a parameter: "*bf16" a pointer, one of SCALARS, or a tensor map."""


@dataclass(frozen=True)
class Kernel:
    """symbol      its name in the plan
    code        member of the engine that holds its cubin; entry: the function in it
    threads     of a block; shared_bytes: dynamic, of a block; cluster: blocks of one
    parameters  (name, type) of what a launch passes, in order
    module, function, constants  the source that the code was compiled from, in a Python module
    num_warps, num_stages  with which it was compiled
    source_sha256  identity of that source
    programmatic_launch  it waits itself for the kernel before it, so that it may be started while that one runs
    """

    symbol: str
    code: str
    entry: str
    threads: int
    shared_bytes: int
    cluster: int
    parameters: tuple[tuple[str, Parameter], ...]
    module: str
    function: str
    constants: tuple[tuple[str, int | float | bool | str | None], ...]
    num_warps: int
    num_stages: int
    source_sha256: str
    programmatic_launch: bool = False

    @property
    def exchanges(self) -> bool:
        """Whether it reads the memory of other ranks of a tensor-parallel engine, and waits for them."""
        return any(name == "peers" for name, _ in self.parameters)

    @property
    def source(self) -> str | None:
        """Member of the engine that holds the source, if it was generated for this engine."""
        return f"code/{self.module}.py" if self.module.startswith(_GENERATED) else None


def read_kernels(plan: Mapping[str, Any]) -> dict[str, Kernel]:
    """Raises EngineFormatError that names the kernel and the field."""
    return {symbol: _kernel(symbol, entry) for symbol, entry in field(plan, "kernels", dict, "plan").items()}


def check_members(kernels: Mapping[str, Kernel], members: Mapping[str, int]) -> None:
    """members: name -> size of those that the engine has. Raises EngineFormatError for the first that is missing."""
    for symbol, kernel in kernels.items():
        for name in (kernel.code, kernel.source):
            if name is not None and not members.get(name):
                raise EngineFormatError(f"plan.kernels.{symbol}: the engine has no member {name}, or it is empty")


def _kernel(symbol: str, entry: Any) -> Kernel:
    where = f"plan.kernels.{symbol}"
    code, module, digest = (field(entry, key, str, where) for key in ("code", "module", "source_sha256"))
    check_name(code)
    if not code.startswith("code/"):
        raise EngineFormatError(f"{where}: code: expected a member below code/, got {code!r}")
    if not _MODULE.fullmatch(module):
        raise EngineFormatError(f"{where}: module: expected one below ingot.plugins or generated, got {module!r}")
    if not _SHA256.fullmatch(digest):
        raise EngineFormatError(f"{where}: source_sha256: expected 64 hexadecimal digits, got {digest!r}")
    threads = count(entry, "threads", where, 32, MAX_THREADS)
    if threads % 32:
        raise EngineFormatError(f"{where}: threads: expected a multiple of 32, got {threads}")
    if scratch := count(entry, "scratch_bytes", where, 0):
        raise EngineFormatError(f"{where}: its blocks ask for {scratch} bytes of scratch memory each; expected 0")
    return Kernel(
        symbol, code, _name(entry, "entry", where), threads, count(entry, "shared_bytes", where, 0, MAX_SHARED_BYTES),
        count(entry, "cluster", where, 1, MAX_CLUSTER), _parameters(entry, where), module,
        _name(entry, "function", where), _constants(entry, where), count(entry, "num_warps", where, 1, 32),
        count(entry, "num_stages", where), digest, field(entry, "programmatic_launch", bool, where))


def _name(entry: dict[str, Any], key: str, where: str) -> str:
    value: str = field(entry, key, str, where)
    if not value.isidentifier():
        raise EngineFormatError(f"{where}: {key}: expected an identifier, got {value!r}")
    return value


def _parameters(entry: dict[str, Any], where: str) -> tuple[tuple[str, Parameter], ...]:
    maps = iter(enumerate(field(entry, "tensor_maps", list, where)))
    found: dict[str, Parameter] = {}
    for index, parameter in enumerate(field(entry, "parameters", list, where)):
        here = f"{where}.parameters[{index}]"
        if not isinstance(parameter, list) or len(parameter) != 2 or not isinstance(parameter[0], str):
            raise EngineFormatError(f"{here}: expected a name and a type, got {parameter!r}")
        name, kind = parameter
        if name in found:
            raise EngineFormatError(f"{here}: {name} stands twice")
        if isinstance(kind, dict):
            number, told = next(maps, (0, None))
            found[name] = _tensor_map(kind, here, told, f"{where}.tensor_maps[{number}]")
        elif kind in SCALARS or (isinstance(kind, str) and kind[:1] == "*" and kind[1:] in ELEMENT_BYTES):
            found[name] = kind
        else:
            raise EngineFormatError(f"{here}: type {kind!r} of {name} is unknown; expected a pointer such as *bf16, "
                                    f"{', '.join(SCALARS)}, or a tensor map")
    if next(maps, None) is not None:
        raise EngineFormatError(f"{where}: tensor_maps: there are more than parameters that are tensor maps")
    return tuple(found.items())


def _tensor_map(entry: dict[str, Any], where: str, told: Any, told_where: str) -> TensorMapType:
    dtype = field(entry, "tensormap", str, where)
    if dtype not in ELEMENT_BYTES:
        raise EngineFormatError(f"{where}: element type {dtype!r} is unknown")
    block = _box(entry, "block", where, MAX_BLOCK)
    if len(block) != 2:
        raise EngineFormatError(f"{where}: block: expected rows and columns, got {block}")
    swizzle, element_size, element_type = (count(told, key, told_where, 0, most) for key, most in _TENSOR_MAP.items())
    box, is_padded = _box(told, "block_size", told_where, MAX_BOX), field(told, "fp4_padded", bool, told_where)
    return TensorMapType(dtype, (block[0], block[1]), box, swizzle, element_size, element_type, bool(is_padded))


def _box(entry: Any, key: str, where: str, most: int) -> tuple[int, ...]:
    box = field(entry, key, list, where)
    if not box or not all(type(extent) is int and 1 <= extent <= most for extent in box):
        raise EngineFormatError(f"{where}: {key}: expected extents of 1 to {most}, got {box!r}")
    return tuple(box)


def _constants(entry: dict[str, Any], where: str) -> tuple[tuple[str, int | float | bool | str | None], ...]:
    constants = field(entry, "constants", dict, where)
    for name, value in constants.items():
        if value is not None and not isinstance(value, (int, float, str)):
            raise EngineFormatError(f"{where}: constants.{name}: expected a number, a string, a truth value or null, "
                                    f"got {value!r}")
    return tuple(constants.items())
