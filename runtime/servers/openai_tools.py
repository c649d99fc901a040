"""Functions that a model may call: what a request says of them, and what that means for prompt, answer and guide."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ..chat_template import ChatTemplateError
from ..sampling import Guide, SamplingParams
from . import openai_fields as fields
from .openai_errors import invalid
from .openai_tool_answer import ToolAnswer
from .tool_calls import Form, Grammar, Tool, UnknownFormat, choose

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer
    from .served import ServedEngine

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_THINK, _THINK_END = "<think>", "</think>"
# Of a prompt, to see whether it ends within the model's thoughts.
_PROMPT_END = 16


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


class ToolForms:
    """How the models of a server's engines write calls. name: of the format for all of them; None: by the template."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._known: WeakKeyDictionary[ServedEngine, ToolForm] = WeakKeyDictionary()

    async def of(self, engine: ServedEngine) -> ToolForm:
        """Raises ApiError if the engine's model is not shown functions, or its format is not known."""
        if engine not in self._known:
            # What tells it may have to be read, the first time.
            self._known[engine] = await asyncio.to_thread(_tool_form, engine.tokenizer, self._name)
        return self._known[engine]


def _tool_form(tokenizer: Tokenizer | None, name: str | None) -> ToolForm:
    tokenizer = check_template(tokenizer)
    template = tokenizer.chat_template or ""
    try:
        form = choose(template, name)
    except UnknownFormat as error:
        raise invalid("tools", f"tools: how this model writes calls is not known: {error}. If it is one of them, serve "
                               "it with --tool-call-parser", "unsupported_parameter") from None
    return ToolForm(form, tokenizer.special_tokens(), _THINK in template)


def check_template(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer whose chat template shows functions to the model. Raises ApiError if it does not."""
    if tokenizer is None or not tokenizer.has_chat_template:
        raise invalid("tools", "tools: this engine has no chat template", "no_chat_template")
    try:
        uses_tools = tokenizer.template_uses("tools")
    except ChatTemplateError as error:
        raise invalid("messages", f"messages: {error}") from None
    if not uses_tools:
        raise invalid("tools", "tools: this engine's chat template does not use the variable tools, so that the model "
                               "would not see them; describe them in a message", "unsupported_parameter")
    return tokenizer


@dataclass(frozen=True)
class ToolForm:
    """A format in the tokens of an engine. special: its special tokens. thinks: the model may think aloud first."""

    form: Form
    special: Mapping[str, int]
    thinks: bool

    def params(self, params: SamplingParams, use: ToolUse, prompt_end: str) -> SamplingParams:
        """With a guide where calls are forced, and with the markers in the answer's text."""
        shown = params.skip_special_tokens and any(marker in self.special for marker in self.form.markers)
        return replace(params, guide=self._guide(params.guide, use, prompt_end),
                       skip_special_tokens=params.skip_special_tokens and not shown)

    def _guide(self, content: Guide | None, use: ToolUse, prompt_end: str) -> Guide | None:
        """content: what an answer must look like that calls nothing."""
        if not use.forced and content is None:
            return None
        grammar = Grammar(self.special.get)
        start = self.form.calls(grammar, use.forced or use.tools, use.several)
        if not use.forced and content is not None:
            schema = json.loads(content.text) if content.kind == "json_schema" else {"type": "object"}
            start = grammar.one_of([start, grammar.json(schema)])
        if prompt_end.rstrip().endswith(_THINK):
            start = f"{self._thoughts(grammar)} {start}"
        elif self.thinks and not prompt_end.rstrip().endswith(_THINK_END):
            start = f"({grammar.marker(_THINK)} {self._thoughts(grammar)})? {grammar.rule(start)}"
        return Guide("grammar", grammar.text(grammar.rule(start)))

    @staticmethod
    def _thoughts(grammar: Grammar) -> str:
        return grammar.rule(f"{grammar.text_and(_THINK_END)} /[ \\n]*/")

    def answers(self, use: ToolUse, skip_special_tokens: bool) -> Callable[[], ToolAnswer]:
        """Makes what reads an answer. skip_special_tokens: as the request has it."""
        hidden = None
        if skip_special_tokens and any(marker in self.special for marker in self.form.markers):
            others = sorted(set(self.special) - set(self.form.markers), key=len, reverse=True)
            hidden = re.compile("|".join(map(re.escape, others))) if others else None
        tools = {tool.name: tool for tool in use.tools}
        return lambda: ToolAnswer(self.form.parser(tools), self.form.new_id, hidden, use.several)


def prompt_end(tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    return tokenizer.decode(prompt[-_PROMPT_END:], skip_special_tokens=False)
