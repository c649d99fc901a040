"""[TOOL_CALLS][{"name": …, "arguments": {…}}, …], and [TOOL_CALLS]name[ARGS]{…} of tokenizers from version 11 on."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Generator, Mapping, Sequence

from . import json_scan
from .form import Form
from .grammar import Grammar
from .hermes import json_call
from .json_scan import ObjectScan
from .parser import Parser, Steps
from .tool import Tool

MARKER, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[\w.:/-]+")
_ID = re.compile(r"\w*", re.ASCII)
# The templates refuse ids of any other form.
_ID_LENGTH, _ID_CHARS = 9, string.ascii_letters + string.digits


class MistralParser(Parser):
    def _parse(self) -> Steps:
        while (marker := (yield from self._content_until(MARKER))) is not None:
            at = yield from self._past_blanks(len(marker))
            if self._text[at : at + 1] == "[":
                yield from self._list(at + 1)
            elif (end := (yield from self._named_call(at))) is not None:
                self._drop(end)
            else:
                self._no_call(len(marker))

    def _list(self, at: int) -> Generator[None, None, None]:
        """Calls from here on, up to the bracket that ends them."""
        if_none = at
        while True:
            at = yield from self._past_blanks(at)
            end = yield from self._json_call(at, ("arguments", "parameters"))
            if end is None:
                self._no_call(if_none)
                return
            self._drop(end)
            at = yield from self._past_blanks(0)
            if self._text[at : at + 1] != ",":
                if self._text[at : at + 1] == "]":
                    self._drop(at + 1)
                return
            at = if_none = at + 1

    def _named_call(self, at: int) -> Generator[None, None, int | None]:
        """The place behind a call whose name stands before its arguments; None: it is none."""
        begin, at = at, (yield from self._past(_NAME, at))
        name = self._text[begin:at]
        if not name:
            return None
        while marker := (yield from self._follows(at, ARGS, CALL_ID)):
            at += len(marker)
            if marker == ARGS:
                break
            at = yield from self._past(_ID, at)
        at = yield from self._past_blanks(at)
        if self._text[at : at + 1] != "{":
            return None
        return (yield from self._json_arguments(name, at))

    def _json_arguments(self, name: str, at: int) -> Generator[None, None, int | None]:
        self._begin(name)
        scan, told = ObjectScan(at), at
        while True:
            scan.advance(self._text)
            self._arguments(self._text[told : scan.at])
            told = scan.at
            if scan.is_broken or scan.end is not None or self._ended:
                break
            yield
        if scan.end is not None and _is_json(self._text[at : scan.end]):
            return scan.end
        self._take_back()
        return None

    def _past(self, pattern: re.Pattern[str], at: int) -> Generator[None, None, int]:
        """The place behind what the pattern matches here."""
        while True:
            found = pattern.match(self._text, at)
            end = at if found is None else found.end()
            if end < len(self._text) or self._ended:
                return end
            yield


def _is_json(text: str) -> bool:
    try:
        json_scan.parse(text)
    except ValueError:
        return False
    return True


class Mistral(Form):
    name = "mistral"
    markers = (MARKER, ARGS, CALL_ID)

    def __init__(self, names_first: bool) -> None:
        """names_first: how calls are written; both ways are read."""
        self._names_first = names_first

    def parser(self, tools: Mapping[str, Tool]) -> Parser:
        return MistralParser(tools)

    def calls(self, grammar: Grammar, tools: Sequence[Tool], several: bool) -> str:
        marker = grammar.marker(MARKER)
        if self._names_first:
            return grammar.calls([f"{marker} {grammar.literal(tool.name)} {grammar.marker(ARGS)} "
                                  f"{grammar.arguments(tool)}" for tool in tools], "", several)
        calls = grammar.calls([" ".join(json_call(grammar, tool, "arguments")) for tool in tools], ", ", several)
        return " ".join([marker, '" "?', grammar.literal("["), calls, grammar.literal("]")])

    def new_id(self) -> str:
        return "".join(secrets.choice(_ID_CHARS) for _ in range(_ID_LENGTH))
