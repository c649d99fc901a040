"""Renders a chat as a model's own template asks: Jinja in a sandbox, in the dialect that checkpoints are written for.

Templates come with models and are not trusted: they run without access to Python's internals, files or network.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import RequestError

Message = Mapping[str, Any]


class ChatTemplateError(RequestError):
    """The template is malformed, or refuses the messages; its own words follow."""


class _GenerationBlock(Extension):
    """{% generation %} … {% endgeneration %} marks an assistant's words, for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Extension)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


class ChatTemplate:
    """A compiled template. `variables` are given to every rendering: bos_token and its like."""

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        """Raises ChatTemplateError with the line if `source` is malformed."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"chat template, line {error.lineno}: {error.message}") from None
        self._variables = dict(variables or {})
        self._environment, self._source = environment, source

    @cached_property
    def names(self) -> frozenset[str]:
        """The variables that the template asks for: messages, tools, …"""
        return frozenset(meta.find_undeclared_variables(self._environment.parse(self._source)))

    def render(self, messages: Sequence[Message], /, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text of a chat; it ends where the answer begins.

        messages   role ("system", "user", "assistant", …) and content of each
        variables  what the template knows beside: tools, documents, enable_thinking, …
        Raises ChatTemplateError.
        """
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or "role" not in message:
                raise ChatTemplateError(f"message {index} is {message!r}; expected a mapping with role and content")
        # As one mapping: clients choose names, such as self.
        values = {"tools": None, "documents": None, **self._variables, **variables,
                  "messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(values)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError,
                RecursionError) as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error}") from None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes HTML, which models have not been trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
