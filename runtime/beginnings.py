"""Text that comes in pieces: how much of its end must wait, since it may become one of some texts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


class Beginnings:
    """Those of some texts, looked for at the end of another."""

    __slots__ = ("_first", "_longest", "_sorted")

    def __init__(self, texts: Sequence[str]) -> None:
        self._longest = max(map(len, texts), default=1)
        self._first = frozenset(text[0] for text in texts)
        self._sorted = sorted(texts)

    def at_end(self, text: str) -> int:
        """Length of the longest end of `text` that one of the texts begins with, and is longer."""
        for count in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-count] in self._first and self._begins_one(text[-count:]):
                return count
        return 0

    def _begins_one(self, end: str) -> bool:
        # Those that are longer and begin with it stand right behind it.
        place = bisect_right(self._sorted, end)
        return place < len(self._sorted) and self._sorted[place].startswith(end)
