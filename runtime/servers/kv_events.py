"""SubscribeKvEvents: which blocks are cached, for gateways that send a request to where its prefix is.

Gateways number what they get and reconnect at a gap, so all subscribers share one numbering: the relay gathers the
cache's events a few times a second into batches. It also keeps which blocks are live, so that a new subscriber begins
with the present state. That costs some 300 bytes a block, of which each holds thousands of times as much KV.

Whole blocks without salt or LoRA adapter are told, for these a gateway can look for by their tokens. Blocks go by the
low 64 bits of their hash (kv/hashes.py).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

import grpc
from smg_grpc_proto.generated import common_pb2 as pb

from ..kv.events import EventBuffer, KvEvent
from ..kv.hashes import root_hash
from ..kv.sequence import CacheKey
from .grpc_errors import Unsupported

if TYPE_CHECKING:
    from .rpc import Call

_POLL_S = 0.02
_MAX_BATCH_EVENTS = 1000
_SNAPSHOT_BLOCKS = 4000  # blocks in one message of a snapshot: clients take 4 MB
_TIERS = {"device": pb.KV_CACHE_TIER_DEVICE, "host": pb.KV_CACHE_TIER_HOST}

Blocks = dict[bytes, tuple[bytes, tuple[int, ...]]]
"""Hash of a block -> (hash of the block before it, tokens). Parents stand before their children."""


class KvEventRelay:
    """Belongs to the loop that runs when it is made. `run` until cancelled."""

    def __init__(self, events: EventBuffer, block_size: int, history: int = 4096) -> None:
        self.sequence_number = 0
        self._events = events
        self._block_size = block_size
        self._root = root_hash(CacheKey())
        self._last_id = 0
        self._id_offset = 0  # what the ids of events are told with, so that they grow over several caches
        self._live: Blocks = {}
        self._history: deque[pb.KvEventBatch] = deque(maxlen=history)
        self._changed = asyncio.Event()

    async def run(self) -> None:
        while True:
            while self.gather():
                pass
            await asyncio.sleep(_POLL_S)

    def follow(self, events: EventBuffer, block_size: int) -> None:
        """Another cache, of another engine, takes the place of the one before: subscribers are told that nothing is
        cached any more, and then what the new one stores."""
        while self.gather():
            pass
        self._id_offset += self._last_id + 1
        self._events, self._block_size, self._last_id = events, block_size, 0
        self._live.clear()
        self._publish([pb.KvCacheEvent(event_id=self._id_offset, cleared=pb.KvCacheCleared())])

    def gather(self) -> bool:
        """Makes a batch of events that have come; False if there were none."""
        if self._events.last_id == self._last_id:
            return False
        events, lost = self._events.since(self._last_id, _MAX_BATCH_EVENTS)
        self._last_id = events[-1].id
        converted: list[pb.KvCacheEvent] = []
        if lost:  # what follows the gap cannot be placed: begin anew
            self._live.clear()
            converted.append(pb.KvCacheEvent(event_id=self._told_id(events[0]), cleared=pb.KvCacheCleared()))
        converted.extend(self._convert(events))
        if converted:
            self._publish(converted)
        return True

    def _publish(self, events: list[pb.KvCacheEvent]) -> None:
        self.sequence_number += 1
        self._history.append(pb.KvEventBatch(sequence_number=self.sequence_number, timestamp=time.time(),
                                             events=events))
        self._changed.set()
        self._changed = asyncio.Event()

    def _told_id(self, event: KvEvent) -> int:
        return self._id_offset + event.id

    def _convert(self, events: Iterable[KvEvent]) -> Iterator[pb.KvCacheEvent]:
        stored: list[KvEvent] = []
        for event in events:
            if stored and (event.kind != "stored" or event.parent_hash != stored[-1].block_hash):
                yield self._stored(stored)
                stored = []
            match event.kind:
                case "stored" if self._is_told(event):
                    self._live[event.block_hash] = (event.parent_hash, event.tokens)
                    stored.append(event)
                case "removed" if self._live.pop(event.block_hash, None) is not None:
                    yield pb.KvCacheEvent(event_id=self._told_id(event), removed=pb.KvBlocksRemoved(
                        block_hashes=[_low64(event.block_hash)], tier=_TIERS[event.tier]))
                case "created":
                    self._live.clear()
                    yield pb.KvCacheEvent(event_id=self._told_id(event), cleared=pb.KvCacheCleared())
        if stored:
            yield self._stored(stored)

    def _is_told(self, event: KvEvent) -> bool:
        is_rooted = event.parent_hash == self._root or event.parent_hash in self._live
        return is_rooted and len(event.tokens) == self._block_size

    def _stored(self, run: list[KvEvent]) -> pb.KvCacheEvent:
        """Blocks of which each follows the one before it."""
        blocks = [self._block(event.block_hash, event.tokens) for event in run]
        return pb.KvCacheEvent(event_id=self._told_id(run[0]), stored=pb.KvBlocksStored(
            blocks=blocks, parent_block_hash=self._parent(run[0].parent_hash), tier=_TIERS[run[0].tier]))

    def _block(self, block_hash: bytes, tokens: tuple[int, ...]) -> pb.KvBlock:
        return pb.KvBlock(block_hash=_low64(block_hash), token_ids=tokens, block_size=self._block_size)

    def _parent(self, parent_hash: bytes) -> int | None:
        return None if parent_hash == self._root else _low64(parent_hash)

    def snapshot(self) -> list[pb.KvEventBatch]:
        """The live blocks as batches whose numbers end at the present one; none if nothing has been told yet."""
        if not self.sequence_number:
            return []
        count = min(self.sequence_number, -(-len(self._live) // _SNAPSHOT_BLOCKS) or 1)
        size = -(-len(self._live) // count)
        blocks = iter(list(self._live.items()))
        batches = []
        for index in range(count):
            events = [pb.KvCacheEvent(cleared=pb.KvCacheCleared())] if index == 0 else []
            events += (pb.KvCacheEvent(stored=pb.KvBlocksStored(
                blocks=[self._block(block_hash, tokens)], parent_block_hash=self._parent(parent)))
                for block_hash, (parent, tokens) in islice(blocks, size))
            batches.append(pb.KvEventBatch(
                sequence_number=self.sequence_number - count + 1 + index, timestamp=time.time(), events=events,
                snapshot=pb.KvSnapshotChunk(index=index, count=count, blocks=len(self._live))))
        return batches

    def after(self, sequence_number: int) -> list[pb.KvEventBatch] | None:
        """The batches behind the one with this number; None if some of them are no longer held, or it never was."""
        missing = self.sequence_number - sequence_number
        if not 0 <= missing <= len(self._history):
            return None
        return list(islice(self._history, len(self._history) - missing, None))

    async def serve(self, request: pb.SubscribeKvEventsRequest, call: Call) -> None:
        """Writes batches until the client leaves."""
        await call.send_initial_metadata(())  # clients wait for it, and there may be nothing to tell for long
        position = request.start_sequence_number
        if position and self.after(position) is None:
            await call.abort(grpc.StatusCode.OUT_OF_RANGE, f"start_sequence_number: batch {position} is not held; "
                                                           "begin at 0, with the present state")
        if not position:
            for batch in self.snapshot():
                position = batch.sequence_number
                await call.write(batch)
        while True:
            changed, batches = self._changed, self.after(position)
            if batches is None:
                await call.abort(grpc.StatusCode.DATA_LOSS, "this subscriber reads too slowly; subscribe again from 0")
            for batch in batches or ():
                await call.write(batch)
                position = batch.sequence_number
            if position == self.sequence_number:
                await changed.wait()


async def serve_kv_events(relay: KvEventRelay | None, request: pb.SubscribeKvEventsRequest,
                          call: Call) -> None:
    """Raises Unsupported if the engine records no events."""
    if relay is None:
        raise Unsupported("SubscribeKvEvents", "this engine does not record what its KV cache holds")
    await relay.serve(request, call)


def _low64(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "little", signed=True)
