"""Counters of the KV cache. In tokens, never ratios; a look-up is counted once, when its sequence is first admitted."""

from __future__ import annotations

from dataclasses import dataclass, field

# Why a prompt token had to be computed although a cache exists:
MISS_REASONS = (
    "cold",             # never seen, or too long ago to be remembered
    "evicted",          # was cached, and had to give way
    "partial_block",    # in a partly matching block that is not copied: partial reuse is off, or no room for it
    "salt",             # cached, but under another salt
    "lora",             # cached, but under another LoRA adapter
    "disabled",         # reuse is off, or the request does not allow it (prompt log probabilities)
    "recomputed_last",  # cached, but the last prompt token is always computed: its logits are wanted
)  # fmt: skip


@dataclass
class KvStats:
    """Since the start. queried_tokens = hit_tokens + the sum of miss_tokens.

    hit_tokens, host_hit_tokens   prompt tokens taken from the cache; those of them that came from the host tier
    miss_tokens                   by reason
    resumed_hit_tokens            tokens that sequences found again after a pause; not part of the above
    evicted_blocks                device blocks that lost their content, to the host tier or for good
    offloaded_blocks              those of them that went to the host tier; onboarded_blocks: came back from there
    host_evicted_blocks           blocks that the host tier lost
    copied_blocks                 copies of partly matching blocks
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    host_hit_tokens: int = 0
    miss_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MISS_REASONS, 0))
    resumed_hit_tokens: int = 0
    evicted_blocks: int = 0
    offloaded_blocks: int = 0
    onboarded_blocks: int = 0
    host_evicted_blocks: int = 0
    copied_blocks: int = 0


@dataclass(frozen=True)
class KvUsage:
    """Blocks right now. num_used: held by active sequences; num_cached: kept for reuse, given up when needed."""

    num_blocks: int
    num_used: int
    num_cached: int
    num_free: int
    num_reserved: int
    num_host_blocks: int
    num_host_cached: int
