"""Lengths of matches against a naive model: a list of the token sequences that the cache must know."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingot.runtime.kv import CacheKey, KvCache, KvSequence
from ingot.runtime.kv.tree import common_length
from tests.runtime.kv.memory import Memory

BLOCK_SIZE = 4
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
KEYS = [CacheKey(), CacheKey("a")]


class Model:
    """What running sequences have published, and what is known of those that were released."""

    def __init__(self) -> None:
        self.known: list[tuple[CacheKey, tuple[int, ...]]] = []
        self.published: dict[KvSequence, int] = {}
        self.private: set[KvSequence] = set()
        self.was_private = False
        self.was_lost = False

    def advance(self, seq: KvSequence) -> None:
        """A full block is published unless another running sequence has the same one."""
        while seq not in self.private and self.published[seq] + BLOCK_SIZE <= seq.num_computed:
            end = self.published[seq] + BLOCK_SIZE
            if any(other is not seq and other.key == seq.key and self.published[other] >= end
                   and other.tokens[:end] == seq.tokens[:end] for other in self.published):
                self.private.add(seq)
                self.was_private = True
            else:
                self.published[seq] = end

    def release(self, seq: KvSequence, keep: bool) -> None:
        end = seq.num_computed if keep else self.published[seq]
        # What it has shown of a block took the place of a cached part, equal or shorter, and goes with it.
        shown = tuple(seq.tokens[: seq.num_known])
        if not keep and any(key == seq.key and common_length(tokens, shown) > end for key, tokens in self.known):
            self.was_lost = True
        self.known.append((seq.key, tuple(seq.tokens[:end])))
        del self.published[seq]
        self.private.discard(seq)

    def match(self, seq: KvSequence) -> int:
        """Running sequences show their full blocks, and once the prompt is computed all of it."""
        seen = list(self.known)
        for other, end in self.published.items():
            if other not in self.private and other.num_computed >= other.num_known:
                end = max(end, other.num_known)
            seen.append((other.key, tuple(other.tokens[:end])))
        tokens = tuple(seq.tokens)
        best = max((common_length(other, tokens) for key, other in seen if key == seq.key), default=0)
        return min(best, len(tokens) - 1)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.sampled_from([(None,), (None, 6), (5,)]))
def test_the_longest_common_prefix_is_found(data: st.DataObject, windows: tuple[int | None, ...]) -> None:
    kv = KvCache(3000, BLOCK_SIZE, windows)
    memory, model = Memory(kv), Model()
    running: list[KvSequence] = []
    earlier: list[list[int]] = [[]]
    for _ in range(data.draw(st.integers(1, 12))):
        if not running or data.draw(st.booleans()):
            begin = data.draw(st.sampled_from(earlier))
            tokens = begin[: data.draw(st.integers(0, len(begin)))] + data.draw(TOKENS)
            seq = KvSequence(tokens, data.draw(st.sampled_from(KEYS)))
            found = kv.probe(seq).num_cached
            assert kv.acquire(seq, num_new=len(tokens))
            assert seq.num_cached == found
            if (windows == (None,) or not model.was_private) and not model.was_lost:
                assert found == model.match(seq)
            else:
                # What left the window of a private sequence was not cached.
                assert found <= model.match(seq)
            model.published[seq] = found // BLOCK_SIZE * BLOCK_SIZE
            running.append(seq)
            earlier.append(tokens)
        seq = data.draw(st.sampled_from(running))
        for _ in range(data.draw(st.integers(0, 3))):
            if seq.num_computed == len(seq.tokens):
                seq.tokens.append(data.draw(st.integers(0, 1)))
            count = data.draw(st.integers(1, len(seq.tokens) - seq.num_computed))
            assert kv.grow(seq, seq.num_computed + count)
            memory.step([(seq, count)])
            model.advance(seq)
        kv.check()
        if data.draw(st.booleans()):
            running.remove(seq)
            keep = data.draw(st.booleans())
            model.release(seq, keep)
            kv.release(seq, publish_tail=keep)
            kv.check()
