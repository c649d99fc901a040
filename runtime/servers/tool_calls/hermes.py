"""<tool_call>{"name": …, "arguments": {…}}</tool_call>: Hermes, Qwen 2.5 and 3, and those that learnt from them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from .form import Form
from .grammar import Grammar
from .parser import Parser, Steps
from .tool import Tool

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(Parser):
    def _parse(self) -> Steps:
        while (marker := (yield from self._content_until(BEGIN))) is not None:
            at = yield from self._past_blanks(len(marker))
            end = yield from self._json_call(at, ("arguments", "parameters"))
            if end is None:
                self._no_call(len(marker))
                continue
            self._drop(end)
            at = yield from self._past_blanks(0)
            if (yield from self._follows(at, END)):
                self._drop(at + len(END))


class Hermes(Form):
    name = "hermes"
    markers = (BEGIN, END)

    def parser(self, tools: Mapping[str, Tool]) -> Parser:
        return HermesParser(tools)

    def calls(self, grammar: Grammar, tools: Sequence[Tool], several: bool) -> str:
        begin, end = grammar.marker(BEGIN), grammar.marker(END)
        return grammar.calls([" ".join([begin, *json_call(grammar, tool, "arguments", "\n", "\n"), end])
                              for tool in tools], "\n", several)


def json_call(grammar: Grammar, tool: Tool, key: str, before: str = "", after: str = "") -> list[str]:
    """A call as an object, with blanks as models are shown them."""
    head = f'{before}{{"name": {json.dumps(tool.name)}, "{key}": '
    return [grammar.literal(head), grammar.arguments(tool), grammar.literal("}" + after)]
