"""Token buckets, and what an engine needs of memory."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ingot.runtime.lora import LoraRoom

from ..weights.packed import PackedWeight
from .kv_cache import KvCache
from .plan import Bucket


def token_buckets(max_num_tokens: int) -> list[int]:
    """1, 2, 4, … max_num_tokens: each has its own kernels and its own arena."""
    buckets = [1]
    while buckets[-1] < max_num_tokens:
        buckets.append(min(2 * buckets[-1], max_num_tokens))
    return buckets


def memory_report(weights: Sequence[PackedWeight], buckets: Sequence[Bucket], kv: KvCache,
                  lora: LoraRoom | None = None) -> dict[str, Any]:
    """Sizes in bytes. kv_tables: the window of each block table, null if it has none, and its number of layers.
    lora_bytes: of the slots for adapters, where there is room for some."""
    largest = max(buckets, key=lambda bucket: bucket.arena_bytes)
    return {"weights_bytes": sum(weight.size_bytes for weight in weights),
            "arena_bytes": largest.arena_bytes, "arena_bound_bytes": largest.arena_bound_bytes,
            "arena_unshared_bytes": largest.arena_unshared_bytes,
            **({"lora_bytes": lora.num_bytes} if lora else {}),
            "kv_block_size": kv.block_size, "kv_block_bytes": kv.block_bytes,
            "kv_tables": [{"window": window, "layers": sum(slot.table == table for slot in kv.slots)}
                          for table, window in enumerate(kv.windows)],
            "kv_bytes_per_token": kv.bytes_per_token,
            "kv_bytes_per_token_beyond_windows": kv.bytes_per_token_beyond_windows}
