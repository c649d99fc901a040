"""An answer that may hold calls, in OpenAI's form: as a message, and as the deltas of a stream."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from .tool_calls import ArgumentsPiece, CallBegin, CallBroken, Content, Event, Parser


class ToolAnswer:
    """One answer while it comes in.

    hidden   what of its text nobody asked to see: special tokens, which came along with the markers of calls
    several  False: calls behind the first one are left out
    """

    def __init__(self, parser: Parser, new_id: Callable[[], str], hidden: re.Pattern[str] | None,
                 several: bool) -> None:
        self._parser = parser
        self._new_id = new_id
        self._hidden = hidden
        self._several = several
        self._content: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._arguments: dict[int, list[str]] = {}

    def add(self, text: str, is_last: bool) -> list[dict[str, Any]]:
        """The deltas that the next piece of text makes."""
        if self._hidden is not None:
            text = self._hidden.sub("", text)
        events = self._parser.feed(text) if text else []
        if is_last:
            events += self._parser.finish()
        return [delta for event in events if (delta := self._delta(event)) is not None]

    def _delta(self, event: Event) -> dict[str, Any] | None:
        match event:
            case Content(text):
                self._content.append(text)
                return {"content": text}
            case CallBegin(index, name) if self._several or not self._calls:
                call = {"id": self._new_id(), "type": "function", "function": {"name": name, "arguments": ""}}
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
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": "".join(self._arguments[index])}}
                for index, call in self._calls.items()]
        return message

    def finish_reason(self, reason: str | None) -> str | None:
        """reason: why the engine ended the answer."""
        return "tool_calls" if reason == "stop" and self._calls else reason
