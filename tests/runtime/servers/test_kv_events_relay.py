"""What gateways are told of cached blocks: one numbering for all, the present state first, gaps said aloud."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import trtllm_service_pb2_grpc as trtllm_rpc
from smg_grpc_proto import vllm_engine_pb2_grpc as rpc
from smg_grpc_proto.generated import common_pb2 as pb

from ingot.runtime.kv.events import EventBuffer
from ingot.runtime.kv.hashes import block_hash, block_hashes, root_hash
from ingot.runtime.kv.sequence import CacheKey
from ingot.runtime.servers.kv_events import KvEventRelay
from tests.runtime.servers.grpc_replica import BLOCK_SIZE, replica
from tests.runtime.servers.scripted_grpc import ScriptedRunner, scripted
from tests.runtime.servers.test_trtllm import ask, refused

SIZE = 4


def low64(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "little", signed=True)


@pytest.fixture
def buffer() -> EventBuffer:
    return EventBuffer(64)


@pytest.fixture
def relay(buffer: EventBuffer) -> Iterator[KvEventRelay]:
    async def make() -> KvEventRelay:
        return KvEventRelay(buffer, SIZE, history=4)
    yield asyncio.run(make())


def store(buffer: EventBuffer, tokens: list[int], key: CacheKey = CacheKey()) -> list[bytes]:  # noqa: B008
    """Stored events of all blocks of `tokens`; their hashes."""
    parent, hashes = root_hash(key), block_hashes(tokens, key, SIZE)
    for index, digest in enumerate(hashes):
        buffer.emit("stored", digest, parent, tuple(tokens[index * SIZE : (index + 1) * SIZE]))
        parent = digest
    return hashes


def after(relay: KvEventRelay, sequence_number: int) -> list[pb.KvEventBatch]:
    batches = relay.after(sequence_number)
    assert batches is not None
    return batches


def kinds(batch: pb.KvEventBatch) -> list[str]:
    return [each.WhichOneof("data") for each in batch.events]


def test_a_chain_of_blocks_is_one_event(relay: KvEventRelay, buffer: EventBuffer) -> None:
    hashes = store(buffer, list(range(12)))
    other = store(buffer, [9] * 4)
    assert relay.gather() and not relay.gather()
    (batch,) = after(relay, 0)
    assert batch.sequence_number == 1 and kinds(batch) == ["stored", "stored"]
    chain, single = (each.stored for each in batch.events)
    assert [each.block_hash for each in chain.blocks] == [low64(each) for each in hashes]
    assert [list(each.token_ids) for each in chain.blocks] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert not chain.HasField("parent_block_hash") and chain.blocks[0].block_size == SIZE
    assert single.blocks[0].block_hash == low64(other[0])


def test_another_engine_takes_over(relay: KvEventRelay, buffer: EventBuffer) -> None:
    """What the old cache held is gone, also what had not been told yet; ids and numbers of batches go on."""
    store(buffer, list(range(8)))
    relay.gather()
    store(buffer, [7] * 4)
    other = EventBuffer(64)
    relay.follow(other, SIZE)
    store(other, [2] * 4)
    store(buffer, [9] * 4)  # the old one still finishes
    relay.gather()
    batches = after(relay, 0)
    told = [event for batch in batches for event in batch.events]
    kinds_told = [event.WhichOneof("data") for event in told]
    assert [batch.sequence_number for batch in batches] == list(range(1, len(batches) + 1))
    assert kinds_told == ["stored", "stored", "cleared", "stored"]
    assert list(told[-1].stored.blocks[0].token_ids) == [2] * 4
    ids = [event.event_id for event in told]
    assert ids == sorted(set(ids))
    (snapshot,) = [batch for batch in relay.snapshot() if batch.snapshot.blocks]
    assert snapshot.snapshot.blocks == 1


def test_a_later_block_names_its_parent(relay: KvEventRelay, buffer: EventBuffer) -> None:
    (first,) = store(buffer, [1, 2, 3, 4])
    relay.gather()
    second = block_hash(first, (5, 6, 7, 8))
    buffer.emit("stored", second, first, (5, 6, 7, 8), tier="host")
    relay.gather()
    (batch,) = after(relay, 1)
    stored = batch.events[0].stored
    assert stored.parent_block_hash == low64(first) and stored.tier == pb.KV_CACHE_TIER_HOST


def test_only_what_can_be_looked_for_is_told(relay: KvEventRelay, buffer: EventBuffer) -> None:
    salted = store(buffer, list(range(8)), CacheKey(salt="tenant"))
    (whole,) = store(buffer, [1, 2, 3, 4])
    partial = block_hash(whole, (5, 6))
    buffer.emit("stored", partial, whole, (5, 6))
    for digest in (*salted, partial, whole):
        buffer.emit("removed", digest)
    buffer.emit("updated", whole, priority=3)
    relay.gather()
    (batch,) = after(relay, 0)
    assert kinds(batch) == ["stored", "removed"]
    assert list(batch.events[1].removed.block_hashes) == [low64(whole)]


def test_a_new_subscriber_gets_the_present_state(relay: KvEventRelay, buffer: EventBuffer) -> None:
    assert relay.snapshot() == []
    hashes = store(buffer, list(range(12)))
    relay.gather()
    buffer.emit("removed", hashes[2])
    relay.gather()
    (batch,) = relay.snapshot()
    assert batch.sequence_number == 2 and batch.snapshot.blocks == 2 and batch.snapshot.count == 1
    assert kinds(batch) == ["cleared", "stored", "stored"]
    assert batch.events[2].stored.parent_block_hash == low64(hashes[0])
    assert relay.after(batch.sequence_number) == []


def test_a_large_state_comes_in_chunks_with_numbers_in_a_row(monkeypatch: pytest.MonkeyPatch, relay: KvEventRelay,
                                                             buffer: EventBuffer) -> None:
    monkeypatch.setattr("ingot.runtime.servers.kv_events._SNAPSHOT_BLOCKS", 2)
    for number in range(5):
        store(buffer, [number] * 4)
        relay.gather()
    batches = relay.snapshot()
    assert [each.sequence_number for each in batches] == [3, 4, 5]
    assert [(each.snapshot.index, each.snapshot.count) for each in batches] == [(0, 3), (1, 3), (2, 3)]
    stored = [event.stored.blocks[0] for each in batches for event in each.events if event.HasField("stored")]
    assert [each.token_ids[0] for each in stored] == [0, 1, 2, 3, 4]


def test_batches_are_held_for_a_while(relay: KvEventRelay, buffer: EventBuffer) -> None:
    for number in range(6):
        store(buffer, [number] * 4)
        relay.gather()
    assert [each.sequence_number for each in after(relay, 2)] == [3, 4, 5, 6]
    assert relay.after(1) is None and relay.after(7) is None


def test_lost_events_clear_everything(relay: KvEventRelay, buffer: EventBuffer) -> None:
    store(buffer, list(range(8)))
    relay.gather()
    for number in range(100):  # more than the buffer holds
        store(buffer, [number] * 4)
    while relay.gather():
        pass
    (batch,) = after(relay, 1)
    assert kinds(batch)[0] == "cleared" and len(batch.events) == 1 + 64


def test_a_flush_clears(relay: KvEventRelay, buffer: EventBuffer) -> None:
    buffer.emit("created", num_blocks=(4, 0))
    relay.gather()
    (batch,) = after(relay, 0)
    assert kinds(batch) == ["cleared"]


# Through a server


def subscribe(channel: grpc.Channel, start: int = 0) -> Any:
    return rpc.VllmEngineStub(channel).SubscribeKvEvents(pb.SubscribeKvEventsRequest(start_sequence_number=start))


def stored_tokens(batches: Iterator[pb.KvEventBatch], count: int) -> list[list[int]]:
    """The tokens of the next `count` blocks that are stored."""
    found: list[list[int]] = []
    while len(found) < count:
        found += [list(block.token_ids) for event in next(batches).events for block in event.stored.blocks]
    return found


def test_subscribers_see_what_requests_leave_in_the_cache(tmp_path: Path) -> None:
    prompt = list(range(60, 100))
    with replica(tmp_path) as served, served.channel() as channel:
        early = subscribe(channel)
        list(trtllm_rpc.TrtllmServiceStub(channel).Generate(ask(prompt=prompt, max_tokens=2)))
        whole = [prompt[:BLOCK_SIZE], prompt[BLOCK_SIZE : 2 * BLOCK_SIZE]]
        assert stored_tokens(early, 2) == whole
        late = trtllm_rpc.TrtllmServiceStub(channel).SubscribeKvEvents(pb.SubscribeKvEventsRequest())
        assert stored_tokens(late, 2) == whole
        list(trtllm_rpc.TrtllmServiceStub(channel).Generate(ask(prompt=[7] * 20, max_tokens=2)))
        last = next(batch for batch in early if any(each.HasField("stored") for each in batch.events)).sequence_number
        (resumed,) = stored_tokens(subscribe(channel, last - 1), 1)
        assert resumed == [7] * BLOCK_SIZE
        code, details = refused(lambda: subscribe(channel, 10_000))
        assert code == grpc.StatusCode.OUT_OF_RANGE and details.startswith("start_sequence_number")


def test_an_engine_without_events_says_so(tmp_path: Path) -> None:
    runner = ScriptedRunner()
    runner.events = None
    with scripted(tmp_path, runner) as address, grpc.insecure_channel(address) as channel:
        assert refused(lambda: subscribe(channel))[0] == grpc.StatusCode.UNIMPLEMENTED
