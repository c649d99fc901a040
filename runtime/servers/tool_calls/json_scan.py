"""The text of a JSON object as it comes: where its members are, and at which character it is no JSON any more."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_BLANK = re.compile(r"[ \t\n\r]*")
_SCALAR = re.compile(r"[-+.\w]*", re.ASCII)
_WHOLE_SCALAR = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", re.ASCII)
_ESCAPES = '"\\/bfnrtu'
_HEX = "0123456789abcdefABCDEF"


class ObjectScan:
    """Walks through an object that begins at a place of a text which grows.

    members    key -> where its value begins and ends, of the outermost object; end None: not there yet
    end        behind its closing brace; None: not there yet
    is_broken  no text that follows can make it an object
    """

    def __init__(self, begin: int, keys: Collection[str] | None = None) -> None:
        """keys: those that the outermost object may have; None: any."""
        self.members: dict[str, tuple[int, int | None]] = {}
        self.end: int | None = None
        self.is_broken = False
        self.at = begin
        self._keys = keys
        self._expected = "object"
        self._open: list[str] = []
        self._string_at = 0
        self._string_is_key = False
        self._num_hex = 0
        self._key: str | None = None

    def advance(self, text: str) -> None:
        """Goes on to the end of `text`, of the object, or of what is valid."""
        while self.at < len(text) and self.end is None and not self.is_broken:
            if self._expected in ("string", "escape", "hex"):
                self._in_string(text)
                continue
            self.at = _end(_BLANK, text, self.at) if self._expected != "scalar" else self.at
            if self.at < len(text):
                self._step(text, text[self.at])

    def _in_string(self, text: str) -> None:
        if self._expected == "string":
            self.at = _end(_PLAIN, text, self.at)
            if self.at == len(text):
                return
        char = text[self.at]
        self.at += 1
        if self._expected == "hex":
            self.is_broken = char not in _HEX
            self._num_hex += 1
            self._expected = "hex" if self._num_hex < 4 else "string"
        elif self._expected == "escape":
            self.is_broken = char not in _ESCAPES
            self._num_hex = 0
            self._expected = "hex" if char == "u" else "string"
        elif char == "\\":
            self._expected = "escape"
        elif char != '"':  # a control character
            self.is_broken = True
        elif self._string_is_key:
            if len(self._open) == 1:
                self._key = json.loads(text[self._string_at : self.at])
                self.is_broken = self._key in self.members or (self._keys is not None and self._key not in self._keys)
            self._expected = "colon"
        else:
            self._value_ends()

    def _step(self, text: str, char: str) -> None:
        expected = self._expected
        if expected == "scalar":
            self._in_scalar(text)
            return
        self.at += 1
        if expected == "object" and char == "{":
            self._enter(char)
        elif expected in ("key", "key or end") and char == '"':
            self._begin_string(is_key=True)
        elif expected == "colon" and char == ":":
            self._expected = "value"
        elif expected in ("value", "value or end") and char not in "]},:":
            self._begin_value(char)
        elif expected == "more" and char == ",":
            self._expected = "key" if self._open[-1] == "{" else "value"
        elif (expected == "more" and char == ("}" if self._open[-1] == "{" else "]")) or \
                (expected == "key or end" and char == "}") or (expected == "value or end" and char == "]"):
            self._leave()
        else:
            self.is_broken = True

    def _begin_value(self, char: str) -> None:
        if len(self._open) == 1 and self._key is not None:
            self.members[self._key] = (self.at - 1, None)
        if char in "{[":
            self._enter(char)
        elif char == '"':
            self._begin_string(is_key=False)
        else:
            self._string_at = self.at = self.at - 1
            self._expected = "scalar"

    def _in_scalar(self, text: str) -> None:
        self.at = _end(_SCALAR, text, self.at)
        if self.at == len(text):
            return
        self.is_broken = _WHOLE_SCALAR.fullmatch(text, self._string_at, self.at) is None
        self._value_ends()

    def _begin_string(self, is_key: bool) -> None:
        self._string_at = self.at - 1
        self._string_is_key = is_key
        self._expected = "string"

    def _enter(self, char: str) -> None:
        self._open.append(char)
        self._expected = "key or end" if char == "{" else "value or end"

    def _leave(self) -> None:
        self._open.pop()
        if self._open:
            self._value_ends()
        else:
            self.end = self.at

    def _value_ends(self) -> None:
        self._expected = "more"
        if len(self._open) == 1 and self._key is not None:
            begin, _ = self.members[self._key]
            self.members[self._key] = (begin, self.at)


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None, "the patterns match nothing too"
    return found.end()


def parse(text: str) -> Any:
    """The value of JSON text. Raises ValueError, also where it is nested too deeply or has no finite numbers."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def dump(value: Any) -> str:
    """JSON that can be sent: halves of surrogate pairs stay escaped. Raises ValueError for what JSON cannot hold."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return text
