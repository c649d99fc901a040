"""Small launches before a matrix become part of it: each worker repeats them for itself, instead of waiting for all.

In a step of a token or two a norm takes a fraction of a microsecond, and so does the barrier behind it. The first
worker writes the results where they would have been, for launches that follow; the others to memory of their own.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ingot.plugins.kernel import CpuKernel
from ingot.plugins.repeated import repeated

from ..plan.plan import Launch, Write

MAX_REPEATED_TOKENS = 2
"""In steps of up to so many tokens launches are repeated, and a matrix quantizes its input itself."""

_MAX_REPEATED_BYTES = 32 << 10
"""Of results whose work the workers would otherwise share: as much as they compute in the time of a barrier or two."""

_ONE_WORKER = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
"""Operators whose rows fall to one worker each: to repeat them costs no time at all."""

_SHARED = ("loop", "attention_combine")


def repeat_small_launches(launches: list[Launch], kernels: dict[str, CpuKernel], sizes: Mapping[str, int],
                          tokens: int) -> list[Launch]:
    """The launches of a bucket of so many tokens, the small ones joined to the matrix that reads them.

    sizes: of the buffers, in bytes. The kernels of joined launches are added to `kernels`.
    """
    if tokens > MAX_REPEATED_TOKENS:
        return launches
    found: list[Launch] = []
    for launch in reversed(launches):
        if found and _may_join(launch, found[-1], sizes):
            found[-1] = _joined(launch, found[-1], kernels, sizes)
        else:
            found.append(launch)
    return found[::-1]


def _may_join(first: Launch, second: Launch, sizes: Mapping[str, int]) -> bool:
    if second.op.rpartition("+")[2] != "linear":
        return False
    written = {first.args[write.arg].name for write in first.writes.values()}
    others = {arg.name for i, arg in enumerate(first.args) if i not in {w.arg for w in first.writes.values()}}
    overwritten = {second.args[write.arg].name for write in second.writes.values()}
    if not written & {arg.name for arg in second.args} or written & others or overwritten & (written | others):
        return False
    small = sum(sizes[name] for name in written) <= _MAX_REPEATED_BYTES
    return first.op in _ONE_WORKER or (first.op in _SHARED and small)


def _joined(first: Launch, second: Launch, kernels: dict[str, CpuKernel], sizes: Mapping[str, int]) -> Launch:
    outputs = {write.arg: sizes[first.args[write.arg].name] for write in first.writes.values()}
    of_first = {first.args[number].name: number for number in outputs}
    passed = {number: (of_first[arg.name], arg.offset - first.args[of_first[arg.name]].offset)
              for number, arg in enumerate(second.args) if arg.kind == "value" and arg.name in of_first}
    kernel = repeated(kernels[first.kernel], len(first.args), outputs, kernels[second.kernel], len(second.args), passed)
    kernels[kernel.symbol] = kernel
    kept = [number for number in range(len(second.args)) if number not in passed]
    place = {number: len(first.args) + i for i, number in enumerate(kept)}
    writes: dict[str, Write] = {name: replace(write, arg=place[write.arg]) for name, write in second.writes.items()}
    return Launch(kernel.symbol, (*first.args, *(second.args[number] for number in kept)), second.origin,
                  tuple(dict.fromkeys((*first.reads, *second.reads))), {**writes, **first.writes},
                  op=f"{first.op}+{second.op}")
