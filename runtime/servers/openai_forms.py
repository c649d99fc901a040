"""What an engine's model makes of a chat: how it is shown functions, how it writes calls and thoughts."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ..chat_template import ChatTemplateError
from ..sampling import Guide
from .openai_chat_answer import CallReader, ChatAnswer
from .openai_errors import invalid
from .thoughts import BEGIN as THINK
from .thoughts import END as THINK_END
from .thoughts import Thoughts
from .tool_calls import Form, Grammar, UnknownFormat, choose

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer
    from .context import ServerSettings
    from .openai_request import Call
    from .openai_tools import ToolUse
    from .served import ServedEngine

# Of a prompt, to see whether it ends within the model's thoughts.
_PROMPT_END = 16
_JSON = ("json_schema", "json_object")


class ChatForms:
    """Of all engines of a server, each looked at once."""

    def __init__(self, settings: ServerSettings) -> None:
        self._parser_name = settings.tool_call_parser
        self._tells_thoughts = settings.reasoning_parser is not None
        self._special: WeakKeyDictionary[ServedEngine, Mapping[str, int]] = WeakKeyDictionary()
        self._tools: WeakKeyDictionary[ServedEngine, ToolForm] = WeakKeyDictionary()

    async def tools(self, engine: ServedEngine) -> ToolForm:
        """Raises ApiError if the engine's model is not shown functions, or its format is not known."""
        if engine not in self._tools:
            special = await self._special_tokens(engine)
            self._tools[engine] = await asyncio.to_thread(_tool_form, engine.tokenizer, self._parser_name, special)
        return self._tools[engine]

    async def _special_tokens(self, engine: ServedEngine) -> Mapping[str, int]:
        if engine not in self._special:
            # The tokenizer may have to be read, the first time.
            self._special[engine] = {} if engine.tokenizer is None else \
                await asyncio.to_thread(engine.tokenizer.special_tokens)
        return self._special[engine]

    async def read(self, engine: ServedEngine, call: Call, form: ToolForm | None, prompt: Sequence[int]) -> Call:
        """The call with what reads its answers, and with the guide of calls that are forced. form: of its tools."""
        if form is None and not self._tells_thoughts:
            return call
        assert engine.tokenizer is not None, "a chat has a template"
        end = engine.tokenizer.decode(prompt[-_PROMPT_END:], skip_special_tokens=False).rstrip()
        params, tools, special = call.params, call.tools, await self._special_tokens(engine)
        markers = {THINK, THINK_END} if self._tells_thoughts else set()
        if form is not None:
            markers |= set(form.form.markers)
        hidden = None
        if params.skip_special_tokens and markers & set(special):
            others = sorted(set(special) - markers, key=len, reverse=True)
            hidden = re.compile("|".join(map(re.escape, others))) if others else None
            params = replace(params, skip_special_tokens=False)
        tells_thoughts = self._tells_thoughts
        if form is not None and tools is not None:
            params = replace(params, guide=form.guide(params.guide, tools, end))
        elif params.guide is not None and params.guide.kind in _JSON:
            grammar = Grammar(special.get)
            thinks = THINK in (engine.tokenizer.chat_template or "")
            params = replace(params, guide=_behind_thoughts(grammar, _json(grammar, params.guide), thinks, end))
        elif params.guide is not None:
            tells_thoughts = False  # it binds the answer from its first token on

        def new_answer() -> ChatAnswer:
            thoughts = Thoughts(begun=end.endswith(THINK)) if tells_thoughts else None
            return ChatAnswer(thoughts, None if form is None or tools is None else form.reader(tools), hidden)

        return replace(call, params=params, new_answer=new_answer)


def _tool_form(tokenizer: Tokenizer | None, name: str | None, special: Mapping[str, int]) -> ToolForm:
    template = check_template(tokenizer)
    try:
        form = choose(template, name)
    except UnknownFormat as error:
        raise invalid("tools", f"tools: how this model writes calls is not known: {error}. If it is one of them, serve "
                               "it with --tool-call-parser", "unsupported_parameter") from None
    return ToolForm(form, special, THINK in template)


def check_template(tokenizer: Tokenizer | None) -> str:
    """The chat template's source. Raises ApiError if it does not show functions to the model."""
    if tokenizer is None or tokenizer.chat_template is None:
        raise invalid("tools", "tools: this engine has no chat template", "no_chat_template")
    try:
        uses_tools = tokenizer.template_uses("tools")
    except ChatTemplateError as error:
        raise invalid("messages", f"messages: {error}") from None
    if not uses_tools:
        raise invalid("tools", "tools: this engine's chat template does not use the variable tools, so that the model "
                               "would not see them; describe them in a message", "unsupported_parameter")
    return tokenizer.chat_template


@dataclass(frozen=True)
class ToolForm:
    """A format in the tokens of an engine. special: its special tokens. thinks: the model may think aloud first."""

    form: Form
    special: Mapping[str, int]
    thinks: bool

    def reader(self, use: ToolUse) -> CallReader:
        return CallReader(self.form.parser({tool.name: tool for tool in use.tools}), self.form.new_id, use.several)

    def guide(self, content: Guide | None, use: ToolUse, prompt_end: str) -> Guide | None:
        """What binds an answer to be calls where they are forced. content: what one looks like that calls nothing."""
        if not use.forced and content is None:
            return None
        grammar = Grammar(self.special.get)
        start = self.form.calls(grammar, use.forced or use.tools, use.several)
        if not use.forced and content is not None:
            start = grammar.one_of([start, _json(grammar, content)])
        return _behind_thoughts(grammar, start, self.thinks, prompt_end)


def _json(grammar: Grammar, guide: Guide) -> str:
    return grammar.json(json.loads(guide.text) if guide.kind == "json_schema" else {"type": "object"})


def _behind_thoughts(grammar: Grammar, start: str, thinks: bool, prompt_end: str) -> Guide:
    """An answer like `start`: behind the end of thoughts that the prompt has begun, or behind thoughts, if any come."""
    thoughts = grammar.rule(f"{grammar.text_and(THINK_END)} /[ \\n]*/")
    if prompt_end.endswith(THINK):
        start = f"{thoughts} {start}"
    elif thinks and not prompt_end.endswith(THINK_END):
        start = f"({grammar.marker(THINK)} {thoughts})? {grammar.rule(start)}"
    return Guide("grammar", grammar.text(grammar.rule(start)))
