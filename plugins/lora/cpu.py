"""The kernels of LoRA adapters on CPUs."""
from __future__ import annotations

import hashlib
from dataclasses import dataclass

from ..kernel import CpuKernel

_HEADER = "lora/lora.h"


@dataclass(frozen=True)
class Shrink:
    """h[T, num_modules * rank] = x[T, k] aᵀ

    x_stride      elements between rows of x; 0: k
    module_bytes  from one module's a to the next one's, in a slot of slot_bytes
    """

    k: int
    rank: int
    num_modules: int
    module_bytes: int
    slot_bytes: int
    x_stride: int = 0


@dataclass(frozen=True)
class Expand:
    """y[T, n] += h[T, h_width] b, in the columns of each part.

    parts  (first column of y, columns, bytes from the pointer to its b, first column of h)
    """

    n: int
    h_width: int
    rank: int
    slot_bytes: int
    parts: tuple[tuple[int, int, int, int], ...]


def shrink(problem: Shrink) -> CpuKernel:
    """args: x f32, a (of the first module, in slot 0) bf16, h f32. Rows of tokens without adapter stay as they are."""
    p = problem
    stride = p.x_stride or p.k
    body = (f"const ingot_lora_inner c = {{.k = {p.k}, .x_stride = {stride}, .rank = {p.rank}, "
            f".num_modules = {p.num_modules},\n"
            f"                            .module_bytes = {p.module_bytes}, .slot_bytes = {p.slot_bytes}}};\n"
            "ingot_lora_shrink(step, args[0], args[1], args[2], worker, num_workers, c);")
    words = ["lora_shrink", f"k{p.k}", f"r{p.rank}", f"m{p.num_modules}", f"s{p.slot_bytes}",
             *([f"a{p.module_bytes}"] if p.num_modules > 1 else []), *([f"x{stride}"] if stride != p.k else [])]
    return CpuKernel("_".join(words), _HEADER, body)


def expand(problem: Expand) -> CpuKernel:
    """args: y f32, h f32, b bf16 (of slot 0, the parts' offsets counted from there). y is changed in place."""
    p = problem
    parts = ", ".join(f"{{{start}, {width}, {column}, {offset}}}" for start, width, offset, column in p.parts)
    body = (f"static const ingot_lora_part parts[] = {{{parts}}};\n"
            f"ingot_lora_expand(step, args[0], args[1], args[2], worker, num_workers, {p.n}, {p.h_width}, {p.rank}, "
            f"{p.slot_bytes}, parts,\n                  {len(p.parts)});")
    digest = hashlib.sha256(repr(p).encode()).hexdigest()[:8]
    return CpuKernel(f"lora_expand_n{p.n}_r{p.rank}_{digest}", _HEADER, body)
