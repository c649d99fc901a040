"""GPU launches on this CPU, in a process of their own: the interpreter and the compiler cannot share one.

Arrays lie in memory whose end is followed by a page that cannot be touched: a kernel that reads or writes beyond an
array ends the process instead of passing by luck.
"""
from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ingot.plugins.gpu.kernel import GpuLaunch
from ingot.runtime.errors import WorkFailed

_ALIGNMENT = 16
_PROT_NONE = 0


class InterpreterError(WorkFailed):
    """A kernel raised an error in the interpreter, or ended its process."""


Binding = str | tuple[str, int] | int | float
Call = tuple[GpuLaunch, Mapping[str, Binding]]


class Interpreter:
    """One interpreting process, to be used as a context."""

    def __init__(self) -> None:
        env = os.environ | {"TRITON_INTERPRET": "1"}
        self._process = subprocess.Popen([sys.executable, "-m", "ingot.compiler.gpu.interpret"], env=env,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def run(self, calls: Sequence[Call], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run launches in order and return the arrays as they are afterwards.

        A call's bindings tell for each parameter the name of its array, (name, offset in bytes), or a scalar's value;
        parameters without one are bound to the array of their own name. Element types are those of the kernels'
        signatures: an array only holds the bits. Raises InterpreterError.
        """
        assert self._process.stdin and self._process.stdout
        try:
            pickle.dump(([(launch, dict(bound)) for launch, bound in calls], dict(arrays)), self._process.stdin)
            self._process.stdin.flush()
            answer: Any = pickle.load(self._process.stdout)
        except (BrokenPipeError, EOFError):
            status = self._process.wait()
            names = ", ".join(launch.kernel.symbol for launch, _ in calls)
            raise InterpreterError(f"the interpreter ended (status {status}) in {names}; status -11 is an access "
                                   "outside of the given arrays") from None
        if isinstance(answer, str):
            raise InterpreterError(answer)
        result: dict[str, np.ndarray] = answer
        return result

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


class _Guarded:
    """Memory for one array, ending (up to alignment) where a page without access begins."""

    def __init__(self, array: np.ndarray) -> None:
        size = -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, whole + mmap.PAGESIZE)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        if ctypes.CDLL(None).mprotect(ctypes.c_void_p(begin + whole), mmap.PAGESIZE, _PROT_NONE):
            raise OSError("mprotect failed")
        self.address = begin + whole - size
        self.array = np.ndarray(array.shape, array.dtype, self._memory, whole - size)
        self.array[...] = array


def _answer(calls: list[Call], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    from ingot.plugins.gpu.interpret import run

    held = {name: _Guarded(array) for name, array in arrays.items()}
    for launch, bindings in calls:
        bound = {name: bindings.get(name, name) for name, _ in launch.kernel.parameters}
        run(launch, {name: _value(to, held) for name, to in bound.items()})
    return {name: guarded.array.copy() for name, guarded in held.items()}


def _value(binding: Binding, held: Mapping[str, _Guarded]) -> int | float:
    if isinstance(binding, str):
        return held[binding].address
    return held[binding[0]].address + binding[1] if isinstance(binding, tuple) else binding


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            calls, arrays = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: Any = _answer(calls, arrays)
        except Exception as error:
            names = ", ".join(launch.kernel.symbol for launch, _ in calls)
            answer = f"{names}: {type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
