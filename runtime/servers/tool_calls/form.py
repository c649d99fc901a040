"""A format: how a kind of models writes calls."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from .grammar import Grammar
from .parser import Parser
from .tool import Tool


class Form(ABC):
    """name: of the format. markers: texts that begin or part calls, single tokens of most models that write them."""

    name: ClassVar[str]
    markers: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def parser(self, tools: Mapping[str, Tool]) -> Parser:
        """For one answer. tools: by name."""

    @abstractmethod
    def calls(self, grammar: Grammar, tools: Sequence[Tool], several: bool) -> str:
        """What an answer of calls and nothing else looks like: of one of these functions, or several calls."""

    def new_id(self) -> str:
        """An id for a call that this kind of models may be shown again."""
        return f"call_{secrets.token_hex(12)}"
