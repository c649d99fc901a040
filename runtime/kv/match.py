"""The longest prefix of a sequence that the cache can give it, and what is just being computed beyond it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .groups import Group
from .part import HOST
from .sequence import KvSequence, Probe
from .tree import Node, PrefixTree


@dataclass(slots=True)
class Match:
    """num_tokens can be used: the whole blocks of `nodes`, and the first ones of `source`'s block, by copying it.

    root, path   the tree, and all its nodes that the sequence's whole blocks lead to, cached or not
    num_held     how many nodes of the path are cached: num_covered tokens, with the best of their children
    nodes        those that are used, from the first on; of groups with a window only the last blocks are needed
    """

    root: Node
    path: list[Node]
    num_held: int
    num_covered: int
    nodes: list[Node]
    source: Node | None
    num_tokens: int


def walk(root: Node, seq: KvSequence, num_blocks: int, block_size: int) -> list[Node]:
    """The nodes that the sequence's first num_blocks blocks lead to, as far as there are any."""
    path: list[Node] = []
    if not num_blocks or not root.children:
        return path
    seq.chunk(num_blocks - 1, block_size)
    node = root
    for key in seq.chunks[:num_blocks]:
        child = node.children.get(key)
        if child is None:
            break
        path.append(child)
        node = child
    return path


def find(tree: PrefixTree, groups: Sequence[Group], seq: KvSequence, num_known: int, limit: int,
         partial: bool) -> Match | None:
    """The match of the first num_known tokens, of which at most `limit` (less than num_known) may be used.

    partial: whether part of a block may be used. None if there is no tree for the sequence's key.
    """
    root = tree.roots.get(seq.key)
    if root is None:
        return None
    block_size = tree.block_size
    path = walk(root, seq, num_known // block_size, block_size)
    num_held = len(path)
    while num_held and path[num_held - 1].parts[0] is None:
        num_held -= 1
    end = path[num_held - 1] if num_held else root
    source, extra = _best_source(tree, end, seq, num_held, num_known)
    num_covered = num_held * block_size + extra
    if num_covered > limit:
        whole, extra = divmod(limit, block_size)
        if whole < num_held:
            source = path[whole]
        num_held_usable = whole
    else:
        num_held_usable = num_held
    if not extra or not partial or (source is not None and not source.is_complete):
        source, extra = None, 0
    nodes = path[:num_held_usable]
    match = Match(root, path, num_held, num_covered, nodes, source, len(nodes) * block_size + extra)
    return _within_windows(match, groups, block_size)


def without_source(match: Match, groups: Sequence[Group], block_size: int) -> Match:
    """What can be used without copying a partly matching block."""
    nodes = match.nodes
    shorter = Match(match.root, match.path, match.num_held, match.num_covered, nodes, None, len(nodes) * block_size)
    return _within_windows(shorter, groups, block_size)


def _best_source(tree: PrefixTree, end: Node, seq: KvSequence, num_whole: int,
                 num_known: int) -> tuple[Node | None, int]:
    begin = num_whole * tree.block_size
    rest = tuple(seq.tokens[begin : min(begin + tree.block_size, num_known)])
    if not rest:
        return None, 0
    return tree.best_child(end, rest, lambda node: node.is_complete)


def _within_windows(match: Match, groups: Sequence[Group], block_size: int) -> Match:
    """Shortens the match until the tables with a window have all blocks that the next token can see."""
    if len(groups) == 1 and groups[0].window is None:
        return match
    nodes, num_tokens = match.nodes, match.num_tokens
    # runs[g][n]: how many nodes before the n-th, without a gap, have blocks in group g.
    runs = []
    for group in groups:
        run = [0]
        for node in nodes:
            run.append(run[-1] + 1 if node.parts[group.index] is not None else 0)
        runs.append(run)
    num_nodes = len(nodes)
    while any(
        num_nodes - group.first_needed(num_tokens, block_size) > run[num_nodes]
        for group, run in zip(groups, runs, strict=True)
    ):
        if num_tokens > num_nodes * block_size:
            match.source = None
        else:
            num_nodes -= 1
        num_tokens = num_nodes * block_size
    match.nodes, match.num_tokens = nodes[:num_nodes], num_tokens
    return match


def probe(tree: PrefixTree, groups: Sequence[Group], seq: KvSequence, partial: bool) -> Probe:
    """What `find` would give the sequence as it is, and what is being computed beyond that."""
    block_size, num_known = tree.block_size, len(seq.tokens)
    match = find(tree, groups, seq, num_known, num_known - 1, partial)
    if match is None:
        return Probe(0)
    result = Probe(match.num_tokens, host_tokens(groups, match, block_size))
    path, first = match.path, len(match.nodes)
    end = first
    while end < len(path) and path[end].pending:
        end += 1
    num_reached, last = end * block_size, None
    if partial and end == len(path):
        rest = tuple(seq.tokens[num_reached : num_reached + block_size])
        last, common = tree.best_child(path[-1] if path else match.root, rest, lambda node: bool(node.pending))
        num_reached += common
    num_reached = min(num_reached, num_known - 1)
    if not partial:
        num_reached -= num_reached % block_size
    if num_reached <= match.num_tokens:
        return result
    result.num_pending = num_reached - match.num_tokens
    if end > first:
        owner = path[first].pending[0]
        until = first
        while until < end and owner in path[until].pending:
            until += 1
        # Of its last block only a part may be of use: less than a block is not worth waiting for.
        until = min(until, max(num_reached // block_size, first + 1))
        result.owner, result.until = owner, until * block_size
    else:
        assert last is not None
        owner = last.pending[0]
        # The owner publishes a block when it is full, and the last one of its prompt as far as that goes.
        result.owner, result.until = owner, min((first + 1) * block_size, owner.num_known)
    return result


def host_tokens(groups: Sequence[Group], match: Match, block_size: int) -> int:
    """Tokens of the match that some group has in the host tier."""
    tokens = 0
    first = [group.first_needed(match.num_tokens, block_size) for group in groups]
    for block, node in enumerate(match.nodes):
        for group in groups:
            part = node.parts[group.index]
            if block >= first[group.index] and part is not None and part.tier == HOST:
                tokens += block_size
                break
    if match.source is not None and any(part is not None and part.tier == HOST for part in match.source.parts):
        tokens += match.num_tokens - len(match.nodes) * block_size
    return tokens
