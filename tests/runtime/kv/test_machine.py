"""Random sequences over small pools: nothing is lost, nothing stale is read, nothing promised is missing."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ingot.runtime.kv import CacheKey, KvCache, KvSequence, RetentionRange
from tests.runtime.kv.memory import Memory

WINDOWS = [(None,), (None, None), (5,), (1, 9), (None, 6), (None, 3, 6, 6)]
BLOCK_SIZE = 4
KEYS = [CacheKey(), CacheKey("a"), CacheKey("a", 1)]
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=30)
RETENTION = st.lists(st.builds(RetentionRange, st.integers(0, 8), st.none() | st.integers(4, 30), st.integers(0, 100),
                               st.none() | st.integers(1, 9).map(float)), max_size=2)


class CacheMachine(RuleBasedStateMachine):
    """`running` in the order of their start. With `reserves`, sequences reserve all that they may become."""

    @initialize(windows=st.sampled_from(WINDOWS), room=st.integers(1, 4), spare=st.integers(0, 12),
                num_host_blocks=st.sampled_from([0, 3, 12]), partial=st.booleans(), reserves=st.booleans(),
                max_chunk=st.integers(1, 12))
    def start(self, windows: tuple[int | None, ...], room: int, spare: int, num_host_blocks: int, partial: bool,
              reserves: bool, max_chunk: int) -> None:
        self.now = 0.0
        least = KvCache(1, BLOCK_SIZE, windows, max_chunk=max_chunk).needed(40)
        self.kv = KvCache(least * room + spare, BLOCK_SIZE, windows, num_host_blocks=num_host_blocks,
                          enable_partial_reuse=partial, max_chunk=max_chunk, clock=lambda: self.now)
        self.memory = Memory(self.kv)
        self.reserves = reserves
        self.max_chunk = max_chunk
        self.running: list[KvSequence] = []
        self.paused: list[KvSequence] = []
        self.known: list[list[int]] = []

    @precondition(lambda self: len(self.running) < 6)
    @rule(data=st.data(), tokens=TOKENS, key=st.sampled_from(KEYS), retention=RETENTION, decode=st.integers(0, 100),
          room=st.integers(0, 12), limit=st.none() | st.integers(0, 20))
    def admit(self, data: st.DataObject, tokens: list[int], key: CacheKey, retention: list[RetentionRange],
              decode: int, room: int, limit: int | None) -> None:
        if self.known:
            # Most requests begin as an earlier one did.
            earlier = data.draw(st.sampled_from(self.known))
            tokens = (earlier[: data.draw(st.integers(0, len(earlier)))] + tokens)[:30]
        self._admit(KvSequence(list(tokens), key, retention, decode, 3.0), room, limit)

    @precondition(lambda self: self.paused)
    @rule(room=st.integers(0, 12))
    def resume(self, room: int) -> None:
        self._admit(self.paused.pop(), room, None)

    def _admit(self, seq: KvSequence, room: int, limit: int | None) -> None:
        expected = self.kv.probe(seq).num_cached
        before = self.kv.usage(), len(self.kv.tree.roots)
        reserve_tokens = 40 if self.reserves else 0
        if not self.kv.acquire(seq, num_new=min(room, self.max_chunk), reserve_tokens=reserve_tokens, limit=limit):
            assert before == (self.kv.usage(), len(self.kv.tree.roots))
            assert self.running, "a sequence that fits the pool must have room when it is alone"
            return
        assert seq.num_cached <= expected
        if limit is None and self.kv.windows == (None,):
            # A copy is given up where there is no room to keep its source meanwhile.
            assert seq.num_cached > expected - BLOCK_SIZE
        assert seq.num_cached < len(seq.tokens) and seq.num_cached <= (limit if limit is not None else 99)
        self.running.append(seq)
        self.known = [*self.known[-7:], seq.tokens]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        plan = []
        for seq in list(self.running):
            if seq not in self.running or not data.draw(st.booleans()):
                continue
            pending = len(seq.tokens) - seq.num_computed
            if pending == 0:
                seq.tokens.append(data.draw(st.integers(0, 1)))
                pending = 1
            count = min(pending, data.draw(st.integers(1, self.max_chunk)))
            # Sometimes the token after that is planned already.
            ahead = seq.num_computed + count + (count == pending and len(seq.tokens) < 40 and data.draw(st.booleans()))
            if self._grow(seq, ahead):
                plan.append((seq, count))
        self.now += 1
        self.memory.step([(seq, count) for seq, count in plan if seq in self.running])
        for seq in list(self.running):
            if len(seq.tokens) >= 40:
                self.finish(seq)

    def _grow(self, seq: KvSequence, num_tokens: int) -> bool:
        while not self.kv.grow(seq, num_tokens):
            assert not self.reserves, "blocks that were promised are missing"
            assert len(self.running) > 1, "a sequence that fits the pool cannot grow although it is alone"
            last = self.running.pop()
            self.kv.release(last)
            self.paused.append(last)
            if last is seq:
                return False
        return True

    def finish(self, seq: KvSequence) -> None:
        self.running.remove(seq)
        self.kv.release(seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), publish_tail=st.booleans())
    def end(self, data: st.DataObject, publish_tail: bool) -> None:
        seq = data.draw(st.sampled_from(self.running))
        self.running.remove(seq)
        self.kv.release(seq, publish_tail=publish_tail)

    @precondition(lambda self: self.now % 10 == 9)
    @rule()
    def clear(self) -> None:
        self.kv.clear()
        usage = self.kv.usage()
        assert usage.num_cached == usage.num_host_cached == 0

    @invariant()
    def books_are_right(self) -> None:
        self.kv.check()

    def teardown(self) -> None:
        for seq in list(getattr(self, "running", [])):
            self.finish(seq)
        if hasattr(self, "kv"):
            self.kv.check()
            self.kv.clear()
            assert not self.kv.tree.roots and not self.kv.tree.first_blocks and not self.kv.num_promised
            assert self.kv.num_available == self.kv.num_blocks


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None,
                                     suppress_health_check=list(HealthCheck))
