"""The prefix index: a radix tree over tokens, one block a node.

A node stands for a prefix: the tokens on the way from its root, all of them in whole blocks but those of the last node,
which may be partly filled (a *tail*; it has no children). There is a root for each cache key. A node is looked up among
its siblings by its tokens, so a whole block costs one dictionary access; the sibling that shares the most tokens with a
given block is found by bisection, because in sorted order it stands next to it.

A node exists while anything needs it: blocks that are cached (`parts`), sequences that are going to compute it
(`pending`), a sequence whose last published block it is (`pins`), or children.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import TYPE_CHECKING

from .hashes import block_hash, root_hash
from .sequence import DEFAULT_PRIORITY, CacheKey, KvSequence

if TYPE_CHECKING:
    from .part import Part

Key = tuple[int, ...]


class Node:
    """parts: per group of tables the blocks that hold these tokens' KV, or None. chain: a 64-bit hash of the prefix."""

    __slots__ = (
        "chain", "children", "digest", "duration_s", "key", "num_device_children", "num_host_children", "num_tails",
        "order", "parent", "parts", "pending", "pins", "priority",
    )  # fmt: skip

    def __init__(self, parent: Node | None, key: Key, chain: int, num_groups: int) -> None:
        self.parent = parent
        self.key = key
        self.chain = chain
        self.digest: bytes | None = None
        self.children: dict[Key, Node] = {}
        self.order: list[Key] | None = None  # sorted keys of children, once somebody has asked for neighbours
        self.num_tails = 0
        # Children whose blocks of the full tables are in the tier: this node cannot be evicted from it before they are.
        self.num_device_children = 0
        self.num_host_children = 0
        self.parts: list[Part | None] = [None] * num_groups
        self.pending: list[KvSequence] = []
        self.pins = 0
        self.priority = DEFAULT_PRIORITY
        self.duration_s: float | None = None

    @property
    def is_complete(self) -> bool:
        """Whether blocks of every table are cached, so that it can be copied."""
        return None not in self.parts


class Root(Node):
    __slots__ = ("cache_key",)

    def __init__(self, cache_key: CacheKey, num_groups: int) -> None:
        super().__init__(None, (), hash(cache_key), num_groups)
        self.cache_key = cache_key


class PrefixTree:
    def __init__(self, block_size: int, num_groups: int) -> None:
        self.block_size = block_size
        self.roots: dict[CacheKey, Root] = {}
        # Whose trees begin with a given whole block. (A dict in place of a set: in order of their making.)
        self.first_blocks: dict[Key, dict[CacheKey, Root]] = {}
        self._num_groups = num_groups

    def root(self, key: CacheKey) -> Root:
        root = self.roots.get(key)
        if root is None:
            root = self.roots[key] = Root(key, self._num_groups)
        return root

    def child(self, parent: Node, key: Key) -> Node:
        """The child with these tokens, made if there is none."""
        node = parent.children.get(key)
        if node is not None:
            return node
        node = parent.children[key] = Node(parent, key, hash((parent.chain, key)), self._num_groups)
        if parent.order is not None:
            insort(parent.order, key)
        if len(key) < self.block_size:
            parent.num_tails += 1
        elif isinstance(parent, Root):
            self.first_blocks.setdefault(key, {})[parent.cache_key] = parent
        return node

    def prune(self, node: Node) -> None:
        """Removes the node, and then those above it, if nothing needs them."""
        while not (node.children or node.pending or node.pins) and node.parts.count(None) == self._num_groups:
            parent = node.parent
            if parent is None:
                assert isinstance(node, Root)
                if self.roots.get(node.cache_key) is node:
                    del self.roots[node.cache_key]
                return
            # A second call for a node that is gone already finds another one, or none, under its key.
            if parent.children.get(node.key) is not node:
                return
            del parent.children[node.key]
            if parent.order is not None:
                del parent.order[bisect_left(parent.order, node.key)]
            if len(node.key) < self.block_size:
                parent.num_tails -= 1
            elif isinstance(parent, Root):
                trees = self.first_blocks[node.key]
                del trees[parent.cache_key]
                if not trees:
                    del self.first_blocks[node.key]
            node = parent

    def best_child(self, parent: Node, key: Key, usable: Callable[[Node], bool]) -> tuple[Node | None, int]:
        """The usable child that shares the most first tokens with `key`, and how many (None, 0: not one)."""
        children = parent.children
        if not children:
            return None, 0
        order = parent.order
        if order is None:
            order = parent.order = sorted(children)
        middle = bisect_left(order, key)
        best, best_common = None, 0
        # Away from the middle, what is shared only gets shorter.
        for places in (range(middle, len(order)), range(middle - 1, -1, -1)):
            for place in places:
                common = common_length(order[place], key)
                if common <= best_common:
                    break
                node = children[order[place]]
                if usable(node):
                    best, best_common = node, common
                    break
        return best, best_common

    def has_extension(self, parent: Node, key: Key) -> bool:
        """Whether a complete child goes on behind `key`: a tail `key` would add nothing."""
        return self.best_child(parent, key, lambda node: len(node.key) > len(key) and node.is_complete)[1] == len(key)


def common_length(left: Key, right: Key) -> int:
    """How many first tokens are equal."""
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length


def digest_of(node: Node) -> bytes:
    """The 256-bit hash of the node's prefix (hashes.py)."""
    missing = []
    above: Node | None = node
    while above is not None and above.digest is None:
        missing.append(above)
        above = above.parent
    for below in reversed(missing):
        if isinstance(below, Root):
            below.digest = root_hash(below.cache_key)
        else:
            assert below.parent is not None and below.parent.digest is not None
            below.digest = block_hash(below.parent.digest, below.key)
    assert node.digest is not None
    return node.digest


def cache_key_of(node: Node) -> CacheKey:
    while node.parent is not None:
        node = node.parent
    assert isinstance(node, Root)
    return node.cache_key
