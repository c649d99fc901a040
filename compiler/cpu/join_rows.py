"""Launches that walk the same rows become one: a row stays in the first-level cache until the last of them is done.

A norm or a gated activation writes rows of float32 that `quantize` reads next, and nothing else. Joined they take one
barrier instead of two, and those rows lie nowhere but in a worker's own memory.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping

from ingot.plugins.by_row import Pointer, by_row
from ingot.plugins.kernel import CpuKernel

from ..plan.plan import Arg, Launch, Write
from .repeat import MAX_REPEATED_TOKENS

_MAX_OWN_BYTES = 64 << 10
"""Of a row that lies on a worker's stack."""


def join_rows(launches: list[Launch], kernels: dict[str, CpuKernel], row_bytes: Mapping[str, int],
              kept: Collection[str], tokens: int) -> list[Launch]:
    """The launches of a bucket of so many tokens, neighbours with equal `rows` joined.

    row_bytes: buffer of f32 -> bytes of a row, for those that launches with `rows` write. kept: buffers that must be in
    memory all the same. The kernels of joined launches are added to `kernels`.
    """
    if tokens <= MAX_REPEATED_TOKENS:  # then each worker repeats them, or they are shared by columns
        return launches
    runs: list[list[Launch]] = []
    for launch in launches:
        if runs and launch.rows and launch.rows == runs[-1][-1].rows:
            runs[-1].append(launch)
        else:
            runs.append([launch])
    users: dict[str, int] = {}
    for launch in launches:
        for name in launch.reads:
            users[name] = users.get(name, 0) + 1
    return [run[0] if len(run) == 1 else _joined(run, kernels, _own(run, row_bytes, kept, users)) for run in runs]


def _own(run: list[Launch], row_bytes: Mapping[str, int], kept: Collection[str], users: Mapping[str, int],
         ) -> dict[str, int]:
    """The buffers that only these launches use, all of them rows of f32 that one writes for the others."""
    names = [name for launch in run for name in launch.reads]
    return {name: row_bytes[name] for name in dict.fromkeys(names)
            if 1 < names.count(name) == users[name] and name not in kept
            and row_bytes.get(name, _MAX_OWN_BYTES + 1) <= _MAX_OWN_BYTES}


def _joined(run: list[Launch], kernels: dict[str, CpuKernel], own: Mapping[str, int]) -> Launch:
    args: dict[Arg, int] = {}
    numbers = {name: number for number, name in enumerate(own)}
    parts, writes = [], dict[str, Write]()
    for launch in run:
        pointers = [Pointer(numbers[arg.name], arg.offset, own=True) if arg.kind == "value" and arg.name in own
                    else Pointer(args.setdefault(arg, len(args))) for arg in launch.args]
        parts.append((kernels[launch.kernel], pointers))
        for name, write in launch.writes.items():
            if not pointers[write.arg].own:
                writes[name] = Write(pointers[write.arg].number, write.shape, write.dtype)
    kernel = by_row(run[0].rows, parts, list(own.values()))
    kernels[kernel.symbol] = kernel
    reads = dict.fromkeys(name for launch in run for name in launch.reads if name not in own)
    return Launch(kernel.symbol, tuple(args), run[-1].origin, tuple(reads), writes,
                  op="+".join(launch.op for launch in run), rows=run[0].rows)
