"""Functions that a model may call: what a request says of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import openai_fields as fields
from .openai_errors import invalid
from .tool_calls import Tool

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class ToolUse:
    """The functions of a request.

    definitions  as the chat template gets them
    forced       those of which the answer must call one; empty: it may call any of them, or none
    several      it may call more than one
    """

    definitions: tuple[dict[str, Any], ...]
    tools: tuple[Tool, ...]
    forced: tuple[Tool, ...] = ()
    several: bool = True


def tool_use(body: Mapping[str, Any]) -> ToolUse | None:
    """Of a chat's body; None if there is nothing to call. Raises ApiError."""
    given = definitions(body.get("tools", []))
    tools = tuple(Tool(each["function"]["name"], each["function"]["parameters"]) for each in given)
    forced = _forced(body.get("tool_choice", "auto"), tools)
    if forced is None or not tools:
        return None
    if "structured_outputs" in body:
        raise invalid("structured_outputs", "structured_outputs: not together with tools; a response_format can be")
    return ToolUse(tuple(given), tools, forced, body.get("parallel_tool_calls", True))


def definitions(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Checked and complete, as chat templates expect them. Raises ApiError."""
    given = [_definition(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    names: set[str] = set()
    for index, each in enumerate(given):
        name = each["function"]["name"]
        if name in names:
            raise invalid(f"tools[{index}].function.name", f"tools[{index}].function.name: {name!r} is that of another "
                                                           "function too")
        names.add(name)
    return given


def _definition(where: str, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise invalid(f"{where}.type", f"{where}.type is {str(tool.get('type'))[:40]!r}; expected function")
    where = f"{where}.function"
    function = {name: value for name, value in fields.mapping(where, tool.get("function")).items() if value is not None}
    _check_name(f"{where}.name", function.get("name"))
    if "description" in function:
        fields.text(f"{where}.description", function["description"])
    fields.boolean(f"{where}.strict", function.pop("strict", False))
    parameters = fields.mapping(f"{where}.parameters", function.get("parameters", {"additionalProperties": False}))
    if parameters.get("type", "object") != "object":
        raise invalid(f"{where}.parameters.type", f"{where}.parameters.type is {str(parameters['type'])[:40]!r}; "
                                                  "expected object")
    fields.mapping(f"{where}.parameters.properties", parameters.get("properties", {}))
    function["parameters"] = {"type": "object", "properties": {}, **parameters}
    return {"type": "function", "function": function}


def _check_name(where: str, name: Any) -> None:
    if not _NAME.fullmatch(fields.text(where, name)):
        raise invalid(where, f"{where} is {name[:80]!r}; expected 1 to 64 letters, digits, underscores, hyphens, dots")


def _forced(choice: Any, tools: tuple[Tool, ...]) -> tuple[Tool, ...] | None:
    """Which functions must be called; None: none may be."""
    if choice in ("none", "auto"):
        return None if choice == "none" else ()
    if type(choice) is not str and fields.mapping("tool_choice", choice).get("type") != "function":
        raise invalid("tool_choice.type", f"tool_choice.type is {str(choice.get('type'))[:40]!r}; expected function")
    if type(choice) is str and choice != "required":
        raise invalid("tool_choice", f"tool_choice is {choice[:40]!r}; expected none, auto, required or a function")
    if not tools:
        raise invalid("tool_choice", "tool_choice: asks for a call, but there are no tools")
    if choice == "required":
        return tools
    function = fields.mapping("tool_choice.function", choice.get("function"))
    name = fields.text("tool_choice.function.name", function.get("name"))
    named = tuple(tool for tool in tools if tool.name == name)
    if not named:
        raise invalid("tool_choice.function.name", f"tool_choice.function.name: {name[:80]!r} is none of the tools: "
                                                   f"{', '.join(tool.name for tool in tools)[:200]}")
    return named
