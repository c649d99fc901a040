"""Grammars in the language of llguidance, which is that of Lark with JSON schemas and special tokens in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .tool import Tool

# The one way in which models are shown JSON; were blanks free, some would write them without end.
_AS_TAUGHT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_TEXT = "/(.|\\n)*/"
# Of a function that says nothing of its arguments.
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class Grammar:
    """Collects rules. special_token: the id of a text that the tokenizer has as a special token, else None."""

    def __init__(self, special_token: Callable[[str], int | None]) -> None:
        self._special_token = special_token
        self._rules: list[str] = []

    def literal(self, text: str) -> str:
        """This very text."""
        return json.dumps(text, ensure_ascii=False)

    def marker(self, text: str) -> str:
        """This text, or the special token that stands for it: a special token is no text to a guide."""
        token = self._special_token(text)
        return self.literal(text) if token is None else f"<[{token}]>"

    def json(self, schema: Mapping[str, Any]) -> str:
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': _AS_TAUGHT})}")

    def arguments(self, tool: Tool) -> str:
        return self.json(tool.parameters or _NO_ARGUMENTS)

    def text_and(self, suffix: str) -> str:
        """Any text and what ends it: a text, or the special token that stands for it."""
        if self._special_token(suffix) is not None:
            return self.rule(f"{self.rule(_ANY_TEXT)} {self.marker(suffix)}")
        return self.rule(_ANY_TEXT, f"[suffix={self.literal(suffix)}]")

    def rule(self, body: str, options: str = "") -> str:
        """The name of a new rule."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def one_of(self, bodies: Sequence[str]) -> str:
        return self.rule(" | ".join(bodies))

    def calls(self, bodies: Sequence[str], separator: str, several: bool) -> str:
        """One of these, or several with this text between them."""
        item = self.one_of(bodies)
        return self.rule(f"{item} ({self.literal(separator)} {item})*") if several else item

    def listed(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """(rule, whether it must come) in their order, separated; possibly none of them."""
        rest, first = self.rule('""'), self.rule('""')
        for item, must_come in reversed(items):
            first = self.rule(f"{item} {rest}" if must_come else f"{item} {rest} | {first}")
            rest = self.rule(f"{separator} {item} {rest}" if must_come else f"({separator} {item})? {rest}")
        return first

    def text(self, start: str) -> str:
        """The whole grammar, of an answer that looks like `start`."""
        return "\n".join([f"start: {start}", *self._rules]) + "\n"
