"""Work that goes on beside the warps, in the order of its beginning: what wgmma and tcgen05 have started."""
from __future__ import annotations

from collections import deque
from collections.abc import Callable

from .warp import Block

Work = Callable[[], None]


class Pipeline:
    """A queue of a block's pending work. Nothing in it is done before what was begun earlier; each piece is done at a
    time that the machine chooses, or when somebody waits for it."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._queue: deque[Work] = deque()
        self.begun = 0
        self.done = 0

    def begin(self, work: Work) -> int:
        """Returns the number of the piece, for `finish`."""
        self._queue.append(work)
        self.begun += 1
        number = self.begun
        self._block.pending.append(lambda: self.finish(number))
        return number

    def finish(self, number: int) -> None:
        """Does all up to that piece, as far as it was not done."""
        while self.done < number:
            self.done += 1
            self._queue.popleft()()
