"""Runs GPU launches on this CPU: the kernels' own sources through Triton's interpreter, on memory given by address.

TRITON_INTERPRET=1 must stand in the environment before triton is first imported; such a process cannot compile. What
kernels do only on hardware (copies that run ahead, blocks side by side) is not interpreted: blocks run one by one, in
the order of their numbers, and a kernel that waits for a later block would hang. Launches of several GPUs that wait for
each other run in threads.
"""
from __future__ import annotations

import inspect
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from .generated import module_of
from .interpreter_speed import check_next, install
from .kernel import GpuKernel, GpuLaunch, TensorMap

_SWITCH_S = 1e-4
"""A thread that waits for another one lets go after this time."""


def run(launch: GpuLaunch, arguments: Mapping[str, int | float]) -> None:
    """Every block of the launch. arguments: parameter -> address, or value of a scalar."""
    prepare(launch.kernel, launch.grid, arguments).run()


@dataclass(frozen=True)
class Prepared:
    """A launch with everything looked up: to be run again and again while its memory stays where it is. generated: its
    kernel was made from a graph."""

    symbol: str
    generated: bool
    grid: tuple[int, int, int]
    function: Callable[..., None]
    arguments: Mapping[str, Any]

    def run(self) -> None:
        """Every block. Raises whatever the kernel raises, with a note of the block that did."""
        import numpy as np
        from triton.runtime.interpreter import interpreter_builder

        check_next(self.generated)
        last_x, last_y, last_z = self.grid
        with np.errstate(all="ignore"):
            interpreter_builder.set_grid_dim(*self.grid)
            for x in range(last_x):
                for y in range(last_y):
                    for z in range(last_z):
                        interpreter_builder.set_grid_idx(x, y, z)
                        try:
                            self.function(**self.arguments)
                        except Exception as error:
                            error.add_note(f"in block ({x}, {y}, {z}) of {self.symbol}, grid {self.grid}")
                            raise


def run_together(launches: Sequence[Prepared], give_up: Callable[[], None], limit_s: float) -> None:
    """One launch of each of several GPUs, which wait for each other.

    give_up lets those go on that wait; it is called when one has failed, or none is through after limit_s. Raises what
    the first has raised, TimeoutError.
    """
    failures: list[Exception] = []

    def run(launch: Prepared) -> None:
        try:
            launch.run()
        except Exception as error:
            failures.append(error)
            give_up()

    interval = sys.getswitchinterval()
    threads = [threading.Thread(target=run, args=(launch,), daemon=True) for launch in launches]
    sys.setswitchinterval(_SWITCH_S)
    try:
        for thread in threads:
            thread.start()
        late = _join(threads, limit_s)
        if late:
            give_up()
            _join(threads, limit_s)
    finally:
        sys.setswitchinterval(interval)
    if failures:
        raise failures[0]
    if late:
        names = ", ".join(dict.fromkeys(launch.symbol for launch in launches))
        raise TimeoutError(f"{names}: {len(launches)} GPUs still wait for each other after {limit_s:g} s")


def _join(threads: Sequence[threading.Thread], limit_s: float) -> bool:
    """Whether some still run after that time."""
    end = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return any(thread.is_alive() for thread in threads)


@cache
def _part_threads() -> None:
    """The interpreter keeps the number of the block that runs, and whether integers may overflow, in one place for the
    whole process: from now on each thread has one."""
    from triton.runtime.interpreter import interpreter_builder

    kind, places, before = type(interpreter_builder), threading.local(), dict(vars(interpreter_builder))

    def of_thread(name: str) -> property:
        return property(lambda builder: getattr(places, name, before.get(name)),
                        lambda builder, value: setattr(places, name, value))

    interpreter_builder.__class__ = type(kind.__name__, (kind,), {name: of_thread(name)
                                                                 for name in ("grid_idx", "grid_dim", "options")})


def prepare(kernel: GpuKernel, grid: tuple[int, int, int], arguments: Mapping[str, int | float]) -> Prepared:
    """arguments: parameter -> address, or value of a scalar; of a descriptor the address of its first element."""
    from triton.runtime.interpreter import _implicit_cvt

    function = _function(kernel.module, kernel.source, kernel.function)
    given: dict[str, Any] = {}
    for name, kind in kernel.parameters:
        value = arguments[name]
        if isinstance(kind, TensorMap):
            given[name] = _descriptor(kind, int(value))
        else:
            given[name] = _pointer(kind, int(value)) if kind.startswith("*") else _implicit_cvt(value)
    constexprs = _constexprs(function)
    for name, constant in kernel.constants:
        given[name] = constant if name in constexprs else _implicit_cvt(constant)
    return Prepared(kernel.symbol, bool(kernel.source), grid, function, given)


@cache
def _function(module: str, source: str, name: str) -> Callable[..., None]:
    """The kernel as the interpreter rewrites it."""
    from triton.runtime.interpreter import InterpretedFunction

    found = getattr(module_of(module, source), name)
    assert isinstance(found, InterpretedFunction), "TRITON_INTERPRET=1 must be set before triton is first imported"
    install(check_overflow=True)
    _part_threads()
    function: Callable[..., None] = found.rewrite()
    return function


@cache
def _constexprs(function: Callable[..., None]) -> frozenset[str]:
    """Parameters that are plain numbers in the kernel, not tensors."""
    from triton.runtime.interpreter import GridExecutor

    return frozenset(GridExecutor(function, list(inspect.signature(function).parameters), (1, 1, 1)).constexprs)


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
