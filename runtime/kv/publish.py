"""How what a sequence computes gets into the tree, for others to find.

At the start the sequence's prompt is entered as pending. Each block becomes the node's part once it is full; the last
block of the prompt, if partly filled, once the prompt is computed, as a tail (others copy it, so the sequence goes on
writing behind what is published). Later the tail's node gives way to that of the full block.

If another active sequence has published the same block meanwhile, both keep their own: a block table never changes
under a running step. From there on the sequence is private, that is, it publishes nothing until it is released.
"""

from __future__ import annotations

from collections.abc import Sequence

from .groups import Group
from .part import DEVICE
from .sequence import DEFAULT_PRIORITY, KvSequence
from .store import BlockStore
from .tree import Node, PrefixTree


class Publisher:
    def __init__(self, tree: PrefixTree, store: BlockStore, groups: Sequence[Group]) -> None:
        self._tree = tree
        self._store = store
        self._groups = groups
        self._block_size = tree.block_size

    def start(self, seq: KvSequence, nodes: list[Node]) -> None:
        """`nodes`: of the blocks that the sequence shares from the start. Enters the others as pending."""
        tree, block_size = self._tree, self._block_size
        seq.root, seq.path = tree.root(seq.key), nodes
        node = self._last_node(seq)
        node.pins += 1
        seq.publishes = True
        pending = []
        num_whole = seq.num_known // block_size
        if num_whole:
            seq.chunk(num_whole - 1, block_size)
        for key in seq.chunks[len(nodes) : num_whole]:
            node = tree.child(node, key)
            node.pending.append(seq)
            pending.append(node)
        if seq.num_known % block_size:
            node = tree.child(node, tuple(seq.tokens[num_whole * block_size : seq.num_known]))
            node.pending.append(seq)
            pending.append(node)
        pending.reverse()
        seq.pending = pending

    def publish(self, seq: KvSequence) -> None:
        """Publishes the blocks that the first num_computed tokens fill, and the prompt's tail."""
        block_size, path = self._block_size, seq.path
        while seq.publishes and (len(path) + 1) * block_size <= seq.num_computed:
            self._publish_block(seq)
        if seq.publishes and seq.pending and seq.num_computed >= seq.num_known:
            # All whole blocks of the prompt are published: what is left of it is the tail.
            self._publish_tail(seq, self._pop_pending(seq))

    def finish(self, seq: KvSequence, keep: bool) -> None:
        """Takes the sequence out of the tree. Its parts lose a reference; other blocks are cached (keep), or freed."""
        store = self._store
        store.last_stamp += 1
        end = 0
        if seq.root is not None:
            self._withdraw(seq)
            self._take_tail_back(seq)
            end = self._keep(seq) if keep else len(seq.path)
        for group in self._groups:
            for table in group.tables:
                store.give_back(group, [block for block in seq.tables[table][end:] if block >= 0])
            for block in range(len(seq.path) - 1, seq.firsts[group.index] - 1, -1):
                part = seq.path[block].parts[group.index]
                assert part is not None
                store.drop(part)
        if seq.root is not None:
            last = self._last_node(seq)
            last.pins -= 1
            self._tree.prune(last)
        seq.path, seq.root = [], None

    def _keep(self, seq: KvSequence) -> int:
        """Caches all that is computed and not in the tree yet. Returns of how many blocks that disposes."""
        node = self._last_node(seq)
        end = seq.num_computed // self._block_size
        for block in range(len(seq.path), end):
            node = self._tree.child(node, seq.chunk(block, self._block_size))
            self._add_or_free(seq, node, block)
        tail = tuple(seq.tokens[end * self._block_size : seq.num_computed])
        if tail and not self._tree.has_extension(node, tail):
            node = self._tree.child(node, tail)
            self._add_or_free(seq, node, end)
            end += 1
        self._tree.prune(node)  # in case that its blocks have all left their windows
        return end

    def leave_window(self, seq: KvSequence, group: Group, first: int) -> None:
        """The sequence needs no block before `first` any more in the tables of the group."""
        store, path, index = self._store, seq.path, group.index
        for block in range(seq.firsts[index], first):
            if block < len(path):
                part = path[block].parts[index]
                assert part is not None
                store.drop(part)
            else:
                store.give_back(group, [seq.tables[table][block] for table in group.tables])
            for table in group.tables:
                seq.tables[table][block] = -1
        seq.firsts[index] = first

    def _publish_block(self, seq: KvSequence) -> None:
        tree, path = self._tree, seq.path
        block = len(path)
        key = seq.chunk(block, self._block_size)
        self._take_tail_back(seq)
        parent = self._last_node(seq)
        node = None
        if seq.pending:
            node = self._pop_pending(seq)
            if node.key is not key and node.key != key:
                tree.prune(node)  # a tail that was full before it was published
                node = None
        if node is None:
            node = tree.child(parent, key)
        if any(part is not None and part.refs for part in node.parts):
            self._withdraw(seq)
            tree.prune(node)
            seq.publishes = False
            return
        self._put(seq, node, block)
        node.pins += 1
        parent.pins -= 1
        path.append(node)

    def _publish_tail(self, seq: KvSequence, node: Node) -> None:
        parent = self._last_node(seq)
        taken = any(part is not None and part.refs for part in node.parts)
        if taken or self._tree.has_extension(parent, node.key):
            self._tree.prune(node)
            return
        self._put(seq, node, len(seq.path))
        seq.tail = node

    def _put(self, seq: KvSequence, node: Node, block: int) -> None:
        """The sequence's blocks become the node's parts, in place of those that nobody uses."""
        store, tables = self._store, seq.tables
        fresh = node.parts[0] is None
        self._set_retention(seq, node, block)
        for group in self._groups:
            blocks = [tables[table][block] for table in group.tables]
            part = node.parts[group.index]
            if part is None:
                store.attach(node, group, blocks)
            else:
                store.replace(part, blocks)
        if fresh:
            self._remove_shorter(node)

    def _add_or_free(self, seq: KvSequence, node: Node, block: int) -> None:
        """At the end: a block of the sequence's own is cached if the node lacks it, else it is free."""
        store, tables = self._store, seq.tables
        fresh = node.parts[0] is None
        self._set_retention(seq, node, block)
        for group in self._groups:
            blocks = [tables[table][block] for table in group.tables]
            if blocks[0] < 0:
                continue
            part = node.parts[group.index]
            if part is None:
                part = store.attach(node, group, blocks)
            elif part.tier == DEVICE:
                store.give_back(group, blocks)
                continue
            else:
                store.replace(part, blocks)
            store.drop(part)
        if fresh:
            self._remove_shorter(node)

    def _set_retention(self, seq: KvSequence, node: Node, block: int) -> None:
        """What the sequence asks for, if it asks for anything; else a node that holds nothing has the default."""
        retention = seq.retention_of(block * self._block_size)
        if retention is None and node.parts[0] is None:
            retention = DEFAULT_PRIORITY, None
        if retention is not None:
            self._store.set_priority(node, *retention)

    def _remove_shorter(self, node: Node) -> None:
        """Tails that the node begins with add nothing any more."""
        parent = node.parent
        assert parent is not None
        if parent.num_tails == (len(node.key) < self._block_size):
            return
        for length in range(1, len(node.key)):
            shorter = parent.children.get(node.key[:length])
            if shorter is None or any(part is not None and part.refs for part in shorter.parts):
                continue
            for part in shorter.parts:
                if part is not None:
                    self._store.remove(part)

    def _take_tail_back(self, seq: KvSequence) -> None:
        """The block that is being filled is the sequence's own again."""
        node = seq.tail
        if node is not None:
            for part in node.parts:
                if part is not None:
                    self._store.detach(part)
            self._tree.prune(node)
            seq.tail = None

    def _pop_pending(self, seq: KvSequence) -> Node:
        node = seq.pending.pop()
        node.pending.remove(seq)
        return node

    def _withdraw(self, seq: KvSequence) -> None:
        """What was pending is not going to be published."""
        for node in seq.pending:
            node.pending.remove(seq)
            self._tree.prune(node)
        seq.pending = []

    def _last_node(self, seq: KvSequence) -> Node:
        node = seq.path[-1] if seq.path else seq.root
        assert node is not None
        return node
