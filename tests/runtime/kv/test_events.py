import hashlib
import struct

from ingot.runtime.kv import CacheKey, KvCache, RetentionRange
from ingot.runtime.kv.events import EventBuffer
from ingot.runtime.kv.hashes import block_hash, block_hashes, root_hash
from tests.runtime.kv.sequences import Clock, cache, compute, fill, generate, release, start


def test_a_hash_names_the_whole_prefix_and_its_key() -> None:
    key = CacheKey("tenant", 3)
    first, second = block_hashes(range(9), key, 4)
    assert first == hashlib.sha256(root_hash(key) + struct.pack("<4i", 0, 1, 2, 3)).digest()
    assert second == hashlib.sha256(first + struct.pack("<4i", 4, 5, 6, 7)).digest()
    assert second == block_hash(first, (4, 5, 6, 7)) and len(second) == 32
    keys = [CacheKey(), CacheKey("1"), CacheKey(1), CacheKey(None, 1), CacheKey("1", 1)]
    assert len({root_hash(key) for key in keys}) == len(keys)


def test_a_cache_tells_what_it_holds() -> None:
    events = EventBuffer()
    kv = KvCache(3, 4, num_host_blocks=1, events=events)
    key = CacheKey("s", 2)
    seq = start(kv, range(6), key=key, retention=[RetentionRange(0, 4, 60)])
    whole = block_hashes(range(8), key, 4)
    tail = block_hash(whole[0], (4, 5))
    told, lost = events.since(0)
    assert not lost and [event.id for event in told] == [1, 2, 3]
    assert (told[0].kind, told[0].num_blocks) == ("created", (3, 1))
    assert (told[1].kind, told[1].block_hash, told[1].parent_hash) == ("stored", whole[0], root_hash(key))
    assert (told[1].tokens, told[1].tier, told[1].priority, told[1].lora) == ((0, 1, 2, 3), "device", 60, 2)
    assert (told[2].kind, told[2].block_hash, told[2].parent_hash) == ("stored", tail, whole[0])
    assert (told[2].tokens, told[2].priority) == ((4, 5), 35)

    generate(kv, seq, [6, 7])
    told, _ = events.since(3)
    assert [(event.kind, event.block_hash) for event in told] == [("removed", tail), ("stored", whole[1])]

    release(kv, seq)
    fill(kv, 2)  # the second block moves to the host
    told, _ = events.since(5)
    assert [(event.kind, event.block_hash, event.tier) for event in told] == [("updated", whole[1], "host")]
    fill(kv, 3)  # the first one takes its place
    told, _ = events.since(6)
    assert [(event.kind, event.block_hash, event.tier) for event in told] == [
        ("removed", whole[1], "host"), ("updated", whole[0], "host")]
    compute(kv, start(kv, range(5), 4, key=key), 5)
    told, _ = events.since(8)
    assert [(event.kind, event.tier) for event in told] == [("updated", "device"), ("stored", "device")]


def test_changes_of_priority_are_told() -> None:
    events, clock = EventBuffer(), Clock()
    kv = KvCache(4, 4, events=events, clock=clock)
    cache(kv, range(4))
    last = events.last_id
    release(kv, start(kv, range(5), 4, retention=[RetentionRange(0, None, 90, duration_s=5)]))
    clock.now = 5
    fill(kv, 1)
    fill(kv, 4)
    told, _ = events.since(last)
    assert [(event.kind, event.priority) for event in told] == [("updated", 90), ("updated", 35), ("removed", None)]


def test_a_block_computed_again_with_another_priority_is_told() -> None:
    events = EventBuffer()
    kv = KvCache(8, 4, events=events)
    first, second = start(kv, range(4), 0), start(kv, range(4), 0, retention=[RetentionRange(0, None, 90)])
    compute(kv, first, 4)
    release(kv, first)
    last = events.last_id
    compute(kv, second, 4)
    told, _ = events.since(last)
    assert [(event.kind, event.priority) for event in told] == [("updated", 90)]


def test_stored_and_removed_balance() -> None:
    """A reader that follows the events knows exactly what is cached."""
    events = EventBuffer()
    kv = KvCache(6, 4, (None, 6), num_host_blocks=2, events=events)
    known: set[bytes] = set()
    last = 0
    for index in range(40):
        seq = start(kv, [index % 3] * (index % 5) + list(range(index % 7 + 1)))
        release(kv, seq)
        told, lost = events.since(last)
        assert not lost
        for event in told:
            last = event.id
            if event.kind == "stored":
                assert event.block_hash not in known
                known.add(event.block_hash)
            elif event.kind == "removed":
                known.remove(event.block_hash)
            elif event.kind == "updated":
                assert event.block_hash in known
    kv.clear()
    told, _ = events.since(last)
    assert known == {event.block_hash for event in told if event.kind == "removed"}


def test_a_reader_that_is_too_slow_learns_that_it_lost_events() -> None:
    events = EventBuffer(capacity=3)
    for _ in range(5):
        events.emit("removed")
    assert [event.id for event in events.since(0)[0]] == [3, 4, 5]
    assert events.since(0)[1] and events.since(1)[1]
    assert events.since(2) == (events.since(0)[0], False)
    assert [event.id for event in events.since(3, max_events=1)[0]] == [4]
    assert events.since(5) == ([], False)
    assert EventBuffer().since(0) == ([], False)
