"""How many tokens the KV cache of an engine gets room for, decided before the engine is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import RequestError, WorkFailed
from .host import available_memory_bytes
from .program import Limits

DEFAULT_FRACTION = 0.5
"""The other half is for the rest of the machine, and for what the servers hold of requests and answers."""


class KvCacheSizeError(RequestError):
    """A size of the KV cache that cannot be had."""


def kv_cache_tokens(manifest: dict[str, Any], fraction: float = DEFAULT_FRACTION, option: str = "--kv-cache-fraction",
                    available_bytes: Callable[[], int] = available_memory_bytes) -> int:
    """Tokens that take `fraction` of the memory that is free once weights and arena are in place.

    option: what the fraction is called where the user gave it.
    Raises KvCacheSizeError for a fraction beyond 0 to 1, WorkFailed if there is no room for a single token.
    """
    if not 0 < fraction <= 1:
        raise KvCacheSizeError(f"{option} is {fraction!r}; expected above 0 and at most 1")
    memory = manifest["memory"]
    token_bytes, available = memory.get("kv_bytes_per_token", 0), available_bytes()
    if not token_bytes or not available:  # a model without attention, a system that does not tell its free memory
        return most_useful_tokens(manifest)
    taken = memory.get("fixed_bytes", sum(memory.get(part, 0) for part in ("weights_bytes", "arena_bytes",
                                                                           "lora_bytes")))
    tokens = int(fraction * (available - taken)) // token_bytes
    if tokens < 1:
        raise WorkFailed(f"no memory for a KV cache: {available} bytes are free, weights and arena take {taken}, and a "
                         f"token takes {token_bytes}.\n  Free some, or use an engine of lower precision.")
    return tokens


def most_useful_tokens(manifest: dict[str, Any]) -> int:
    """What the largest batch of the longest sequences takes: more serves the reuse of prefixes only."""
    limits = Limits.of(manifest)
    return limits.max_batch_size * limits.max_seq_len
