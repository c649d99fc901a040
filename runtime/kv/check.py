"""Recounts the books of a cache from its sequences and its tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .part import DEVICE, HOST, Part
from .sequence import KvSequence
from .tree import Node, Root

if TYPE_CHECKING:
    from .cache import KvCache


def check(kv: KvCache) -> None:
    """Asserts all invariants that docs/kv-cache.md lists. Takes time in proportion to all blocks and nodes."""
    nodes = [node for root in kv.tree.roots.values() for node in _below(root)]
    parts = [part for node in nodes for part in node.parts if part is not None]
    refs: Counter[Part] = Counter()
    private: list[tuple[int, int]] = []  # group, block
    for seq in kv.sequences:
        _check_sequence(kv, seq, refs, private)
    for part in parts:
        assert part.refs == refs[part], f"{part.refs} references are noted, {refs[part]} exist"
        assert part.node.parts[part.group.index] is part
        assert len(part.blocks) == len(part.group.tables)
    assert not refs.keys() - set(parts), "a sequence refers to blocks that are not in the tree"
    _check_blocks(kv, parts, private)
    for node in nodes:
        _check_node(kv, node)
    _check_queues(kv, parts)
    _check_reservations(kv, parts, private)


def _below(node: Node) -> Iterator[Node]:
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        for key, child in node.children.items():
            assert child.parent is node and child.key == key
            stack.append(child)


def _check_sequence(kv: KvCache, seq: KvSequence, refs: Counter[Part], private: list[tuple[int, int]]) -> None:
    size = kv.block_size
    assert seq.is_active and seq.num_computed <= seq.capacity
    assert [len(table) * size for table in seq.tables] == [seq.capacity] * len(kv.windows)
    if seq.root is None:
        assert not (seq.path or seq.pending or seq.tail or seq.publishes)
        private += [(g.index, block) for g in kv.groups for t in g.tables for block in seq.tables[t] if block >= 0]
        return
    parent: Node | None = kv.tree.roots[seq.key]
    assert seq.root is parent
    for block, node in enumerate(seq.path):
        assert node.parent is parent and node.key == tuple(seq.tokens[block * size : (block + 1) * size])
        parent = node
    for group in kv.groups:
        first = seq.firsts[group.index]
        # A cache is told of computed tokens when a block is full, so windows end where they ended then.
        assert first <= group.first_needed(seq.num_computed, size)
        for block in range(seq.capacity // size):
            blocks = [seq.tables[table][block] for table in group.tables]
            if block < first:
                assert set(blocks) == {-1}
                continue
            assert min(blocks) >= 0
            node_of_block = None
            if block < len(seq.path):
                node_of_block = seq.path[block]
            elif block == len(seq.path):
                node_of_block = seq.tail
            if node_of_block is None:
                private += [(group.index, number) for number in blocks]
            else:
                part = node_of_block.parts[group.index]
                assert part is not None and part.blocks == blocks and part.tier == DEVICE
                refs[part] += 1
    assert len(seq.path) <= seq.num_computed // size
    if seq.publishes:
        assert len(seq.path) == seq.num_computed // size
    else:
        assert not seq.pending and seq.tail is None
    for node in seq.pending:
        assert seq in node.pending
    if seq.tail is not None:
        begin = len(seq.path) * size
        assert seq.tail.key == tuple(seq.tokens[begin : begin + len(seq.tail.key)])
        assert begin + len(seq.tail.key) <= seq.num_computed


def _check_blocks(kv: KvCache, parts: list[Part], private: list[tuple[int, int]]) -> None:
    owners = Counter(kv.store.free[DEVICE] + kv.store.free[HOST])
    owners.update(block for part in parts for block in part.blocks)
    owners.update(block for _, block in private)
    assert set(owners.values()) <= {1}, "a block has two owners"
    assert sorted(owners) == list(range(kv.num_blocks + kv.num_host_blocks)), "a block is lost"
    for part in parts:
        assert all((block >= kv.num_blocks) == (part.tier == HOST) for block in part.blocks)
    assert all(block < kv.num_blocks for block in kv.store.free[DEVICE])
    for tier in (DEVICE, HOST):
        evictable = sum(len(part.blocks) for part in parts if part.tier == tier and not part.refs)
        assert kv.store.num_evictable[tier] == evictable


def _check_node(kv: KvCache, node: Node) -> None:
    children = list(node.children.values())
    assert node.order is None or node.order == sorted(node.children)
    assert node.num_tails == sum(len(child.key) < kv.block_size for child in children)
    pins = sum((seq.path[-1] if seq.path else seq.root) is node for seq in kv.sequences)
    assert node.pins == pins
    assert all(seq.is_active and node in seq.pending for seq in node.pending)
    assert children or node.pending or node.pins or any(node.parts), "nothing needs this node"
    if not isinstance(node, Root):
        assert len(node.key) == kv.block_size or not children, "a tail has children"
        if isinstance(node.parent, Root) and len(node.key) == kv.block_size:
            assert kv.tree.first_blocks[node.key][node.parent.cache_key] is node.parent
    if kv.groups[0].window is not None:
        return
    tiers = Counter(part.tier for child in children if (part := child.parts[0]) is not None)
    assert (node.num_device_children, node.num_host_children) == (tiers[DEVICE], tiers[HOST])
    full = node.parts[0]
    if full is None:
        assert not any(node.parts), "blocks of windows without those of the full tables"
        assert isinstance(node, Root) or not tiers, "a cached block below one that is not"
    else:
        assert full.tier == DEVICE or not tiers[DEVICE], "a device block below a host block"
        below = [child.parts[0].refs for child in children if child.parts[0] is not None]
        assert full.refs >= max(below, default=0)


def _check_queues(kv: KvCache, parts: list[Part]) -> None:
    for tier in (DEVICE, HOST):
        expected = {part for part in parts if part.tier == tier and not part.refs and part.is_leaf}
        assert kv.store.queues[tier].parts() == expected, "evictable parts and the queue differ"


def _check_reservations(kv: KvCache, parts: list[Part], private: list[tuple[int, int]]) -> None:
    windowed = {group.index for group in kv.groups if group.window is not None}
    held = sum(len(part.blocks) for part in parts if part.refs and part.tier == DEVICE and part.group.index in windowed)
    held += sum(group in windowed for group, _ in private)
    assert kv.store.num_windowed == held
    full_tables = sum(len(group.tables) for group in kv.groups if group.window is None)
    promised = 0
    for seq in kv.sequences:
        if seq.max_blocks:
            promised += seq.claims + (seq.max_blocks - seq.capacity // kv.block_size) * full_tables
            own = sum(block >= 0 for group in kv.groups if group.index in windowed
                      for table in group.tables for block in seq.tables[table])
            assert own <= seq.claims, f"{own} blocks in tables with a window, {seq.claims} were reserved"
    assert kv.num_promised == promised
    assert kv.num_available >= 0, "more is promised than there is"
