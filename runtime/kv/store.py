"""The blocks of both tiers: which are free, which hold cached parts, and how room is made.

A device block is free, or in use by active sequences, or cached: part of the tree without anybody using it. Who needs a
block and finds none free evicts a cached one: it moves to the host tier, where that has room or something less worth
keeping, else it is lost. A host block is free or cached.

Block contents move by `copies`, a list that runs in order before the next launch. Because of this order a source needs
no protection once its copy stands in the list: whatever is put into its block comes later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .events import TIER_NAMES, EventBuffer, EventKind
from .groups import Group
from .misses import EvictedPrefixes
from .part import DEVICE, HOST, EvictionQueue, Part
from .stats import KvStats
from .tree import Node, PrefixTree, cache_key_of, digest_of


class BlockStore:
    """num_evictable: per tier the blocks of parts without refs; each of them can be freed, leaves first.

    num_windowed: device blocks in use in tables with a window. last_stamp: counts uses that have ended; a part's age.
    """

    def __init__(self, num_blocks: int, num_host_blocks: int, tree: PrefixTree, stats: KvStats,
                 clock: Callable[[], float], events: EventBuffer | None) -> None:
        # Stacks: what was freed last is used first, so that a small load touches little memory.
        self.free = [list(range(num_blocks))[::-1], list(range(num_blocks, num_blocks + num_host_blocks))[::-1]]
        self.has_host = num_host_blocks > 0
        self.num_evictable = [0, 0]
        self.num_windowed = 0
        self.last_stamp = 0
        self.copies: list[tuple[int, int]] = []
        self.evicted = EvictedPrefixes()
        self.queues = [EvictionQueue(clock, self._tell_priority) for _ in (DEVICE, HOST)]
        self._tree = tree
        self._stats = stats
        self._clock = clock
        self._events = events

    def take(self, group: Group, count: int) -> list[int]:
        """Device blocks for tables of the group. The caller knows that so many are free or evictable."""
        free = self.free[DEVICE]
        while len(free) < count:
            self._evict()
        blocks = free[len(free) - count :]
        del free[len(free) - count :]
        if group.window is not None:
            self.num_windowed += count
        return blocks[::-1]

    def give_back(self, group: Group, blocks: Sequence[int]) -> None:
        """Blocks that `take` gave and that are no part of the tree."""
        self.free[DEVICE] += blocks
        if group.window is not None:
            self.num_windowed -= len(blocks)

    def hold(self, part: Part) -> None:
        if not part.refs:
            size, tier = len(part.blocks), part.tier
            self.num_evictable[tier] -= size
            if tier == DEVICE and part.group.window is not None:
                self.num_windowed += size
        part.refs += 1

    def drop(self, part: Part) -> None:
        part.refs -= 1
        if not part.refs:
            size, tier = len(part.blocks), part.tier
            self.num_evictable[tier] += size
            if tier == DEVICE and part.group.window is not None:
                self.num_windowed -= size
            part.stamp = self.last_stamp
            duration_s = part.node.duration_s
            part.expires = None if duration_s is None else self._clock() + duration_s
            if part.is_leaf:
                self.queues[tier].push(part)

    def attach(self, node: Node, group: Group, blocks: list[int]) -> Part:
        """Blocks that `take` gave become the node's part, in use by one sequence."""
        part = node.parts[group.index] = Part(node, group, blocks)
        part.refs = 1
        if group.window is None:
            self._count_child(part, 1)
        if group.index == 0:
            self._tell("stored", part)
        return part

    def detach(self, part: Part) -> list[int]:
        """The blocks of a part with one reference, its sequence's own again."""
        assert part.refs == 1 and part.tier == DEVICE
        self._leave(part)
        return part.blocks

    def replace(self, part: Part, blocks: list[int]) -> None:
        """The part of nobody gets other device blocks with the same content, in use by one sequence."""
        assert not part.refs
        size, tier = len(part.blocks), part.tier
        self.num_evictable[tier] -= size
        self.free[tier] += part.blocks
        part.refs = 1
        self._move(part, DEVICE, blocks)

    def remove(self, part: Part) -> None:
        """The content of a part of nobody is given up."""
        assert not part.refs and part.is_leaf
        size, tier, node = len(part.blocks), part.tier, part.node
        self.num_evictable[tier] -= size
        self.free[tier] += part.blocks
        self._leave(part)
        if part.group.index == 0 and len(node.key) == self._tree.block_size:
            self.evicted.remember(node.chain)
        if part.group.window is None:
            # Without the full tables' blocks those of windows are good for nothing.
            for other in node.parts:
                if other is not None:
                    self.remove(other)
        self._tree.prune(node)

    def onboard(self, part: Part) -> None:
        """A part that is held comes back from the host tier; the one above it is on the device already."""
        assert part.refs and part.tier == HOST
        old = part.blocks
        new = self.take(part.group, len(old))
        self.copies += zip(old, new, strict=True)
        self.free[HOST] += old
        self._stats.onboarded_blocks += len(old)
        self._move(part, DEVICE, new)

    def set_priority(self, node: Node, priority: int, duration_s: float | None) -> None:
        changed = node.priority != priority
        node.priority, node.duration_s = priority, duration_s
        if changed:
            self._tell_priority(node)

    def clear(self) -> int:
        """Gives up all that nobody uses. Returns how many blocks of both tiers that freed."""
        freed = 0
        # Host first: its parts hang below those of the device.
        for tier in (HOST, DEVICE):
            before = len(self.free[tier])
            while (part := self.queues[tier].peek()) is not None:
                self.remove(part)
            freed += len(self.free[tier]) - before
        return freed

    def _evict(self) -> None:
        part = self.queues[DEVICE].peek()
        assert part is not None, "no block is left although some were promised"
        size = len(part.blocks)
        self._stats.evicted_blocks += size
        if self.has_host and self._make_host_room(part):
            free = self.free[HOST]
            old, new = part.blocks, free[-size:][::-1]
            del free[-size:]
            self.copies += zip(old, new, strict=True)
            self.free[DEVICE] += old
            self.num_evictable[DEVICE] -= size
            self.num_evictable[HOST] += size
            self._stats.offloaded_blocks += size
            self._move(part, HOST, new)
            if part.is_leaf:
                self.queues[HOST].push(part)
        elif part.node.parts[part.group.index] is part:
            self.remove(part)

    def _make_host_room(self, part: Part) -> bool:
        """Room in the host tier for a part, at the cost of nothing that has a higher priority, if that can be helped.

        False: the part is to be removed, as nothing in the host tier depends on it; or it is gone already, together
        with what its node had there.
        """
        node, free = part.node, self.free[HOST]
        while len(free) < len(part.blocks):
            has_children = part.group.window is None and node.num_host_children > 0
            least = self.queues[HOST].peek()
            if least is None or (not has_children and least.node.priority > node.priority):
                assert not has_children, "parts below this one are held although this one is not"
                return False
            self._stats.host_evicted_blocks += len(least.blocks)
            self.remove(least)
            if node.parts[part.group.index] is not part:
                return False
        return True

    def _move(self, part: Part, tier: int, blocks: list[int]) -> None:
        """Puts a part's content into `blocks`, taken already."""
        changes = tier != part.tier
        if changes and part.group.window is None:
            self._count_child(part, -1)
        part.blocks, part.tier, part.ticket = blocks, tier, 0
        if changes:
            if part.group.window is None:
                self._count_child(part, 1)
            if part.group.index == 0:
                self._tell("updated", part)

    def _leave(self, part: Part) -> None:
        """The part is no longer the node's."""
        node = part.node
        node.parts[part.group.index] = None
        part.ticket = 0
        if part.group.index == 0:
            self._tell("removed", part)
        if part.group.window is None:
            self._count_child(part, -1)

    def _count_child(self, part: Part, change: int) -> None:
        """Tells the node above that it has one child more, or less, in the part's tier."""
        parent = part.node.parent
        assert parent is not None
        if part.tier == DEVICE:
            parent.num_device_children += change
        else:
            parent.num_host_children += change
        if change < 0:
            above = parent.parts[part.group.index]
            if above is not None and above.tier == part.tier and not above.refs and above.is_leaf:
                self.queues[above.tier].push(above)

    def _tell_priority(self, node: Node) -> None:
        part = node.parts[0]
        if part is not None:
            self._tell("updated", part)

    def _tell(self, kind: EventKind, part: Part) -> None:
        events, node = self._events, part.node
        if events is None:
            return
        assert node.parent is not None
        if kind == "stored":
            events.emit(kind, digest_of(node), digest_of(node.parent), node.key, TIER_NAMES[part.tier], node.priority,
                        cache_key_of(node).lora)
        elif kind == "removed":
            events.emit(kind, digest_of(node), tier=TIER_NAMES[part.tier])
        else:
            events.emit(kind, digest_of(node), tier=TIER_NAMES[part.tier], priority=node.priority)
