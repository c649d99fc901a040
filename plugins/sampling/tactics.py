"""Sampling on a GPU."""
from __future__ import annotations

from dataclasses import dataclass

from ..gpu.device import Device
from ..gpu.kernel import Candidate, Candidates, Cost, GpuKernel, GpuLaunch, arguments, symbol

SCRATCH = {"modified": 4, "listed": 4, "keys": 4, "weights": 8}
"""Scratch parameter -> bytes of an element; each holds a row of the vocabulary for every row of logits."""

_LEAST = 2048
"""Elements of a block's tile: with fewer the compiler keeps a value or two in local memory."""


@dataclass(frozen=True)
class Problem:
    """Rows of logits f32 [rows, vocab]. history, biases, masks: elements of a row of the lists and bit masks."""

    rows: int
    vocab: int
    history: int
    biases: int
    masks: int
    max_logprobs: int = 20


def candidates(problem: Problem, device: Device) -> Candidates:
    p = problem
    block = min(4096, max(_LEAST, 1 << (p.vocab - 1).bit_length()))
    names = ("logits", "counts", "rows", "history_ids", "history_counts", "bias_ids", "bias_values", "masks",
             "positions", "logit_rows", "tokens", "logprobs", "ranks", "top_ids", "top_logprobs", "modified", "listed",
             "keys", "weights")
    others = dict.fromkeys(("logits", "bias_values", "logprobs", "top_logprobs", "modified"), "*fp32")
    others["weights"] = "*i64"
    kernel = GpuKernel(
        symbol("sample", f"v{p.vocab}", f"h{p.history}", f"b{p.biases}", f"m{p.masks}", f"top{p.max_logprobs}"),
        "ingot.plugins.sampling.gpu", "sample",
        *arguments({name: others.get(name, "*i32") for name in names},
                   {"V": p.vocab, "HISTORY": p.history, "BIASES": p.biases, "MASKS": p.masks,
                    "MAX_LOGPROBS": p.max_logprobs, "BLOCK": block}), 8, 1)
    cost = Cost(4.0 * p.rows * p.vocab, 0)
    return Candidates((Candidate("sample", (GpuLaunch(kernel, (p.rows, 1, 1)),), cost),))
