"""What a sequence takes from the pool when it starts, and how its look-up is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .groups import Group
from .match import Match, host_tokens
from .misses import EvictedPrefixes, unseen_reasons
from .part import DEVICE
from .sequence import KvSequence
from .stats import KvStats
from .tree import PrefixTree


@dataclass(slots=True)
class Room:
    """num_cached tokens come from the cache. Blocks of a table: num_shared of num_blocks are shared with the tree.

    Blocks over all tables: num_revived are cached now without being in use, of full tables num_full_revived (these
    count blocks of the host tier too); num_taken come from the pool, for new blocks and for those of the host tier;
    num_pinned must not give way meanwhile, as they are copied. claims: may be held at once in tables with a window
    """

    num_cached: int
    num_shared: int
    num_blocks: int
    num_revived: int = 0
    num_full_revived: int = 0
    num_taken: int = 0
    num_pinned: int = 0
    claims: int = 0


def room_for(match: Match | None, groups: Sequence[Group], block_size: int, num_known: int, num_new: int) -> Room:
    num_cached, nodes = (match.num_tokens, match.nodes) if match is not None else (0, [])
    num_tokens = min(num_cached + num_new, num_known)
    room = Room(num_cached, len(nodes), -(-num_tokens // block_size))
    for group in groups:
        size = len(group.tables)
        room.num_taken += (room.num_blocks - len(nodes)) * size
        for node in nodes[group.first_needed(num_cached, block_size) :]:
            part = node.parts[group.index]
            assert part is not None
            if part.refs:
                continue
            if part.tier == DEVICE:
                room.num_revived += size
            else:
                room.num_taken += size
            if group.window is None:
                room.num_full_revived += size
    if match is not None and match.source is not None:
        for part in match.source.parts:
            assert part is not None
            if not part.refs and part.tier == DEVICE:
                room.num_pinned += len(part.blocks)
    return room


class AdmissionStats:
    """Counts each sequence's look-up once: when it is first admitted, not while it waits, nor after a pause."""

    def __init__(self, stats: KvStats, tree: PrefixTree, evicted: EvictedPrefixes) -> None:
        self._stats = stats
        self._tree = tree
        self._evicted = evicted

    def count(self, seq: KvSequence, match: Match | None, groups: Sequence[Group], limit: int | None,
              reuse: bool) -> None:
        """Before the match's blocks are moved. limit: as for KvCache.acquire. reuse: whether the cache is enabled."""
        stats, num_used = self._stats, match.num_tokens if match is not None else 0
        if seq.counted:
            stats.resumed_hit_tokens += num_used
            return
        seq.counted = True
        stats.queried_tokens += seq.num_known
        stats.hit_tokens += num_used
        misses = stats.miss_tokens
        if not reuse:
            misses["disabled"] += seq.num_known
            return
        chain, num_whole, num_covered = hash(seq.key), 0, 0
        if match is not None:
            stats.host_hit_tokens += host_tokens(groups, match, self._tree.block_size)
            num_whole, num_covered = match.num_held, match.num_covered
            if num_whole:
                chain = match.path[num_whole - 1].chain
            for reason, num_tokens in self._unused_reasons(seq, match, limit).items():
                misses[reason] += num_tokens
        for reason, num_tokens in unseen_reasons(self._tree, self._evicted, seq, chain, num_whole, num_covered).items():
            misses[reason] += num_tokens

    def _unused_reasons(self, seq: KvSequence, match: Match, limit: int | None) -> dict[str, int]:
        """Of the tokens that the tree holds, but that are not taken."""
        reasons = {}
        num_used, end = match.num_tokens, match.num_covered
        if end == seq.num_known:
            reasons["recomputed_last"] = 1
            end -= 1
        if limit is not None and limit < end:
            reasons["disabled"] = end - limit
            end = limit
        # Where more than part of a block is missing, the tables with a window have lost what they need of it.
        reasons["partial_block" if end - num_used < self._tree.block_size else "evicted"] = end - num_used
        return reasons
