"""Short ways to run sequences through a cache."""

from collections.abc import Sequence

from ingot.runtime.kv import CacheKey, KvCache, KvSequence, RetentionRange
from ingot.runtime.kv.sequence import DEFAULT_KEY, DEFAULT_PRIORITY
from ingot.runtime.kv.tree import Node


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def prompt(token: int, blocks: int = 2) -> list[int]:
    """One token over and over, for blocks of 4 tokens."""
    return [token] * 4 * blocks


def start(kv: KvCache, tokens: Sequence[int], num_computed: int | None = None, key: CacheKey = DEFAULT_KEY,
          retention: Sequence[RetentionRange] = (), decode_priority: int = DEFAULT_PRIORITY,
          reserve_tokens: int = 0) -> KvSequence:
    """An active sequence of which so many tokens (None: all) are computed."""
    seq = KvSequence(list(tokens), key, retention, decode_priority)
    assert kv.acquire(seq, num_new=len(tokens), reserve_tokens=reserve_tokens)
    compute(kv, seq, len(tokens) if num_computed is None else num_computed)
    return seq


def compute(kv: KvCache, seq: KvSequence, num_computed: int) -> None:
    assert kv.grow(seq, num_computed)
    if num_computed > seq.num_computed:
        kv.advance(seq, num_computed)
    kv.check()


def generate(kv: KvCache, seq: KvSequence, tokens: Sequence[int]) -> None:
    """Appends tokens and computes them, one a step."""
    for token in tokens:
        seq.tokens.append(token)
        compute(kv, seq, len(seq.tokens))


def release(kv: KvCache, seq: KvSequence, publish_tail: bool = True) -> None:
    kv.release(seq, publish_tail=publish_tail)
    kv.check()


def cache(kv: KvCache, tokens: Sequence[int], key: CacheKey = DEFAULT_KEY,
          retention: Sequence[RetentionRange] = ()) -> None:
    """Computes a prompt and releases it."""
    release(kv, start(kv, tokens, key=key, retention=retention))


def num_cached(kv: KvCache, tokens: Sequence[int], key: CacheKey = DEFAULT_KEY) -> int:
    """How many of these tokens a prompt that goes on behind them would find."""
    return kv.probe(KvSequence([*tokens, -1], key)).num_cached


def fill(kv: KvCache, blocks: int) -> None:
    """Takes so many blocks of 4 tokens, and gives them back without a trace."""
    seq = KvSequence([99] * 4 * blocks)
    assert kv.acquire(seq, num_new=4 * blocks, private=True)
    release(kv, seq)


def only_path(kv: KvCache) -> list[Node]:
    """The nodes from the first block on, in a cache that holds one sequence."""
    (root,) = kv.tree.roots.values()
    path: list[Node] = []
    children = root.children
    while children:
        (node,) = children.values()
        path.append(node)
        children = node.children
    return path
