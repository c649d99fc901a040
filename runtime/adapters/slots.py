"""Which adapter lies in which slot of the device, and whose turn it is to have one (docs/lora.md).

Slots belong to the adapters of running sequences; the others keep what they held last, to be used again without being
written, until somebody needs them: least recently used first. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from ..executor.recorder import Recorder
    from ..program import Program
    from ..scheduler import Sequence as Scheduled
    from .loaded import LoadedAdapter

NO_SLOT = -1


class AdapterSlots:
    """write(slot, adapter)  fills a slot before the next step that is launched"""

    def __init__(self, count: int, write: Callable[[int, LoadedAdapter], None]) -> None:
        self._write = write
        self._free = list(range(count))
        self._held: dict[int, int] = {}  # number of an adapter -> its slot, the least recently used first

    @classmethod
    def of(cls, program: Program, recorder: Recorder) -> Self | None:
        """Those of a device; None if the engine has no room for adapters."""
        if program.lora is None:
            return None

        def write(slot: int, adapter: LoadedAdapter) -> None:
            program.write_adapter(slot, adapter.image)
            recorder.adapter_writes += 1
        return cls(program.lora.max_adapters, write)

    def release(self) -> None:
        """Lets go of the device. The last call."""
        del self._write

    def hold(self, adapter: LoadedAdapter | None, running: Sequence[Scheduled]) -> int:
        """The slot for a sequence that starts beside those that run, written if need be. Ask `may_start` before."""
        if adapter is None:
            return NO_SLOT
        slot = self._held.pop(adapter.number, None)
        if slot is None:
            slot = self._free.pop(0) if self._free else self._held.pop(self._unused(running)[0])
            self._write(slot, adapter)
        self._held[adapter.number] = slot
        return slot

    def turns(self, running: Sequence[Scheduled]) -> SlotTurns:
        """A look at the queue; `running` may grow meanwhile."""
        return SlotTurns(self, running)

    def has(self, number: int) -> bool:
        return number in self._held

    def has_room(self, running: Sequence[Scheduled]) -> bool:
        """Whether one more adapter could get a slot."""
        return bool(self._free or self._unused(running))

    def _unused(self, running: Sequence[Scheduled]) -> list[int]:
        in_use = {sequence.adapter.number for sequence in running if sequence.adapter is not None}
        return [number for number in self._held if number not in in_use]


class SlotTurns:
    """Goes over waiting sequences in the order of their turn, and says who may start as far as slots are concerned.

    A sequence that finds no slot waits, and others pass it. So that it does not wait for ever, it claims the slot whose
    sequences have the fewest tokens left: nobody behind it starts with the adapter that lies there, until that slot is
    free. Each adapter that waits claims one, while there are any.
    """

    def __init__(self, slots: AdapterSlots, running: Sequence[Scheduled]) -> None:
        self._slots = slots
        self._running = running
        self._waiting: set[int] = set()  # adapters without a slot
        self._claimed: set[int] = set()  # adapters that have to leave theirs
        # Neither comes back during a look, as sequences only start; and a long queue is looked at in every step.
        self._is_full = False
        self._all_claimed = False

    def may_start(self, sequence: Scheduled) -> bool:
        if sequence.adapter is None:
            return True
        number = sequence.adapter.number
        if number in self._waiting or number in self._claimed:
            return False
        if self._slots.has(number):
            return True
        if not self._is_full and self._slots.has_room(self._running):
            return True
        self._is_full = True
        self._waiting.add(number)
        if not self._all_claimed:
            self._claim()
        return False

    def _claim(self) -> None:
        left: dict[int, int] = {}
        for running in self._running:
            if running.adapter is not None and running.adapter.number not in self._claimed:
                number = running.adapter.number
                left[number] = max(left.get(number, 0), running.max_len - running.num_computed)
        if left:
            self._claimed.add(min(left, key=left.__getitem__))
        self._all_claimed = len(left) <= 1
