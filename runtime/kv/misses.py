"""Why prompt tokens were not in the cache. Every look here is bounded, like the look-up itself."""

from __future__ import annotations

from .sequence import KvSequence
from .tree import Node, PrefixTree, Root

# Trees of other salts or adapters that are looked into.
MAX_OTHER_TREES = 4


class EvictedPrefixes:
    """The 64-bit chain hashes of the whole blocks evicted last. A collision costs a wrong reason, nothing else."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._chains: dict[int, None] = {}

    def __contains__(self, chain: int) -> bool:
        return chain in self._chains

    def remember(self, chain: int) -> None:
        self._chains.pop(chain, None)
        self._chains[chain] = None
        if len(self._chains) > self._capacity:
            del self._chains[next(iter(self._chains))]


def unseen_reasons(tree: PrefixTree, evicted: EvictedPrefixes, seq: KvSequence, chain: int, num_whole: int,
                   num_covered: int) -> dict[str, int]:
    """Reasons of the tokens from num_covered on, which the sequence's own tree does not hold.

    chain        of the last block that the tree holds wholly, num_whole blocks from the root
    num_covered  num_whole * block_size, and the tokens of a partly matching block
    """
    block_size, num_tokens = tree.block_size, seq.num_known
    num_blocks = num_tokens // block_size
    reasons, begin = {}, num_covered

    block = num_whole
    while block < num_blocks:
        chain = hash((chain, seq.chunk(block, block_size)))
        if chain not in evicted:
            break
        block += 1
    elsewhere = {"evicted": block * block_size, **_other_trees(tree, seq, num_blocks)}
    for reason, end in elsewhere.items():
        if end > begin:
            reasons[reason] = end - begin
            begin = end
    reasons["cold"] = num_tokens - begin
    return reasons


def _other_trees(tree: PrefixTree, seq: KvSequence, num_blocks: int) -> dict[str, int]:
    """How many first tokens the trees of other keys hold: of another salt, of another adapter."""
    found = {"salt": 0, "lora": 0}
    if not num_blocks:
        return found
    trees = tree.first_blocks.get(seq.chunk(0, tree.block_size), {})
    others = 0
    for key, root in trees.items():
        if key == seq.key:
            continue
        others += 1
        if others > MAX_OTHER_TREES:
            break
        reason = "salt" if key.lora == seq.key.lora else "lora"
        found[reason] = max(found[reason], _held_tokens(tree, root, seq, num_blocks))
    return found


def _held_tokens(tree: PrefixTree, root: Root, seq: KvSequence, num_blocks: int) -> int:
    node: Node | None = root
    for block in range(num_blocks):
        assert node is not None
        node = node.children.get(seq.chunk(block, tree.block_size))
        if node is None or node.parts[0] is None:
            return block * tree.block_size
    return num_blocks * tree.block_size
