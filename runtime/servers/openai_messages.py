"""Messages of a chat, as OpenAI's clients send them and chat templates expect them."""

import json
from typing import Any

from . import openai_fields as fields
from .openai_errors import invalid

_NO_CALLS: tuple[str, Any] = ("tool_calls", [])


def chat_message(name: str, message: dict[str, Any]) -> dict[str, Any]:
    """A message as chat templates expect it: content a text, arguments of tool calls objects, no field that is null."""
    role = fields.text(f"{name}.role", message.get("role"))
    # Templates ask whether a field is there; clients that send an answer back send all that it could have had.
    message = {field: value for field, value in message.items() if value is not None and (field, value) != _NO_CALLS}
    # Templates know the older name.
    result = {**message, "role": "system" if role == "developer" else role}
    content = message.get("content")
    if type(content) is list:
        result["content"] = "".join(_part(f"{name}.content[{index}]", part) for index, part in enumerate(content))
    elif content is not None:
        fields.text(f"{name}.content", content)
    elif not message.get("tool_calls"):
        raise invalid(f"{name}.content", f"{name}.content: missing; expected a text", "missing_field")
    else:
        result["content"] = ""
    if message.get("tool_calls"):
        calls = fields.list_of(fields.mapping)(f"{name}.tool_calls", message["tool_calls"])
        result["tool_calls"] = [_tool_call(f"{name}.tool_calls[{index}]", call) for index, call in enumerate(calls)]
    return result


def _part(name: str, part: Any) -> str:
    kind = fields.mapping(name, part).get("type")
    if kind != "text":
        raise invalid(f"{name}.type", f"{name}.type is {str(kind)[:40]!r}; this server takes text only")
    content: str = fields.text(f"{name}.text", part.get("text"))
    return content


def _tool_call(name: str, call: dict[str, Any]) -> dict[str, Any]:
    function = fields.mapping(f"{name}.function", call.get("function"))
    arguments = function.get("arguments")
    if type(arguments) is not str:
        return call
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        raise invalid(f"{name}.function.arguments", f"{name}.function.arguments: not valid JSON") from None
    return {**call, "function": {**function, "arguments": parsed}}
