"""Text to token ids and back, from the members of an engine: without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .engine_file import EngineFile
from .engine_format import EngineFormatError

if TYPE_CHECKING:
    from .chat_template import ChatTemplate, Message

FOLDER = "tokenizer/"
TOKENIZER, CHAT_TEMPLATE, CONFIG = (FOLDER + name for name in ("tokenizer.json", "chat_template.jinja", "config.json"))


class Tokenizer:
    """The tokenizer of an engine.

    stop_token_ids  the tokens that the model ends its answers with
    """

    def __init__(self, tokenizer_json: bytes, config: Mapping[str, Any], chat_template: str | None = None) -> None:
        """Raises EngineFormatError if tokenizer_json is none."""
        import tokenizers  # here, because an engine can be inspected and verified without it

        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # the package raises nothing more specific
            raise EngineFormatError(f"{TOKENIZER}: {error}") from None
        # Settings of training that some checkpoints leave in the file.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._chat_template = chat_template
        self._special_tokens = dict(config.get("special_tokens", {}))

    @classmethod
    def of(cls, engine: EngineFile) -> Tokenizer | None:
        """The tokenizer of an engine; None if it has none and takes token ids only."""
        if TOKENIZER not in engine.members:
            return None
        template = engine.read(CHAT_TEMPLATE).decode() if CHAT_TEMPLATE in engine.members else None
        return cls(engine.read(TOKENIZER), read_config(engine), template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids, by default with those that the model wants around a text, such as BOS."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @cached_property
    def _template(self) -> ChatTemplate:
        from .chat_template import ChatTemplate  # jinja2 is loaded for the first chat, not for plain prompts

        assert self._chat_template is not None, "has_chat_template first"
        return ChatTemplate(self._chat_template, self._special_tokens)

    def chat(self, messages: Sequence[Message], **variables: Any) -> str:
        """The text that the model's template makes of a chat, special tokens included. Raises ChatTemplateError."""
        return self._template.render(messages, **variables)


def read_config(engine: EngineFile) -> dict[str, Any]:
    """tokenizer/config.json: bos_token_id, eos_token_ids, special_tokens, generation; empty if there is none."""
    if CONFIG not in engine.members:
        return {}
    config: dict[str, Any] = json.loads(engine.read(CONFIG))
    return config


class TextStream:
    """Turns the tokens of an answer into text as they come, and never gives out half a character.

    A character can take several tokens, and how a token is written can depend on the one before it. So the last few
    tokens are decoded again with each new one, and what has been added is given out once it ends in a whole character.
    """

    # Tokens of the prompt that may matter to how the first token of the answer is written: a blank before it or not.
    _CONTEXT = 6

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt[-self._CONTEXT :])
        self._num_given = len(self._window)  # tokens of the window whose text has been given out, or is the prompt's

    def add(self, token: int) -> str:
        """The text that can be given out with this token; empty while a character is incomplete."""
        self._window.append(token)
        return self._text(hold_incomplete=True)

    def end(self) -> str:
        """What is still held back, when no token follows."""
        return self._text(hold_incomplete=False)

    def _text(self, hold_incomplete: bool) -> str:
        given = self._tokenizer.decode(self._window[: self._num_given])
        text = self._tokenizer.decode(self._window)
        if len(text) <= len(given) or (hold_incomplete and text.endswith("\N{REPLACEMENT CHARACTER}")):
            return ""
        self._window = self._window[self._num_given :]
        self._num_given = len(self._window)
        return text[len(given) :]
