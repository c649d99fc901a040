"""Waiting sequences, in the order of their turn.

The place of a sequence is its arrival, moved forward by `ageing_s` seconds for each level of priority. That is ageing
without ever sorting anew: two waiting sequences both grow older by a second a second, so their order never changes.
And it is the bound on starvation: a sequence of priority p that arrived at t is overtaken only by sequences of a higher
priority q that arrive before t + (q - p) * ageing_s.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Generic

from .sequence import S, SequenceState

_RANK = attrgetter("rank")


class WaitingQueue(Generic[S]):
    """num_paused: how many of those that wait were running already."""

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._sequences: list[S] = []
        self._serial = 0
        self.num_paused = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[S]:
        return iter(self._sequences)

    def first(self, count: int) -> list[S]:
        return self._sequences[:count]

    def add(self, sequence: S) -> None:
        """A new sequence, behind those that arrived at the same time with the same priority."""
        self._serial += 1
        sequence.rank = (sequence.arrival - sequence.priority * self._ageing_s, self._serial)
        self.put_back(sequence)

    def put_back(self, sequence: S) -> None:
        """A sequence that was here before: to its old place."""
        insort(self._sequences, sequence, key=_RANK)
        self.num_paused += sequence.state is SequenceState.PAUSED

    def remove(self, sequence: S) -> None:
        index = bisect_left(self._sequences, sequence.rank, key=_RANK)
        assert self._sequences[index] is sequence, f"{sequence.request_id} is not waiting"
        del self._sequences[index]
        self.num_paused -= sequence.state is SequenceState.PAUSED
