"""Runs the launches of plugins/sampling on SamplingInputs, without an engine around them."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ingot.plugins.kernel import CpuKernel
from ingot.runtime.sampling_inputs import SamplingInputs, StepOutputs, work_bytes

from .native import Library, Step, aligned

_FIELDS = ("rows", "history_ids", "history_counts", "bias_ids", "bias_values", "masks", "tokens", "logprobs", "ranks",
           "top_ids", "top_logprobs", "peaks", "raw_sums", "sums", "work")
_CALLS = {"scan": "", "sum": "", "choose": "step->positions, step->logit_rows, "}


def kernels(vocab_size: int) -> list[CpuKernel]:
    """The three launches, with the fields of ingot_sampling as args: an emulator can only move memory that is one."""
    fields = ", ".join(f".{name} = args[{i}]" for i, name in enumerate(_FIELDS, 2))
    head = ("const int32_t *counts = args[1];\nconst ingot_sampling s = {counts[0], counts[1], counts[2], counts[3], "
            f"{fields}}};\n")
    return [CpuKernel(f"test_sample_{name}_{vocab_size}", "sampling/sampling.h",
                      f"{head}ingot_sample_{name}(&s, args[0], {more}{vocab_size}, worker, num_workers);")
            for name, more in _CALLS.items()]


def run(library: Library, inputs: SamplingInputs, logits: np.ndarray, positions: Sequence[int] | None = None,
        workers: int = 1) -> StepOutputs:
    """The outputs of the rows of logits [rows, V]; row i stands at positions[i], by default i."""
    rows, vocab_size = logits.shape
    step = Step.of_tokens(rows, logit_rows=range(rows))
    step.positions = np.array(range(rows) if positions is None else positions, np.int32)
    outputs, scratch = inputs.outputs, inputs._scratch
    for array in (outputs.logprobs, outputs.top_logprobs, *scratch):
        array.fill(np.nan)
    for array in (outputs.tokens, outputs.ranks, outputs.top_ids):
        array.fill(-99)
    work = aligned((work_bytes(vocab_size, workers) // 4,))
    counts = np.array([inputs.num_rows, inputs.history_ids.shape[1], inputs.bias_ids.shape[1], inputs.masks.shape[1]],
                      np.int32)
    arrays = [getattr(inputs, name, None) if hasattr(inputs, name) else getattr(outputs, name, None)
              for name in _FIELDS[:-4]]
    for kernel in kernels(vocab_size):
        library.run(kernel, step, logits, counts, *arrays, *scratch, work, workers=workers)
    return outputs.first(rows)
