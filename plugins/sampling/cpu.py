"""Kernels of the CPU target that choose tokens: the last launches of a step."""
from __future__ import annotations

from ..constants import symbol
from ..kernel import CpuKernel

MAX_VOCAB_SIZE = 1 << 19
"""Sums of weights are exact up to it: see weights.h."""

_INCLUDE = "sampling/sampling.h"
_SHARE = "worker, num_workers"


def sampling(vocab_size: int) -> tuple[CpuKernel, ...]:
    """The launches in their order; args of each: logits f32 [L, vocab_size]. All else stands in the step."""
    assert 1 <= vocab_size <= MAX_VOCAB_SIZE, vocab_size
    logits = "step->sampling, (const float *)args[0]"
    return (
        CpuKernel(symbol("sample_scan", vocab_size), _INCLUDE, f"ingot_sample_scan({logits}, {vocab_size}, {_SHARE});"),
        CpuKernel(symbol("sample_sum", vocab_size), _INCLUDE, f"ingot_sample_sum({logits}, {vocab_size}, {_SHARE});"),
        CpuKernel(symbol("sample_choose", vocab_size), _INCLUDE,
                  f"ingot_sample_choose({logits}, step->positions, step->logit_rows, {vocab_size}, {_SHARE});"))
