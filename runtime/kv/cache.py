"""The KV cache as the scheduler sees it: blocks for sequences, and the prefixes that were computed before.

Nothing here touches memory: block numbers are handed out, and copies are asked for (`take_copies`). One thread owns a
cache; only its EventBuffer may be read by others. docs/kv-cache.md tells the design.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import inf

from .admission import AdmissionStats, Room, room_for
from .check import check
from .events import EventBuffer
from .groups import make_groups
from .match import Match, find, probe, without_source
from .part import DEVICE, HOST
from .publish import Publisher
from .sequence import KvSequence, Probe
from .stats import KvStats, KvUsage
from .store import BlockStore
from .tree import PrefixTree


class KvCache:
    """num_blocks device blocks, numbered from 0; behind them num_host_blocks of the host tier. block_size: tokens.

    windows  one entry a table: how many positions its layers see, the query's own included; None: all of them
    stats    counters since the start
    """

    def __init__(self, num_blocks: int, block_size: int, windows: Sequence[int | None] = (None,), *,
                 num_host_blocks: int = 0, enable_reuse: bool = True, enable_partial_reuse: bool = True,
                 max_chunk: int | None = None, max_draft: int = 0, clock: Callable[[], float] = time.monotonic,
                 events: EventBuffer | None = None) -> None:
        """max_chunk: the most tokens of one sequence in a step (None: any number); what windows save depends on it.
        max_draft: how many of them may lie behind the sequence's own, drafted, while it generates.
        """
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        self.windows = tuple(windows)
        self.max_chunk = max_chunk
        self.max_draft = max_draft
        self.enable_reuse = enable_reuse
        self.enable_partial_reuse = enable_partial_reuse
        self.events = events
        self.stats = KvStats()
        self.groups = make_groups(self.windows)
        self.tree = PrefixTree(block_size, len(self.groups))
        self.store = BlockStore(num_blocks, num_host_blocks, self.tree, self.stats, clock, events)
        self.sequences: dict[KvSequence, None] = {}
        # Blocks that reserving sequences may yet draw for full tables, and may hold in tables with a window.
        self.num_promised = 0
        self._num_reserving = 0
        self._publisher = Publisher(self.tree, self.store, self.groups)
        self._windowed = [group for group in self.groups if group.window is not None]
        self._full_tables = sum(len(group.tables) for group in self.groups if group.window is None)
        self._lookups = AdmissionStats(self.stats, self.tree, self.store.evicted)
        if events is not None:
            events.emit("created", num_blocks=(num_blocks, num_host_blocks))

    @property
    def num_available(self) -> int:
        """Device blocks that are free or can be made free, without those that are reserved. Never negative."""
        store = self.store
        available = len(store.free[DEVICE]) + store.num_evictable[DEVICE]
        if self._num_reserving:
            # Blocks in use in tables with a window are part of what is promised for these tables.
            available += store.num_windowed - self.num_promised
        return available

    def needed(self, num_tokens: int, max_chunk: int | None = None) -> int:
        """Blocks over all tables that a sequence of so many tokens occupies at once at most.

        max_chunk: tokens of it in one step; by default the cache's.
        """
        chunk = self._widest(self.max_chunk if max_chunk is None else max_chunk)
        return sum(
            len(group.tables) * group.blocks_at_once(num_tokens, chunk, self.block_size) for group in self.groups
        )

    def _widest(self, max_chunk: int | None) -> int | None:
        """The chunk that takes as many blocks of a window as prompts in chunks of max_chunk do, and generation."""
        if max_chunk is None or not self.max_draft:
            return max_chunk
        # A window gives its blocks up when a block is full; the draft lies behind whatever the last one holds by then.
        return max(max_chunk, self.block_size + self.max_draft)

    def held(self, num_tokens: int) -> int:
        """Blocks over all tables with what the query behind so many tokens of a sequence sees."""
        whole = -(-num_tokens // self.block_size)
        return sum(len(group.tables) * (whole - min(whole, group.first_needed(num_tokens, self.block_size)))
                   for group in self.groups)

    def longest(self, limit: int) -> int:
        """The length of the longest sequence, of at most `limit` tokens, that could have the whole cache."""
        return bisect_right(range(1, limit + 1), self.num_blocks, key=self.needed)

    def probe(self, seq: KvSequence) -> Probe:
        """What the cache could give a sequence that is not active. No side effect."""
        if not self.enable_reuse:
            return Probe(0)
        return probe(self.tree, self.groups, seq, self.enable_partial_reuse)

    def acquire(self, seq: KvSequence, *, limit: int | None = None, num_new: int = 0, reserve_tokens: int = 0,
                spare: int = 0, private: bool = False) -> bool:
        """Start a sequence, or resume it: sets tables, num_cached, num_computed, capacity. False: no room, no change.

        Whole matching blocks are shared, a partly matching one is copied (take_copies). At least the last token is left
        to compute. Until `release`, others are told that this sequence is computing its tokens (probe).

        limit           reuse at most so many tokens
        num_new         take blocks at once for so many tokens behind the cached ones (at most max_chunk), or for all
        reserve_tokens  promise that `grow` up to so many tokens never fails. Either all active sequences reserve, or
                        none does
        spare           num_available must be at least this afterwards (for sequences that don't reserve)
        private         reuse nothing and publish nothing: as if there were no other sequences. Not counted
        """
        assert not seq.is_active and seq.tokens
        assert bool(reserve_tokens) == bool(self._num_reserving) or not self.sequences, "all sequences reserve, or none"
        num_known = len(seq.tokens)
        if self.max_chunk is not None:
            num_new = min(num_new, self.max_chunk)
        usable = num_known - 1 if limit is None else min(limit, num_known - 1)
        match = None
        shares = self.enable_reuse and not private
        if shares:
            match = find(self.tree, self.groups, seq, num_known, usable, self.enable_partial_reuse)
        found = self._room(seq, match, num_known, num_new, reserve_tokens, spare)
        if found is None:
            return False
        match, room = found
        seq.num_known = num_known
        if not private:
            self._lookups.count(seq, match, self.groups, limit, self.enable_reuse)
        self._take(seq, match, room)
        seq.num_cached = seq.num_computed = room.num_cached
        seq.capacity = room.num_blocks * self.block_size
        seq.is_active = True
        self.sequences[seq] = None
        seq.max_blocks = -(-reserve_tokens // self.block_size)
        if reserve_tokens:
            self._num_reserving += 1
            seq.claims = room.claims
            self.num_promised += room.claims + (seq.max_blocks - room.num_blocks) * self._full_tables
        if shares:
            self._publisher.start(seq, match.nodes if match is not None else [])
        self._plan_advance(seq)
        return True

    def grow(self, seq: KvSequence, num_tokens: int) -> bool:
        """Blocks for so many tokens in every table, or none at all (False)."""
        if num_tokens <= seq.capacity:
            return True
        store, block_size = self.store, self.block_size
        count = -(-(num_tokens - seq.capacity) // block_size)
        if seq.max_blocks:
            assert seq.capacity + count * block_size <= seq.max_blocks * block_size, "more tokens than were reserved"
            self.num_promised -= count * self._full_tables
        elif len(store.free[DEVICE]) + store.num_evictable[DEVICE] < count * len(self.windows):
            return False
        for group in self.groups:
            for table in group.tables:
                seq.tables[table] += store.take(group, count)
        seq.capacity += count * block_size
        return True

    def advance(self, seq: KvSequence, num_computed: int) -> None:
        """The KV of the first num_computed tokens is written.

        Publishes the blocks that are full now, and lets go of those that have left their window. May be called for
        each token, or only when a block is full, when a context chunk is done, and before `release`.
        """
        seq.num_computed = num_computed
        if num_computed < seq.next_advance:
            return
        if seq.publishes:
            self._publisher.publish(seq)
        for group in self._windowed:
            first = group.first_needed(num_computed, self.block_size)
            self._publisher.leave_window(seq, group, first)
        if seq.claims and num_computed >= seq.num_known:
            # From now on a step computes one token, and a draft.
            claims = self._claims(seq.max_blocks * self.block_size, 1)
            self.num_promised += claims - seq.claims
            seq.claims = claims
        self._plan_advance(seq)

    def release(self, seq: KvSequence, *, publish_tail: bool = True) -> None:
        """The sequence is finished, cancelled or paused. Its published blocks stay cached, all others are free.

        publish_tail: cache the rest of what it computed too, the partly filled last block included
        """
        assert seq.is_active
        self._publisher.finish(seq, publish_tail)
        if seq.max_blocks:
            self._num_reserving -= 1
            self.num_promised -= (
                seq.claims + (seq.max_blocks - seq.capacity // self.block_size) * self._full_tables
            )
        del self.sequences[seq]
        seq.is_active = seq.publishes = False
        seq.tables, seq.firsts, seq.capacity, seq.max_blocks, seq.claims = [], [], 0, 0, 0

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, destination) block copies, to run in this order after the step in flight and before the next.

        Only in this order: a source may be a later copy's destination.
        """
        copies = self.store.copies
        if copies:
            self.store.copies = []
        return copies

    def clear(self) -> int:
        """Forget all that no active sequence uses, in both tiers. Returns the number of blocks that are free for it."""
        return self.store.clear()

    def usage(self) -> KvUsage:
        store = self.store
        free, cached = len(store.free[DEVICE]), store.num_evictable[DEVICE]
        return KvUsage(self.num_blocks, self.num_blocks - free - cached, cached, free,
                       free + cached - self.num_available, self.num_host_blocks, store.num_evictable[HOST])

    def check(self) -> None:
        """Recounts everything from the sequences and the tree, and asserts that the books are right. For tests."""
        check(self)

    def _claims(self, num_tokens: int, max_chunk: int | None) -> int:
        """Blocks that a sequence may hold at once in its tables with a window."""
        chunk = self._widest(max_chunk)
        return sum(
            len(group.tables) * group.blocks_at_once(num_tokens, chunk, self.block_size) for group in self._windowed
        )

    def _room(self, seq: KvSequence, match: Match | None, num_known: int, num_new: int, reserve_tokens: int,
              spare: int) -> tuple[Match | None, Room] | None:
        """What the sequence takes, if there is room for it: with the partly matching block, or at least without."""
        store = self.store
        obtainable = len(store.free[DEVICE]) + store.num_evictable[DEVICE]
        max_blocks = -(-reserve_tokens // self.block_size)
        while True:
            room = room_for(match, self.groups, self.block_size, num_known, num_new)
            fits = room.num_pinned + room.num_taken + room.num_revived <= obtainable
            if reserve_tokens:
                chunk = num_known - room.num_cached
                if self.max_chunk is not None:
                    chunk = min(chunk, self.max_chunk)
                room.claims = self._claims(reserve_tokens, chunk)
                full = room.num_full_revived + (max_blocks - room.num_shared) * self._full_tables
                fits = fits and full + room.claims <= self.num_available
            else:
                fits = fits and room.num_taken + room.num_revived + spare <= obtainable
            if fits:
                return match, room
            if match is None or match.source is None:
                return None
            match = without_source(match, self.groups, self.block_size)

    def _take(self, seq: KvSequence, match: Match | None, room: Room) -> None:
        """Fills the tables: what is shared is held and brought to the device, the rest is taken from the pool."""
        store, block_size, groups = self.store, self.block_size, self.groups
        nodes = match.nodes if match is not None else []
        source = match.source if match is not None else None
        seq.firsts = [min(group.first_needed(room.num_cached, block_size), len(nodes)) for group in groups]
        shared = [[node.parts[group.index] for node in nodes[seq.firsts[group.index] :]] for group in groups]
        copied = source.parts if source is not None else []
        # First hold everything, so that no part gives way to another one.
        for part in [part for parts in shared for part in parts] + copied:
            assert part is not None
            store.hold(part)
        if self.num_host_blocks:
            for parts in shared:
                for part in parts:
                    if part is not None and part.tier == HOST:
                        store.onboard(part)
        tables: list[list[int]] = [[] for _ in self.windows]
        for group, parts in zip(groups, shared, strict=True):
            gone = [-1] * seq.firsts[group.index]
            for place, table in enumerate(group.tables):
                blocks = [part.blocks[place] for part in parts if part is not None]
                tables[table] = gone + blocks + store.take(group, room.num_blocks - len(nodes))
        store.last_stamp += 1
        for group, copy in zip(groups, copied, strict=False):
            assert copy is not None
            for block, table in zip(copy.blocks, group.tables, strict=True):
                store.copies.append((block, tables[table][len(nodes)]))
            self.stats.copied_blocks += len(copy.blocks)
            store.drop(copy)
        seq.tables = tables
        if seq.retention or seq.num_known > seq.num_prompt:
            for block, node in enumerate(nodes):
                retention = seq.retention_of(block * block_size)
                if retention is not None:
                    store.set_priority(node, *retention)

    def _plan_advance(self, seq: KvSequence) -> None:
        """When advance has something to do again: at the end of the prompt, and whenever a block is full."""
        if not (seq.publishes or self._windowed):
            seq.next_advance = inf
            return
        seq.next_advance = (seq.num_computed // self.block_size + 1) * self.block_size
        if seq.num_computed < seq.num_known:
            seq.next_advance = min(seq.next_advance, seq.num_known)
