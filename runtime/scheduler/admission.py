"""Whose turn it is, and whether there is room: the way from the queue into the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Generic

from .queue import WaitingQueue
from .sequence import S
from .settings import SchedulerPolicy, SchedulerSettings

if TYPE_CHECKING:
    from ..adapters.slots import AdapterSlots
    from ..kv import KvCache

# How many waiting sequences are looked at in one step, at most: those behind them don't pass.
LOOK_AHEAD = 256
# How many of these may begin to wait for a prefix in one step: to find out takes a look at all of their tokens.
MAX_PROBES = 16
# How often a sequence may begin to wait for a prefix while others pass it; then nobody passes any more.
MAX_WAITS = 16


class Admission(Generic[S]):
    def __init__(self, kv: KvCache, settings: SchedulerSettings, slots: AdapterSlots | None = None) -> None:
        """slots: of LoRA adapters; None: no sequence has one."""
        self.queue: WaitingQueue[S] = WaitingQueue(settings.ageing_s)
        self._kv = kv
        self._slots = slots
        self._settings = settings
        # STATIC_BATCH: those of the present batch that have not started yet.
        self._forming: set[S] = set()
        # There was no room for this one when num_available was so many: it is tried again when there is more.
        self._blocked: S | None = None
        self._blocked_at = 0

    def remove(self, sequence: S) -> None:
        self.queue.remove(sequence)
        self._forming.discard(sequence)

    def room_was_made(self) -> None:
        """A running sequence has ended."""
        self._blocked = None

    def can_start(self, running: list[S]) -> bool:
        """Whether anybody's turn has come, if there is room."""
        return any(True for _ in self.candidates(running))

    def candidates(self, running: list[S]) -> Iterator[S]:
        """Sequences in order of their turn; each is to be started before the next one is asked for, or nobody is."""
        settings = self._settings
        static = settings.policy is SchedulerPolicy.STATIC_BATCH
        if static and not self._forming:
            if running:
                return
            self._forming.update(self.queue.first(settings.max_batch_size))
        num_probes = 0
        turns = self._slots.turns(running) if self._slots is not None else None
        for sequence in self.queue.first(LOOK_AHEAD):
            if len(running) >= settings.max_batch_size or num_probes == MAX_PROBES:
                return
            if static and sequence not in self._forming:
                continue
            if sequence is self._blocked and running and self._kv.num_available <= self._blocked_at:
                return
            if turns is not None and not turns.may_start(sequence):
                continue
            waited = sequence.awaited
            if not self._waits(sequence):
                yield sequence
                continue
            num_probes += sequence.awaited is not waited
            if sequence.num_waits > MAX_WAITS:
                return

    def start(self, sequence: S, running: list[S], room: int) -> bool:
        """Gives a candidate its blocks, the cached ones and those for its first chunk, and a slot for its adapter.

        room  tokens of the step that it may compute. False, and nothing has changed, if there are not enough blocks
        """
        kv = self._kv
        limit = sequence.num_scored if sequence.prompt_logits else None
        if self._settings.policy is SchedulerPolicy.MAX_UTILIZATION:
            # A block a table more for each that runs: else the newcomer would be paused again at once.
            started = kv.acquire(sequence.kv, limit=limit, num_new=room, spare=len(running) * len(kv.windows))
        else:
            started = kv.acquire(sequence.kv, limit=limit, num_new=room, reserve_tokens=sequence.max_computed)
        if not started:
            self._blocked, self._blocked_at = sequence, kv.num_available
            self._forming.clear()
            return False
        if self._slots is not None:
            sequence.slot = self._slots.hold(sequence.adapter, running)
        self.remove(sequence)
        return True

    def _waits(self, sequence: S) -> bool:
        """Whether another sequence is just computing what this one begins with, at least a block of it."""
        if sequence.awaited is not None and not sequence.awaited.ready:
            return True
        sequence.awaited = None
        if not self._settings.wait_for_prefix or sequence.prompt_logits:
            return False
        probe = self._kv.probe(sequence.kv)
        if probe.num_pending < self._kv.block_size:
            return False
        sequence.awaited = probe
        sequence.num_waits += 1
        return True
