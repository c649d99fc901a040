"""What a machine can do at most: kernels that only read memory, or only multiply and add on registers.

They are part of every CPU engine, so that a profile can be held against ceilings that were measured in the same run,
by the same threads, without a compiler.
"""
from __future__ import annotations

from ..kernel import CpuKernel

READ_PIECE_BYTES = 4096
"""The ceiling "read" reads step->num_tokens such pieces."""

CHAINS = 12
"""Additions that do not wait for each other; the other ceilings repeat them step->num_tokens times."""

OUT_BYTES = 1024
"""Of the second argument, for each worker: what it leaves there, so that its work is not optimized away."""

_READ = CpuKernel("ceiling_read", "cpu/simd.h", f"""\
vf sums[4] = {{vf_zero(), vf_zero(), vf_zero(), vf_zero()}};
const float *from = args[0];
int begin, end;
ingot_split(step->num_tokens, worker, num_workers, &begin, &end);
for (size_t i = (size_t)begin * {READ_PIECE_BYTES // 4}; i < (size_t)end * {READ_PIECE_BYTES // 4}; i += 4 * VF_LANES)
    for (int j = 0; j < 4; j++) sums[j] = vf_max(sums[j], vf_load(from + i + j * VF_LANES));
*(float *)((char *)args[1] + {OUT_BYTES} * worker) =
    vf_hmax(vf_max(vf_max(sums[0], sums[1]), vf_max(sums[2], sums[3])));""")

_STEPS = {"float": ("vf", "vf_fma(a, b, sums[j])", "VF_LANES"),
          "int8": ("vi", "vi_step_i8(sums[j], a, sums[j])", "4 * VF_LANES"),
          "w4a8": ("vi", "vi_step_u4(sums[j], a, sums[j])", "4 * VF_LANES")}
"""The vector; the instruction, or the few, that multiply and add; how many products they add up."""


def _multiply(kind: str) -> CpuKernel:
    vector, step, products = _STEPS[kind]
    return CpuKernel(f"ceiling_{kind}", "linear/integer_vectors.h", f"""\
{vector} sums[{CHAINS}], a, b;
memcpy(&a, args[0], sizeof a);
memcpy(&b, args[0], sizeof b);
for (int j = 0; j < {CHAINS}; j++) sums[j] = a;
for (int i = 0; i < step->num_tokens; i++) {{
    INGOT_UNROLL for (int j = 0; j < {CHAINS}; j++) sums[j] = {step};
}}
memcpy((char *)args[1] + {OUT_BYTES} * worker, sums, sizeof sums);
if (worker == 0) *(int32_t *)args[2] = {products};""")


CEILINGS = {"read": _READ, **{kind: _multiply(kind) for kind in _STEPS}}
"""args of "read": the memory; out. Of the others, which count products of float32, of 8-bit numbers, and of 4-bit with
8-bit ones: 64 bytes of zeros; out; i32 [1], which becomes the number of products that one addition adds up."""
