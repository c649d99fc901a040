"""What a model thinks aloud before it answers: <think>…</think>."""

from __future__ import annotations

from ..beginnings import Beginnings

BEGIN, END = "<think>", "</think>"
NAMES = ("think",)
_OF_END = Beginnings([END])


class Thoughts:
    """Tells the thoughts of one answer from the rest, in whatever pieces it comes; blanks around them are left out.

    begun: the prompt ends within them, as some chat templates write the first marker themselves
    """

    def __init__(self, begun: bool) -> None:
        self._state = "within" if begun else "before"
        self._text = ""  # what is not told yet
        self._has_told = False

    def split(self, text: str, is_last: bool) -> tuple[str, str]:
        """(more of the thoughts, more of the rest) that the next piece decides."""
        self._text += text
        if self._state == "before":
            self._begin(is_last)
        told = self._within(is_last) if self._state == "within" else ""
        return told, self._behind() if self._state in ("blanks", "behind") else ""

    def _begin(self, is_last: bool) -> None:
        start = self._text.lstrip()
        if start.startswith(BEGIN):
            self._text, self._state = start[len(BEGIN) :], "within"
        elif is_last or not BEGIN.startswith(start):
            self._state = "behind"

    def _within(self, is_last: bool) -> str:
        place = self._text.find(END)
        if place >= 0:
            told, self._text, self._state = self._text[:place].rstrip(), self._text[place + len(END) :], "blanks"
        else:
            held = 0 if is_last else _OF_END.at_end(self._text)
            told = self._text[: len(self._text) - held].rstrip()
            self._text = self._text[len(told) :]
        if not self._has_told:
            told = told.lstrip()
        self._has_told |= bool(told)
        return told

    def _behind(self) -> str:
        if self._state == "blanks":
            self._text = self._text.lstrip()
            self._state = "behind" if self._text else "blanks"
        text, self._text = self._text, ""
        return text
