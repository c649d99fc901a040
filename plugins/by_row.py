"""Kernels that walk the same rows as one: each row goes through all of them before the next one begins."""
from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from .constants import Rows, rows_in_c
from .kernel import CpuKernel


@dataclass(frozen=True)
class Pointer:
    """What an argument of a part points to: `offset` bytes into argument `number` of the whole, or, if it is `own`,
    into the row of that number that a worker has in memory of its own."""

    number: int
    offset: int = 0
    own: bool = False


def by_row(rows: Rows, parts: Sequence[tuple[CpuKernel, Sequence[Pointer]]], own: Sequence[int] = ()) -> CpuKernel:
    """args: what the parts' pointers number.

    parts  kernels that divide `rows` rows evenly among the workers, with their arguments; of what another part reads or
           writes each touches no more than the row that it is at
    own    bytes of a row of each f32 value that lies nowhere but there

    A part is called as the worker of the row's number among as many workers as there are rows, whose share is that row.
    """
    lines = ["const ingot_step whole = *step; /* as a copy, of which nothing that is written can be a part */",
             f"const int rows = {rows_in_c(rows)};", "int begin, end;",
             "ingot_split(rows, worker, num_workers, &begin, &end);",
             *(f"_Alignas(64) float own{number}[{size // 4}];" for number, size in enumerate(own)),
             "for (int row = begin; row < end; row++) {"]
    for kernel, pointers in parts:
        lines += ["    {", f"        void *const part[] = {{{', '.join(_in_c(p, own) for p in pointers)}}};",
                  "        void *const *args = part;", "        const ingot_step *step = &whole;",
                  "        const int worker = row, num_workers = rows;",
                  *(f"        {line}" for line in kernel.body.splitlines()), "    }"]
    lines.append("}")
    preludes = dict.fromkeys(kernel.prelude + "\n" for kernel, _ in parts if kernel.prelude)
    assert all(prelude.lstrip()[:2] in ("/*", "//") for prelude in preludes), "helpers would be defined twice"
    constants = f"{rows} {[list(pointers) for _, pointers in parts]} {list(own)}"
    digest = hashlib.sha256(constants.encode()).hexdigest()[:8]
    name = "__".join(kernel.symbol for kernel, _ in parts)
    return CpuKernel(f"{name}_{digest}", "cpu/repeated.h", "\n".join(lines), "".join(preludes))


def _in_c(pointer: Pointer, own: Sequence[int]) -> str:
    offset = f" + {pointer.offset}" if pointer.offset else ""
    if pointer.own:
        return f"(char *)own{pointer.number}{offset} - (ptrdiff_t)row * {own[pointer.number]}"
    return f"(char *)args[{pointer.number}]{offset}" if offset else f"args[{pointer.number}]"
