"""{"name": …, "parameters": {…}} and nothing else, possibly behind <|python_tag|>: Llama 3.1, 3.2 and 3.3."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

from .form import Form
from .grammar import Grammar
from .hermes import json_call
from .parser import Parser, Steps
from .tool import Tool

MARKER = "<|python_tag|>"
_KEYS = ("parameters", "arguments")


class LlamaParser(Parser):
    """Objects without the marker are calls only at the beginning of an answer, and of functions that there are."""

    def _parse(self) -> Steps:
        at = yield from self._past_blanks(0)
        if self._text[at : at + 1] == "{":
            yield from self._calls(at, at + 1)
        while (marker := (yield from self._content_until(MARKER))) is not None:
            yield from self._calls((yield from self._past_blanks(len(marker))), len(marker))

    def _calls(self, at: int, if_none: int) -> Generator[None, None, None]:
        """Calls from here on. if_none: so many characters are content if there is none."""
        while (end := (yield from self._json_call(at, _KEYS, only_known=True))) is not None:
            self._drop(end)
            at = yield from self._past_blanks(0)
            if self._text[at : at + 1] == ";":
                at = yield from self._past_blanks(at + 1)
            if self._text[at : at + 1] != "{":
                return
            if_none = at + 1
        self._no_call(if_none)


class Llama(Form):
    name = "llama3_json"
    markers = (MARKER,)

    def parser(self, tools: Mapping[str, Tool]) -> Parser:
        return LlamaParser(tools)

    def calls(self, grammar: Grammar, tools: Sequence[Tool], several: bool) -> str:
        return grammar.calls([" ".join(json_call(grammar, tool, "parameters")) for tool in tools], "; ", several)
