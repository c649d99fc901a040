"""The kernels that multiply each token with the matrices of its experts."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..kernel import CpuKernel
from ..linear.cpu import MAX_FUSED_ROWS, ahead, block_rows, tile_arguments, tile_registers
from ..linear.pack import pack, packed_size
from ..quantize.cpu import rounding
from ..quantize.reference import row_bytes
from ..scheme import Scheme

_CHUNK_PAIRS = 4096
"""Pairs (token, choice) that are sorted at a time, on the stack of a worker."""


@dataclass(frozen=True)
class Problem:
    """y[T, choices, n] = x w[ids[T, choices]]^T (+ bias[experts, n]); w [experts, n, k]

    shared      x is [T, k], the same for all choices of a token; else [T, choices, k]
    m           the largest number of tokens in a step
    float_input a kernel of rounded inputs takes x as float32 and rounds it itself; for at most MAX_FUSED_ROWS rows
                of x
    """

    experts: int
    choices: int
    n: int
    k: int
    scheme: Scheme
    m: int
    shared: bool
    bias: bool = False
    float_input: bool = False

    def __post_init__(self) -> None:
        assert not self.float_input or (self.scheme.rounds_inputs and self.max_x_rows <= MAX_FUSED_ROWS), self

    @property
    def max_x_rows(self) -> int:
        return self.m if self.shared else self.m * self.choices

    @property
    def size_class(self) -> int:
        """1, 8, or 0 for any number of tokens."""
        return 1 if self.m == 1 else 8 if self.m <= 8 else 0


def expert_bytes(n: int, k: int, scheme: Scheme) -> int:
    """Bytes from one expert's packed matrix to the next."""
    return packed_size(n, k, scheme)


def pack_experts(w: np.ndarray, scheme: Scheme) -> np.ndarray:
    """w [E, N, K] (see linear.pack.pack) -> uint8 [E * expert_bytes]."""
    return np.concatenate([pack(expert, scheme) for expert in w])


def emit(problem: Problem) -> CpuKernel:
    """args: x, ids, w, y, then bias where there is one.

    x f32 [T, k] or [T, choices, k], or rounded rows of it for a scheme of such inputs without float_input;
    ids i32 [T, choices] in [0, experts); w from pack_experts(); y f32 [T, choices, n]; bias f32 [experts, n].
    """
    p = problem
    prepare, source, stride = "", "args[0]", 4 * p.k
    if p.scheme.rounds_inputs:
        stride = row_bytes(p.k, p.scheme)
        if p.float_input:
            source = "rows"
            count = "step->num_tokens" if p.shared else f"{p.choices} * step->num_tokens"
            prepare = (f"_Alignas(64) uint8_t rows[{p.max_x_rows * stride}];\n"
                       + rounding("args[0]", "rows", count, p.k, p.k, p.scheme, "0, 1") + "\n")
    begin, end = tile_registers(p.scheme, p.size_class)
    chunk = min(_CHUNK_PAIRS, (p.size_class or _CHUNK_PAIRS) * p.choices)
    body = (f"{prepare}{begin}int32_t order[{chunk}], starts[{p.experts + 1}];\n"
            f"const ingot_matmul job = {{.x = {source}, .x_stride = {stride}, "
            f".share = {p.choices if p.shared else 1}, .w = args[2],\n"
            f"                          .y = args[3], .bias = {'args[4]' if p.bias else 'NULL'},\n"
            f"                          .n = {p.n}, .k = {p.k}, .ahead = {ahead(p.scheme, p.size_class)}}};\n"
            f"ingot_expert_linear({', '.join(tile_arguments(p.scheme, p.size_class, p.k))}, &job,\n"
            f"                    args[1], {p.choices} * step->num_tokens, {p.experts}, "
            f"{expert_bytes(p.n, p.k, p.scheme)}, order, starts, {chunk},\n"
            f"                    {block_rows(p.scheme, p.k)}, worker, num_workers);{end}")
    size = {1: "m1", 8: "m8", 0: "mx"}[p.size_class]
    options = [(not p.shared, "each"), (p.bias, "bias"), (p.float_input, f"quantize{p.max_x_rows}")]
    symbol = "_".join(["expert_linear", p.scheme.tag, f"e{p.experts}", f"c{p.choices}", f"n{p.n}", f"k{p.k}", size,
                       *(name for on, name in options if on)])
    return CpuKernel(symbol, "expert_linear/expert_linear.h", body)
