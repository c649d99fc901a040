"""What happens to cached blocks, for routers that send a request to where its prefix is."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Literal

EventKind = Literal["created", "stored", "removed", "updated"]
TierName = Literal["device", "host"]
TIER_NAMES: tuple[TierName, TierName] = ("device", "host")


@dataclass(frozen=True, slots=True)
class KvEvent:
    """One change. With several tables it tells of those that see farthest back.

    id           counts from 1, without gaps
    kind         created: the cache itself, with num_blocks (device, host)
                 stored: a block can be reused from now on
                 removed: it cannot any more
                 updated: it moved to `tier`, or has `priority` now
    block_hash   32 bytes (hashes.py); parent_hash: of the block before it, or of salt and LoRA adapter
    tokens       stored: the block's tokens, fewer than the block size in a partly filled one
    """

    id: int
    kind: EventKind
    block_hash: bytes = b""
    parent_hash: bytes = b""
    tokens: tuple[int, ...] = ()
    tier: TierName = "device"
    priority: int | None = None
    lora: int | None = None
    num_blocks: tuple[int, int] | None = None


class EventBuffer:
    """The last `capacity` events. Written by the thread that owns the cache, read by any."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._events: deque[KvEvent] = deque(maxlen=capacity)
        self._lock = threading.Lock()
        self._last_id = 0

    @property
    def last_id(self) -> int:
        return self._last_id

    def emit(self, kind: EventKind, block_hash: bytes = b"", parent_hash: bytes = b"", tokens: tuple[int, ...] = (),
             tier: TierName = "device", priority: int | None = None, lora: int | None = None,
             num_blocks: tuple[int, int] | None = None) -> None:
        with self._lock:
            self._last_id += 1
            self._events.append(KvEvent(self._last_id, kind, block_hash, parent_hash, tokens, tier, priority, lora,
                                        num_blocks))

    def since(self, last_id: int, max_events: int | None = None) -> tuple[list[KvEvent], bool]:
        """(events after the one with last_id, whether some between have been lost).

        A reader begins with 0 and goes on with the id of the last event it got. After a loss it must forget what it
        knows: the buffer was too small for how often it asked.
        """
        with self._lock:
            first_id = self._last_id - len(self._events) + 1
            skip = max(0, last_id - first_id + 1)
            stop = None if max_events is None else skip + max_events
            return list(islice(self._events, skip, stop)), last_id + 1 < first_id
