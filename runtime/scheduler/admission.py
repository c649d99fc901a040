"""Whose turn it is, and whether there is room: the way from the queue into the batch."""

from __future__ import annotations

from collections.abc import Sequence as Listing
from typing import TYPE_CHECKING

from .queue import WaitingQueue
from .sequence import Sequence
from .settings import SchedulerPolicy, SchedulerSettings

if TYPE_CHECKING:
    from ..kv import KvCache

# How many waiting sequences are looked at in one step, at most: those behind them don't pass.
LOOK_AHEAD = 256
# How often a sequence may begin to wait for a prefix while others pass it; then nobody passes any more.
MAX_WAITS = 16


class Admission:
    def __init__(self, kv: KvCache, settings: SchedulerSettings) -> None:
        self.queue = WaitingQueue(settings.ageing_s)
        self._kv = kv
        self._settings = settings
        # STATIC_BATCH: those of the present batch that have not started yet.
        self._forming: set[Sequence] = set()
        # The sequence for which there was no room when num_available was so many: tried again when there is more.
        self._blocked: Sequence | None = None
        self._blocked_at = 0

    def remove(self, sequence: Sequence) -> None:
        self.queue.remove(sequence)
        self._forming.discard(sequence)

    def next(self, running: Listing[Sequence]) -> Sequence | None:
        """The sequence to start now if there is room for it. Nobody else may start before it."""
        queue = self.queue
        if not queue or len(running) >= self._settings.max_batch_size:
            return None
        static = self._settings.policy is SchedulerPolicy.STATIC_BATCH
        if static and not self._forming:
            if running:
                return None
            self._forming.update(queue.first(self._settings.max_batch_size))
        for sequence in queue.first(LOOK_AHEAD):
            if static and sequence not in self._forming:
                continue
            if sequence is self._blocked and running and self._kv.num_available <= self._blocked_at:
                return None
            if not self._waits(sequence):
                return sequence
            if sequence.num_waits > MAX_WAITS:
                return None
        return None

    def start(self, sequence: Sequence, running: Listing[Sequence], room: int) -> bool:
        """Gives a sequence that `next` named its blocks: the cached ones, and those for its first chunk.

        room  tokens of the step that it may compute. False, and nothing has changed, if there are not enough blocks
        """
        kv = self._kv
        limit = sequence.num_scored if sequence.prompt_logits else None
        if self._settings.policy is SchedulerPolicy.MAX_UTILIZATION:
            # A block more for each that runs: else the newcomer would be paused again at once.
            started = kv.acquire(sequence.kv, limit=limit, num_new=room, spare=len(running))
        else:
            started = kv.acquire(sequence.kv, limit=limit, num_new=room, reserve_tokens=sequence.max_computed)
        if not started:
            self._blocked, self._blocked_at = sequence, kv.num_available
            self._forming.clear()
            return False
        self.remove(sequence)
        return True

    def _waits(self, sequence: Sequence) -> bool:
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
