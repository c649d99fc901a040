"""What a manifest tells of the kernels of a GPU engine."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..targets import Architecture
from .choose import Choice
from .lower import Request
from .triton_compile import CompiledKernel

GENERATION_TOKENS = 64
"""Steps of up to so many tokens are bound by the weights' way from memory."""


def kernel_report(asked: Sequence[tuple[int, Request, Choice]], code: Mapping[str, CompiledKernel],
                  arch: Architecture) -> list[dict[str, Any]]:
    """An entry a kernel: how often it runs in which bucket, why it was chosen, what its code needs.

    phase          "generation", "context" or "both", by the tokens of its buckets
    seconds_model  what the model of the device gives for it, in the largest of its buckets
    refused        candidates that were preferred, or are not legal, and why
    """
    entries: dict[str, dict[str, Any]] = {}
    for tokens, request, choice in asked:
        for launch in choice.candidate.launches:
            compiled = code[launch.kernel.symbol]
            entry = entries.setdefault(launch.kernel.symbol, {
                "name": launch.kernel.symbol, "op": request.op, "tactic": choice.candidate.name, "tuned_by": "model",
                "precision": request.precision, "launches": {}, "refused": [], "registers": compiled.registers,
                "spill_stores": compiled.spill_stores, "spill_loads": compiled.spill_loads,
                "stack_bytes": compiled.stack_bytes, "shared_bytes": compiled.shared_bytes,
                "threads": 32 * compiled.num_warps, "blocks_per_sm": compiled.occupancy(arch),
                "matrix": compiled.matrix, "code_bytes": len(compiled.cubin)})
            counts = entry["launches"]
            counts[str(tokens)] = counts.get(str(tokens), 0) + 1
            entry["seconds_model"] = choice.seconds
            entry["refused"] = sorted({*map(tuple, entry["refused"]), *choice.refused})
    for entry in entries.values():
        entry["refused"] = [{"tactic": tactic, "reason": reason} for tactic, reason in entry["refused"]]
        buckets = [int(tokens) for tokens in entry["launches"]]
        few, many = min(buckets) <= GENERATION_TOKENS, max(buckets) > GENERATION_TOKENS
        entry["phase"] = "both" if few and many else "generation" if few else "context"
    return list(entries.values())
