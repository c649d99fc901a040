"""How much KV cache an engine gets that is loaded beside one that still runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import WorkFailed

SPARE_FRACTION = 0.05
"""Of the free memory, for what grows while both engines are there."""


class NoRoom(WorkFailed):
    """Two engines do not fit the memory at once."""


@dataclass(frozen=True)
class KvBudget:
    """What the server's first engine had, and so what each later one shall have. Bytes, for engines differ in what a
    token takes; tokens where the user has asked for tokens.

    min_fraction  an engine that cannot have this part of it is refused
    """

    device_bytes: int
    host_bytes: int
    device_tokens: int | None = None
    host_tokens: int | None = None
    min_fraction: float = 0.5

    def tokens(self, manifest: dict[str, Any]) -> tuple[int, int]:
        """(on the device, in the host tier) for another engine."""
        token_bytes = manifest["memory"].get("kv_bytes_per_token", 0) or 1
        device, host = self.device_bytes // token_bytes, self.host_bytes // token_bytes
        return (device if self.device_tokens is None else self.device_tokens,
                host if self.host_tokens is None else self.host_tokens)


def kv_beside(manifest: dict[str, Any], wanted: int, host_tokens: int, min_fraction: float, what: str,
              available_bytes: Callable[[], int]) -> int:
    """Tokens of KV cache, at most `wanted`, for an engine that is loaded beside another.

    host_tokens: in the host tier, if that takes of the same memory. Weights are counted as a whole, although those that
    both engines map from one store are in memory once. Raises NoRoom, with the sums, if less than min_fraction of
    `wanted` fits. what: the engine's name in the error.
    """
    memory = manifest["memory"]
    token_bytes, available = memory.get("kv_bytes_per_token", 0), available_bytes()
    if not token_bytes or not available:  # a model without attention, a system that does not tell its free memory
        return wanted
    weights, arena = memory.get("weights_bytes", 0), memory.get("arena_bytes", 0) + memory.get("workspace_bytes", 0)
    spare, host, adapters = int(SPARE_FRACTION * available), host_tokens * token_bytes, memory.get("lora_bytes", 0)
    left = available - spare - weights - arena - adapters - host
    fits = max(0, left // token_bytes)
    least = max(1, int(min_fraction * wanted))
    if fits < least:
        for_adapters = f"{adapters:,} for LoRA adapters, " if adapters else ""
        raise NoRoom(
            f"{what} does not fit beside the engine that runs: {available:,} bytes are free; of these {weights:,} are "
            f"for weights, {arena:,} for the arena, {for_adapters}{host:,} for {host_tokens:,} tokens in the host "
            f"tier, and {spare:,} stay free. That leaves {max(0, left):,} bytes, {fits:,} tokens of KV cache; at least "
            f"{least:,} are wanted ({min_fraction:.0%} of {wanted:,}).\n  Ask for less KV cache (--kv-cache-tokens), "
            "let the server accept less (ingot serve --swap-min-kv), or start it with less, so that there is room for "
            "two (--kv-cache-fraction).")
    return min(wanted, fits)
