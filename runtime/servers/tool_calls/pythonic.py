"""[name(key=value, …), …]: calls as Python writes them, the whole answer a list of them (Llama 4, and others)."""

from __future__ import annotations

import ast
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from . import json_scan
from .form import Form
from .grammar import Grammar
from .parser import Parser, Steps
from .tool import Tool

MARKER, END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_CLOSING = {"(": ")", "[": "]", "{": "}"}
# Python itself reads no more than 200.
_MOST_NESTED = 100
_WORDS = {"true": True, "false": False, "null": None}


class PythonicParser(Parser):
    """A list counts at the beginning of the answer, or behind the marker; its calls are told one by one.

    A list of functions that there are: else it may be a text that begins with a bracket.
    """

    def _parse(self) -> Steps:
        at = yield from self._past_blanks(0)
        if self._text[at : at + 1] == "[":
            yield from self._calls(at + 1)
        while (marker := (yield from self._content_until(MARKER))) is not None:
            at = yield from self._past_blanks(len(marker))
            if self._text[at : at + 1] == "[":
                yield from self._calls(at + 1)
            else:
                self._no_call(len(marker))

    def _calls(self, at: int) -> Generator[None, None, None]:
        if_none = at
        while (end := (yield from self._call((yield from self._past_blanks(at))))) is not None:
            self._drop(end)
            at = yield from self._past_blanks(0)
            if self._text[at : at + 1] != ",":
                break
            at = if_none = at + 1
        else:
            self._no_call(if_none)
            return
        if self._text[at : at + 1] == "]":
            self._drop(at + 1)
        at = yield from self._past_blanks(0)
        if (yield from self._follows(at, END)):
            self._drop(at + len(END))

    def _call(self, at: int) -> Generator[None, None, int | None]:
        """The place behind a call; None: it is none."""
        while (found := _NAME.match(self._text, at)) is None or found.end() == len(self._text):
            if self._ended or (found is None and at < len(self._text)):
                return None
            yield
        name, begin = found.group(), found.end()
        if name not in self._tools or self._text[begin] != "(":
            return None
        brackets = _Brackets(begin)
        while brackets.end is None:
            brackets.advance(self._text)
            if brackets.is_broken or (brackets.end is None and self._ended):
                return None
            if brackets.end is None:
                yield
        arguments = _arguments(self._text[begin : brackets.end])
        if arguments is None:
            return None
        self._begin(name)
        self._arguments(arguments)
        return brackets.end


class _Brackets:
    """Looks for the end of an expression in brackets."""

    def __init__(self, begin: int) -> None:
        self.end: int | None = None
        self.is_broken = False
        self._at = begin
        self._closing: list[str] = []
        self._quote = ""

    def advance(self, text: str) -> None:
        while self._at < len(text) and self.end is None and not self.is_broken:
            char = text[self._at]
            if self._quote and char == "\\":
                if self._at + 1 == len(text):
                    return
                self._at += 1
            elif self._quote:
                self._quote = "" if char == self._quote else self._quote
                self.is_broken = char == "\n"
            elif char in "\"'":
                self._quote = char
            elif char in _CLOSING:
                self._closing.append(_CLOSING[char])
                self.is_broken = len(self._closing) > _MOST_NESTED
            elif char in ")]}":
                self.is_broken = self._closing.pop() != char
                if not self._closing:
                    self.end = self._at + 1
            self._at += 1


def _arguments(text: str) -> str | None:
    """The arguments of "(key=value, …)" as JSON; None where they are not named, or no JSON."""
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {keyword.arg: _value(keyword.value) for keyword in call.keywords}
        if None in values or len(values) < len(call.keywords):
            return None
        return json_scan.dump(values)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Any:
    """As ast.literal_eval, but with JSON's words too. Raises ValueError."""
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else ast.literal_eval(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("keys are no strings")
        return dict(zip(keys, map(_value, node.values), strict=True))
    return ast.literal_eval(node)


class Pythonic(Form):
    name = "pythonic"
    markers = (MARKER, END)

    def parser(self, tools: Mapping[str, Tool]) -> Parser:
        return PythonicParser(tools)

    def calls(self, grammar: Grammar, tools: Sequence[Tool], several: bool) -> str:
        calls = grammar.calls([" ".join([grammar.literal(f"{tool.name}("), _keywords(grammar, tool),
                                         grammar.literal(")")]) for tool in tools], ", ", several)
        return " ".join([grammar.literal("["), calls, grammar.literal("]")])


def _keywords(grammar: Grammar, tool: Tool) -> str:
    return grammar.listed([
        (grammar.rule(f"{grammar.literal(f'{key}=')} {grammar.json(tool.property_schema(key))}"), key in tool.required)
        for key in tool.properties], grammar.literal(", "))
