"""Kernels for another machine than this one, run under a user-mode emulator, where one is installed (qemu-user)."""
from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from ingot.compiler.cpu.isa import CpuIsa
from ingot.compiler.cpu.toolchain import COMPILE_FLAGS, command
from ingot.plugins.kernel import INCLUDE_DIR, CpuKernel, translation_unit

_MAIN = Path(__file__).with_name("emulated.c")


def emulator(machine: str) -> str | None:
    """The program that runs a static executable of that machine, or None."""
    return shutil.which(f"qemu-{machine}-static") or shutil.which(f"qemu-{machine}")


class EmulatedKernels:
    """The kernels in one static executable, started anew for every launch."""

    def __init__(self, kernels: Iterable[CpuKernel], isa: CpuIsa, folder: Path) -> None:
        kernels = list(dict.fromkeys(kernels))
        program = emulator(isa.machine)
        assert program is not None, isa
        table = ", ".join(f'{{"{kernel.symbol}", {kernel.symbol}}}' for kernel in kernels)
        source = folder / f"{isa.name}.c"
        table = f"static const struct {{ const char *name; ingot_kernel function; }} kernels[] = {{{table}}};"
        source.write_text("\n".join([translation_unit(kernels), table, _MAIN.read_text()]))
        binary = source.with_suffix("")
        compiler = [f"{isa.machine}-linux-musl" if word == isa.zig_target else word for word in command(isa, "zig")]
        subprocess.run([*compiler, *COMPILE_FLAGS, "-static", f"-I{INCLUDE_DIR}", str(source), "-o", str(binary)],
                       check=True, capture_output=True, text=True)
        self._command = [program, str(binary)]

    def run(self, symbol: str, counts: Sequence[int], arrays: Sequence[np.ndarray],
            args: Sequence[np.ndarray | None], workers: int) -> None:
        """counts: the four of ingot_step; arrays: its seven. Arguments that share memory do so there too."""
        spans = sorted(_span(a) for a in args if a is not None)
        segments = [_span(a) for a in arrays]
        first = len(segments)
        for begin, end in spans:
            if len(segments) > first and begin <= segments[-1][1]:
                segments[-1] = (segments[-1][0], max(end, segments[-1][1]))
            else:
                segments.append((begin, end))
        head = [workers, *counts, len(segments), len(args)]
        sizes = [number for begin, end in segments for number in (end - begin, begin % 64)]
        places = [number for a in args for number in _place(a, segments, first)]
        data = [ctypes.string_at(begin, end - begin) for begin, end in segments]
        request = b"".join([symbol.encode(), b"\n", struct.pack(f"<{len(head)}i", *head),
                            struct.pack(f"<{len(sizes) + len(places)}q", *sizes, *places), *data])
        done = subprocess.run(self._command, input=request, capture_output=True)
        assert done.returncode == 0, f"{symbol}: exit status {done.returncode} {done.stderr.decode(errors='replace')}"
        at = 0
        for number, (begin, end) in enumerate(segments):
            if number >= first:
                ctypes.memmove(begin, done.stdout[at:at + end - begin], end - begin)
            at += end - begin


def _span(array: np.ndarray) -> tuple[int, int]:
    begin, end = np.lib.array_utils.byte_bounds(array)
    return begin, end


def _place(array: np.ndarray | None, segments: Sequence[tuple[int, int]], first: int) -> tuple[int, int]:
    if array is None:
        return -1, 0
    address = array.ctypes.data
    number = next(i for i in range(first, len(segments)) if segments[i][0] <= address <= segments[i][1])
    return number, address - segments[number][0]
