"""Runs a GPU launch on this CPU: the kernel's own source through Triton's interpreter, on memory given by address.

TRITON_INTERPRET=1 must stand in the environment before triton is first imported; such a process cannot compile.
"""
from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from .kernel import GpuLaunch, TensorMap


def run(launch: GpuLaunch, arguments: Mapping[str, int | float]) -> None:
    """Every block of the launch, one after the other. arguments: parameter -> address, or value of a scalar.

    Blocks run in the order of their numbers: a kernel that waits for a later block would hang.
    """
    assert os.environ.get("TRITON_INTERPRET") == "1", "TRITON_INTERPRET=1 must be set before triton is imported"
    kernel = launch.kernel
    function = getattr(importlib.import_module(kernel.module), kernel.function)
    given: dict[str, Any] = dict(kernel.constants)
    for name, kind in kernel.parameters:
        value = arguments[name]
        if isinstance(kind, TensorMap):
            given[name] = _descriptor(kind, int(value))
        else:
            given[name] = _pointer(kind, int(value)) if kind.startswith("*") else value
    function[launch.grid](**given)


def _pointer(kind: str, address: int) -> Any:
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    assert address % 16 == 0, f"a pointer to {kind} is not aligned to 16 bytes: {address:#x}"
    element = tl.str_to_ty(kind, None)
    return tl.tensor(TensorHandle(np.array([address], dtype=np.uint64), element), element)


def _descriptor(rectangle: TensorMap, address: int) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import _implicit_cvt, interpreter_semantic

    strides = [_implicit_cvt(rectangle.stride), tl.constexpr(1)]
    return interpreter_semantic.make_tensor_descriptor(
        base=_pointer(f"*{rectangle.dtype}", address), shape=[_implicit_cvt(extent) for extent in rectangle.shape],
        strides=strides, block_shape=[tl.constexpr(extent) for extent in rectangle.block], padding_option="zero")
