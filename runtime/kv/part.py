"""The blocks of one node in one group of tables, and the order in which such parts are evicted."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING

from .groups import Group
from .sequence import DEFAULT_PRIORITY

if TYPE_CHECKING:
    from .tree import Node

DEVICE, HOST = 0, 1

# One counter for all queues: an entry is good only in the queue that its part was pushed to last.
_TICKETS = count(1)


class Part:
    """Cached blocks: one a table of the group, all in the same tier.

    refs     active sequences that have these blocks in their tables; without any, the part can be evicted
    stamp    when its last use ended, as BlockStore.last_stamp counts
    expires  when its priority falls back to the default (clock time), None: never
    """

    __slots__ = ("blocks", "expires", "group", "node", "refs", "stamp", "ticket", "tier")

    def __init__(self, node: Node, group: Group, blocks: list[int]) -> None:
        self.node = node
        self.group = group
        self.blocks = blocks
        self.tier = DEVICE
        self.refs = 0
        self.stamp = 0
        self.ticket = 0
        self.expires: float | None = None

    @property
    def is_leaf(self) -> bool:
        """Whether no other part in its tier needs it. Blocks that leave a window go without regard to what follows."""
        if self.group.window is not None:
            return True
        node = self.node
        return not (node.num_host_children if self.tier else node.num_device_children)


Entry = tuple[int, int, int, Part]  # priority, stamp, ticket, part


class EvictionQueue:
    """The evictable leaves of one tier: lowest priority first, then those given up longest ago. O(log n).

    Entries are never sought out and removed: those whose part has changed since are passed over.
    """

    MIN_COMPACTION = 1024

    def __init__(self, clock: Callable[[], float], on_expired: Callable[[Node], None]) -> None:
        self._clock = clock
        self._on_expired = on_expired
        self._heap: list[Entry] = []
        self._expiring: list[tuple[float, int, Part]] = []
        self._compact_at = self.MIN_COMPACTION

    def push(self, part: Part) -> None:
        """Part has no refs and is a leaf of this tier."""
        ticket = part.ticket = next(_TICKETS)
        priority = part.node.priority
        if part.expires is not None and priority != DEFAULT_PRIORITY:
            heapq.heappush(self._expiring, (part.expires, ticket, part))
        heapq.heappush(self._heap, (priority, part.stamp, ticket, part))
        if len(self._heap) >= self._compact_at:
            self._compact()

    def peek(self) -> Part | None:
        """The part to evict next, if there is one."""
        if self._expiring:
            self._expire()
        heap = self._heap
        while heap:
            _, _, ticket, part = heap[0]
            if _is_good(part, ticket):
                return part
            heapq.heappop(heap)
        return None

    def parts(self) -> set[Part]:
        """All parts that would be evicted sooner or later, if nothing changed."""
        return {part for _, _, ticket, part in self._heap if _is_good(part, ticket)}

    def _expire(self) -> None:
        now, expiring = self._clock(), self._expiring
        while expiring and expiring[0][0] <= now:
            _, ticket, part = heapq.heappop(expiring)
            if not _is_good(part, ticket):
                continue
            part.expires = None
            if part.node.priority != DEFAULT_PRIORITY:
                part.node.priority, part.node.duration_s = DEFAULT_PRIORITY, None
                self._on_expired(part.node)
            self.push(part)

    def _compact(self) -> None:
        self._heap = [entry for entry in self._heap if _is_good(entry[3], entry[2])]
        heapq.heapify(self._heap)
        self._expiring = [entry for entry in self._expiring if _is_good(entry[2], entry[1])]
        heapq.heapify(self._expiring)
        self._compact_at = max(self.MIN_COMPACTION, 2 * len(self._heap))


def _is_good(part: Part, ticket: int) -> bool:
    return part.ticket == ticket and not part.refs and part.is_leaf
