"""Small PTX programs, run on arrays."""
from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tools.ptx.code import Code
from tools.ptx.machine import Launch, Options
from tools.ptx.memory import GlobalMemory
from tools.ptx.parser import parse

_REGISTERS = ".reg .pred %p<20>; .reg .b16 %rs<20>; .reg .b32 %r<40>; .reg .b64 %rd<40>;"


def run(body: str, arrays: Mapping[str, np.ndarray], grid: tuple[int, int, int] = (1, 1, 1), num_warps: int = 1,
        shared_bytes: int = 1024, **options: int | str) -> dict[str, np.ndarray]:
    """The arrays after a kernel whose parameters are their addresses, in %rd0, %rd1, …; %r0 is the thread, %r1 the
    block."""
    names = list(arrays)
    params = ", ".join(f".param .u64 .ptr .global .align 1 {name}" for name in names)
    loads = "\n".join(f"ld.param.b64 %rd{i}, [{name}];" for i, name in enumerate(names))
    text = f""".version 8.8
        .target sm_80
        .address_size 64
        .extern .shared .align 16 .b8 memory[];
        .visible .entry kernel({params}) .reqntid {32 * num_warps}
        {{ {_REGISTERS} {loads}
        mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x;
        {body}
        ret; }}"""
    memory = GlobalMemory(arrays)
    Launch(Code(parse(text)), memory, memory.addresses, grid, 32 * num_warps, shared_bytes,
           Options(**options)).run()  # type: ignore[arg-type]
    return memory.arrays()


def lanes(instructions: str, *inputs: np.ndarray, result: type = np.uint32) -> np.ndarray:
    """What 32 lanes compute: their elements of the inputs (32 or 64 bits) are in %a, %b, %c, the result is %d."""
    arrays = {f"in{i}": np.ascontiguousarray(array) for i, array in enumerate(inputs)} | {"out": np.zeros(32, result)}
    place, body = len(inputs), ""
    names = "abc"[:place]
    for i, array in enumerate(inputs):
        size = 8 * array.itemsize
        body += (f".reg .b{size} %{names[i]}; mad.wide.u32 %rd{20 + i}, %r0, {array.itemsize}, %rd{i};"
                 f"ld.global.b{size} %{names[i]}, [%rd{20 + i}];")
    size = np.dtype(result).itemsize
    body += (f".reg .b{8 * size} %d; mov.b{8 * size} %d, 0; {instructions}\n"
             f"mad.wide.u32 %rd30, %r0, {size}, %rd{place}; st.global.b{8 * size} [%rd30], %d;")
    return run(body, arrays)["out"]
