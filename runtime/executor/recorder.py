"""Counters and histograms of a running engine, without the library that serves them.

The executor's thread writes, any thread reads: a reader may see a step half counted, never a broken number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from .request import FinishReason

CacheUse = Literal["hit", "partial", "miss"]
Phase = Literal["schedule", "inputs", "device", "tokens", "outputs"]

# Seconds. A queue that moves is told from one that does not at 1 ms; an answer may take minutes.
QUEUE_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
FIRST_TOKEN_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
INTER_TOKEN_BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
REQUEST_BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)
STEP_BOUNDS = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


@dataclass(slots=True)
class Histogram:
    """counts[i]: values of at most bounds[i] and above the bound before; the last count: those above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: int = 0
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += count
        self.sum += value * count


@dataclass(eq=False)
class Recorder:
    """What has happened since the engine was loaded.

    requests_finished   by finish reason; an answer each, so that n = 2 counts twice
    requests_refused    by the name of the error: QueueFull, NeverFits, …
    time_to_first_token by how much of the prompt was cached: "hit": all but the last block, "partial", "miss": nothing
    inter_token_latency between two tokens of one answer
    draft_tokens        tokens that were drafted and verified; accepted_draft_tokens: those that answers have got
    queue_time          from arrival to the first admission
    step_phases         where the host's time of a step goes; "device": waiting for it
    guided_mask_wait    time that a step was held back by grammar masks
    adapter_requests    requests by the name of their LoRA adapter; "": without one
    adapter_writes      how often a slot of the device was filled with an adapter
    The prefix cache counts for itself: executor.kv.stats.
    """

    requests_received: int = 0
    requests_finished: Counter[FinishReason] = field(default_factory=Counter)
    requests_refused: Counter[str] = field(default_factory=Counter)
    requests_paused: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    steps: int = 0
    time_to_first_token: dict[CacheUse, Histogram] = field(
        default_factory=lambda: {"hit": Histogram(FIRST_TOKEN_BOUNDS), "partial": Histogram(FIRST_TOKEN_BOUNDS),
                                 "miss": Histogram(FIRST_TOKEN_BOUNDS)})
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_BOUNDS))
    queue_time: Histogram = field(default_factory=lambda: Histogram(QUEUE_BOUNDS))
    request_time: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS))
    step_phases: dict[Phase, Histogram] = field(
        default_factory=lambda: {"schedule": Histogram(STEP_BOUNDS), "inputs": Histogram(STEP_BOUNDS),
                                 "device": Histogram(STEP_BOUNDS), "tokens": Histogram(STEP_BOUNDS),
                                 "outputs": Histogram(STEP_BOUNDS)})
    guided_mask_wait: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS))
    adapter_requests: Counter[str] = field(default_factory=Counter)
    adapter_writes: int = 0


def cache_use(num_prompt_tokens: int, num_cached_tokens: int, block_size: int) -> CacheUse:
    if num_cached_tokens == 0:
        return "miss"
    return "hit" if num_prompt_tokens - num_cached_tokens <= block_size else "partial"
