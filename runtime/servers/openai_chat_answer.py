"""An answer that may hold thoughts and calls, in OpenAI's form: as a message, and as the deltas of a stream."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .thoughts import Thoughts
from .tool_calls import ArgumentsPiece, CallBegin, CallBroken, Content, Event, Parser


@dataclass
class CallReader:
    """Finds the calls. several: False leaves out those behind the first one."""

    parser: Parser
    new_id: Callable[[], str]
    several: bool


class ChatAnswer:
    """One answer while it comes in.

    thoughts, calls  read it; None: it is not looked for them
    hidden           what of its text nobody asked to see: special tokens, which came along with the markers
    """

    def __init__(self, thoughts: Thoughts | None, calls: CallReader | None, hidden: re.Pattern[str] | None) -> None:
        self._thoughts = thoughts
        self._reader = calls
        self._hidden = hidden
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._arguments: dict[int, list[str]] = {}

    def add(self, text: str, is_last: bool) -> list[dict[str, Any]]:
        """The deltas that the next piece of text makes."""
        if self._hidden is not None:
            text = self._hidden.sub("", text)
        deltas: list[dict[str, Any]] = []
        if self._thoughts is not None:
            thought, text = self._thoughts.split(text, is_last)
            if thought:
                self._reasoning.append(thought)
                deltas.append({"reasoning_content": thought})
        return deltas + [delta for event in self._events(text, is_last) if (delta := self._delta(event)) is not None]

    def _events(self, text: str, is_last: bool) -> list[Event]:
        if self._reader is None:
            return [Content(text)] if text else []
        events = self._reader.parser.feed(text) if text else []
        return events + self._reader.parser.finish() if is_last else events

    def _delta(self, event: Event) -> dict[str, Any] | None:
        match event:
            case Content(text):
                self._content.append(text)
                return {"content": text}
            case CallBegin(index, name) if self._reader is not None and (self._reader.several or not self._calls):
                call = {"id": self._reader.new_id(), "type": "function", "function": {"name": name, "arguments": ""}}
                self._calls[index], self._arguments[index] = call, []
                return {"tool_calls": [{"index": index, **call}]}
            case ArgumentsPiece(index, text) if index in self._calls:
                self._arguments[index].append(text)
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case CallBroken(index):
                self._calls.pop(index, None)  # a stream has told it already; what follows is told as content
        return None

    def message(self) -> dict[str, Any]:
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": "".join(self._arguments[index])}}
                for index, call in self._calls.items()]
        return message

    def finish_reason(self, reason: str | None) -> str | None:
        """reason: why the engine ended the answer."""
        return "tool_calls" if reason == "stop" and self._calls else reason
