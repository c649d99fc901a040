"""<tool_call><function=name><parameter=key>value</parameter></function></tool_call>: Qwen3-Coder.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Values are texts; what they stand for is said by the function's schema.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from . import json_scan
from .form import Form
from .grammar import Grammar
from .parser import Parser, Steps
from .tool import Tool

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"


class QwenCoderParser(Parser):
    """Calls are told parameter by parameter. Some models leave out <tool_call>."""

    def _parse(self) -> Steps:
        while (marker := (yield from self._content_until(BEGIN, FUNCTION))) is not None:
            at = 0 if marker == FUNCTION else (yield from self._past_blanks(len(marker)))
            end = None
            if (yield from self._follows(at, FUNCTION)):
                end = yield from self._call(at + len(FUNCTION))
            if end is None:
                self._no_call(len(marker))
                continue
            self._drop(end)
            at = yield from self._past_blanks(0)
            if (yield from self._follows(at, END)):
                self._drop(at + len(END))

    def _call(self, at: int) -> Generator[None, None, int | None]:
        """The place behind a call, from its name on; None: it is none."""
        name, at = yield from self._name(at)
        if name is None:
            return None
        self._begin(name)
        keys: set[str] = set()
        while True:
            at = yield from self._past_blanks(at)
            tag = yield from self._follows(at, PARAMETER, FUNCTION_END)
            if tag == FUNCTION_END:
                self._arguments("}" if keys else "{}")
                return at + len(FUNCTION_END)
            end, key = None, None
            if tag is not None:
                key, at = yield from self._name(at + len(tag))
                end = yield from self._place_of(PARAMETER_END, at)
            if end is None or key is None or key in keys:
                self._take_back()
                return None
            value = _value(self._text[at:end], _schema(self._tools.get(name), key))
            self._arguments(("{" if not keys else ", ") + f"{json_scan.dump(key)}: {json_scan.dump(value)}")
            keys.add(key)
            at = end + len(PARAMETER_END)

    def _name(self, at: int) -> Generator[None, None, tuple[str | None, int]]:
        """What stands before the next ">", and the place behind it; None: no name."""
        end = yield from self._place_of(">", at)
        name = "" if end is None else self._text[at:end].strip()
        if end is None or not name or not name.isprintable() or "<" in name:
            return None, at
        return name, end + 1

    def _place_of(self, marker: str, at: int) -> Generator[None, None, int | None]:
        begin = at
        while (place := self._text.find(marker, begin)) < 0:
            if self._ended:
                return None
            begin = max(at, len(self._text) - len(marker) + 1)
            yield
        return place


def _schema(tool: Tool | None, key: str) -> Mapping[str, Any]:
    return tool.property_schema(key) if tool is not None and key in tool.properties else {}


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    """What the text of a parameter stands for: itself where it may be a string, else JSON; itself where it is none."""
    text = text.removeprefix("\n").removesuffix("\n")
    kinds = _kinds(schema)
    word = text.strip()
    if not kinds or "string" in kinds:
        return None if "null" in kinds and word in ("null", "None") else text
    try:
        return json_scan.parse({"True": "true", "False": "false", "None": "null"}.get(word, word))
    except ValueError:
        return text


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema allows, as far as it says so."""
    kind = schema.get("type")
    kinds = {kind} if isinstance(kind, str) else {each for each in kind if isinstance(each, str)} \
        if isinstance(kind, list) else set()
    for choice in ("anyOf", "oneOf"):
        for each in schema[choice] if isinstance(schema.get(choice), list) else ():
            kinds |= _kinds(each) if isinstance(each, dict) else set()
    if isinstance(schema.get("enum"), list):
        kinds |= {"string" for each in schema["enum"] if isinstance(each, str)}
    return kinds


class QwenCoder(Form):
    name = "qwen3_coder"
    markers = (BEGIN, END)

    def parser(self, tools: Mapping[str, Tool]) -> Parser:
        return QwenCoderParser(tools)

    def calls(self, grammar: Grammar, tools: Sequence[Tool], several: bool) -> str:
        begin, end = grammar.marker(BEGIN), grammar.marker(END)
        return grammar.calls([f"{begin} {_grammar(grammar, tool)} {end}" for tool in tools], "\n", several)


def _grammar(grammar: Grammar, tool: Tool) -> str:
    parameters = [(_parameter_grammar(grammar, key, tool.property_schema(key)), key in tool.required)
                  for key in tool.properties]
    return " ".join([grammar.literal(f"\n{FUNCTION}{tool.name}>\n"), grammar.listed(parameters, '""'),
                     grammar.literal(f"{FUNCTION_END}\n")])


def _parameter_grammar(grammar: Grammar, key: str, schema: Mapping[str, Any]) -> str:
    head, tail = f"{PARAMETER}{key}>\n", f"\n{PARAMETER_END}\n"
    kinds, choices = _kinds(schema), schema.get("enum")
    if not kinds or "string" in kinds:
        if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
            value = grammar.one_of([grammar.literal(f"{choice}{tail}") for choice in choices])
        else:
            value = grammar.text_and(tail)
        return grammar.rule(f"{grammar.literal(head)} {value}")
    return grammar.rule(f"{grammar.literal(head)} {grammar.json(json.loads(json.dumps(schema)))} "
                        f"{grammar.literal(tail)}")
