"""Text that comes in pieces: how much of its end must wait, since it may become one of some texts."""

from __future__ import annotations

from collections.abc import Sequence


class Beginnings:
    """Those of some texts, looked for at the end of another."""

    __slots__ = ("_first", "_longest", "_prefixes")

    def __init__(self, texts: Sequence[str]) -> None:
        self._longest = max(map(len, texts), default=1)
        self._first = frozenset(text[0] for text in texts)
        self._prefixes = frozenset(text[:end] for text in texts for end in range(1, len(text)))

    def at_end(self, text: str) -> int:
        """Length of the longest end of `text` that one of the texts begins with, and is longer."""
        for count in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-count] in self._first and text[-count:] in self._prefixes:
                return count
        return 0
