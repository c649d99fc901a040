"""What the parsers of all formats have in common: a text that grows, content around calls, calls as JSON objects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Mapping
from functools import lru_cache

from ...beginnings import Beginnings
from . import json_scan
from .events import ArgumentsPiece, CallBegin, CallBroken, Content, Event
from .json_scan import ObjectScan
from .tool import Tool

Steps = Generator[None, None, None]
"""Goes as far as the text allows, and yields where it needs more of it; never once the text has ended."""

# An answer with more of them than that calls no functions: none is looked for behind them, which would take long.
_MOST_BROKEN = 32


class Parser(ABC):
    """Of one answer. A format says in `_parse` what an answer looks like.

    Blanks between content and calls belong to neither and are left out.
    """

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        self._text = ""  # what has not become events yet
        self._ended = False
        self._events: list[Event] = []
        self._num_calls = 0
        self._num_broken = 0
        self._blank = ""  # behind the last content: it depends on what follows whether it is told
        self._follows_call = False
        self._before_call = ("", False)
        self._steps = self._parse()

    def feed(self, text: str) -> list[Event]:
        """The events of the next piece of the answer."""
        self._text += text
        next(self._steps, None)
        return self._take()

    def finish(self) -> list[Event]:
        """The events that the end of the answer decides."""
        self._ended = True
        for _ in self._steps:
            raise AssertionError("nothing can be waited for")
        self._say(self._text)
        self._text = ""
        if self._blank and not self._follows_call:
            self._events.append(Content(self._blank))
        return self._take()

    @abstractmethod
    def _parse(self) -> Steps:
        """From the beginning of the answer to its end; what is left over is content."""

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # Content

    def _say(self, text: str) -> None:
        text = self._blank + text
        if self._follows_call:
            text = text.lstrip()
        told = text.rstrip()
        self._blank = text[len(told) :]
        if told:
            self._events.append(Content(told))
            self._follows_call = False

    def _drop(self, count: int) -> None:
        self._text = self._text[count:]

    def _say_first(self, count: int) -> None:
        self._say(self._text[:count])
        self._drop(count)

    def _content_until(self, *markers: str) -> Generator[None, None, str | None]:
        """Tells content up to the first of the markers, which the text then begins with; None: none has come."""
        while True:
            if self._num_broken > _MOST_BROKEN:
                markers = ()
            found = [(place, marker) for marker in markers if (place := self._text.find(marker)) >= 0]
            if found:
                place, marker = min(found)
                self._say_first(place)
                return marker
            self._say_first(len(self._text) - (0 if self._ended else _beginnings(markers).at_end(self._text)))
            if self._ended:
                return None
            yield

    def _no_call(self, count: int) -> None:
        """The text does not begin with a call: so much of it is content, and what follows is looked at anew."""
        self._num_broken += 1
        self._say_first(count)

    def _past_blanks(self, at: int) -> Generator[None, None, int]:
        """The place of the next character that is no blank, or the end of the text if it has ended."""
        while True:
            while at < len(self._text) and self._text[at].isspace():
                at += 1
            if at < len(self._text) or self._ended:
                return at
            yield

    def _follows(self, at: int, *markers: str) -> Generator[None, None, str | None]:
        """The marker at this place of the text, if there is one."""
        while True:
            rest = self._text[at:]
            for marker in markers:
                if rest.startswith(marker):
                    return marker
            if self._ended or not any(marker.startswith(rest) for marker in markers):
                return None
            yield

    # Calls

    def _begin(self, name: str) -> None:
        self._before_call = (self._blank, self._follows_call)
        self._blank, self._follows_call = "", True
        self._events.append(CallBegin(self._num_calls, name))
        self._num_calls += 1

    def _arguments(self, text: str) -> None:
        if text:
            self._events.append(ArgumentsPiece(self._num_calls - 1, text))

    def _take_back(self) -> None:
        self._blank, self._follows_call = self._before_call
        self._events.append(CallBroken(self._num_calls - 1))

    def _json_call(self, at: int, argument_keys: Collection[str], only_known: bool = False,
                   ) -> Generator[None, None, int | None]:
        """A call as an object with "name" and arguments, told as it comes; the place behind it.

        only_known  of functions that there are, with no other members: else it may be JSON that was asked for
        None        it is none. If it had begun, it is taken back; the text is as before
        """
        call = _JsonCall(at, argument_keys, self._tools if only_known else None)
        begun = False
        while True:
            call.advance(self._text)
            if call.name is not None and call.arguments_at is not None and not begun:
                self._begin(call.name)
                begun = True
            if begun:
                self._arguments(call.new_arguments(self._text))
            if call.is_broken or call.end is not None or self._ended:
                break
            yield
        whole = call.whole(self._text)
        if whole is None:
            if begun:
                self._take_back()
            return None
        if not begun:
            name, arguments = whole
            self._begin(name)
            self._arguments(arguments)
        return call.end


class _JsonCall:
    """An object that may be a call: {"name": …, "arguments": {…}}, its members in any order.

    arguments_at  where the arguments begin, if they are an object
    """

    def __init__(self, at: int, argument_keys: Collection[str], known: Mapping[str, Tool] | None) -> None:
        self._scan = ObjectScan(at, None if known is None else {"name", "type", *argument_keys})
        self._begin = at
        self._keys = argument_keys
        self._known = known
        self._told = at
        self.name: str | None = None
        self.arguments_at: int | None = None
        self.is_broken = False

    @property
    def end(self) -> int | None:
        return self._scan.end

    def advance(self, text: str) -> None:
        self._scan.advance(text)
        self.is_broken |= self._scan.is_broken
        if self.name is None and (end := self._scan.members.get("name", (0, None))[1]) is not None:
            self._take_name(text[self._scan.members["name"][0] : end])
        if self.arguments_at is None:
            for key, (begin, _) in self._scan.members.items():
                if key in self._keys and text[begin] == "{":
                    self.arguments_at = self._told = begin
                    break

    def _take_name(self, text: str) -> None:
        name = json_scan.parse(text) if text[0] == '"' else ""
        # Halves of surrogate pairs, which could not be sent, are not printable either.
        if name and name.isprintable() and (self._known is None or name in self._known):
            self.name = name
        else:
            self.is_broken = True

    def new_arguments(self, text: str) -> str:
        """Those that have come since the last call."""
        end = next(end for begin, end in self._scan.members.values() if begin == self.arguments_at)
        begin, self._told = self._told, self._scan.at if end is None else end
        return text[begin : self._told]

    def whole(self, text: str) -> tuple[str, str] | None:
        """(name, arguments) of a complete call; None if it is none."""
        if self.is_broken or self.end is None or self.name is None:
            return None
        try:
            value = json_scan.parse(text[self._begin : self.end])
            given = [value[key] for key in self._keys if key in value]
            if len(given) > 1:
                return None
            arguments = given[0] if given else None
            if isinstance(arguments, str):  # JSON in a string, as some write it
                arguments = json_scan.parse(arguments)
            if arguments is None:
                arguments = {}
            return (self.name, json_scan.dump(arguments)) if isinstance(arguments, dict) else None
        except ValueError:
            return None


@lru_cache(maxsize=64)
def _beginnings(markers: tuple[str, ...]) -> Beginnings:
    return Beginnings(markers)
