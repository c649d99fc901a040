"""What an engine does right now."""

from dataclasses import dataclass
from typing import Literal

Health = Literal["serving", "draining", "failed", "stopped"]


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. Requests that have not ended are running, waiting (never admitted) or paused.

    max_queue_size     so many may wait before a new one is refused
    num_blocks         KV blocks of the device; free ones hold nothing, cached ones what a later request may reuse
    block_size         tokens in a KV block
    num_host_blocks    KV blocks of the host tier
    guaranteed_requests  requests of the longest length that run at once without one having to wait for KV blocks
    """

    health: Health
    num_running: int
    num_waiting: int
    num_paused: int
    max_batch_size: int
    max_queue_size: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    block_size: int
    num_host_blocks: int
    num_used_host_blocks: int
    guaranteed_requests: int

    @property
    def kv_cache_usage(self) -> float:
        """Share of the device's KV blocks that running requests hold, 0 to 1."""
        return self.num_used_blocks / self.num_blocks
