"""Finds the texts that end an answer, in text that comes in pieces and must not be given out too early."""

from __future__ import annotations

from collections.abc import Sequence

from ..beginnings import Beginnings


class StopStrings:
    """Holds back text that may be the beginning of a stop string.

    Of several stop strings the one that is complete first ends the answer, and of those that end together the longest:
    so the result does not depend on how the text is cut into pieces.
    """

    __slots__ = ("_beginnings", "_held", "_include", "_stops")

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        """include: the stop string stays part of the text."""
        self._stops = tuple(stops)
        self._include = include
        self._beginnings = Beginnings(self._stops)
        self._held = ""

    def add(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """(the text that can be given out, the stop string that ended it). may_stop: the answer is long enough."""
        if not text:
            return "", None
        num_held = len(self._held)
        text = self._held + text
        if may_stop and (found := self._find(text, num_held)) is not None:
            begin, stop = found
            self._held = ""
            return text[: begin + len(stop) if self._include else begin], stop
        count = self._beginnings.at_end(text)
        self._held = text[len(text) - count :]
        return text[: len(text) - count], None

    def end(self) -> str:
        """What is still held back, when no text follows."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, num_seen: int) -> tuple[int, str] | None:
        """Where which stop string begins that ends behind the first num_seen characters."""
        found = []
        for stop in self._stops:
            begin = text.find(stop, max(num_seen - len(stop) + 1, 0))
            if begin >= 0:
                found.append((begin + len(stop), begin, stop))
        if not found:
            return None
        _, begin, stop = min(found)
        return begin, stop
