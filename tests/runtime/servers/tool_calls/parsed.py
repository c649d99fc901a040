"""Answers as parsers see them, in pieces, and what becomes of them."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ingot.runtime.servers.tool_calls import ArgumentsPiece, CallBegin, CallBroken, Content, Event, Form, Tool

TOOLS = {tool.name: tool for tool in (
    Tool("weather", {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "at": {"type": ["string", "null"]},
        "where": {"$ref": "#/$defs/place"}}, "required": ["city"], "additionalProperties": False,
        "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}}}}),
    Tool("now"))}


def events(form: Form, pieces: Iterable[str]) -> list[Event]:
    """Of an answer that comes in these pieces; pieces of content and of arguments that follow on each other are one."""
    parser = form.parser(TOOLS)
    found = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    merged: list[Event] = []
    for event in found:
        match merged[-1:], event:
            case [Content(before)], Content(text):
                merged[-1] = Content(before + text)
            case [ArgumentsPiece(index, before)], ArgumentsPiece(same, text) if index == same:
                merged[-1] = ArgumentsPiece(index, before + text)
            case _:
                merged.append(event)
    return merged


@dataclass
class Parsed:
    content: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)


def parsed(form: Form, text: str) -> Parsed:
    """What an answer holds in the end; arguments are valid JSON."""
    content, calls = "", {}
    for event in events(form, [text]):
        match event:
            case Content(piece):
                content += piece
            case CallBegin(index, name):
                calls[index] = (name, "")
            case ArgumentsPiece(index, piece):
                calls[index] = (calls[index][0], calls[index][1] + piece)
            case CallBroken(index):
                del calls[index]
    return Parsed(content, [(name, json.loads(arguments)) for name, arguments in calls.values()])
