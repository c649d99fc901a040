"""Text to token ids and back, from the members of an engine: without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from .engine_file import EngineFile
from .engine_format import EngineFormatError
from .text_stream import TableStream, TextStream, TokenTexts, WindowStream, token_texts

if TYPE_CHECKING:
    from .chat_template import ChatTemplate, Message

FOLDER = "tokenizer/"
TOKENIZER, CHAT_TEMPLATE, CONFIG = (FOLDER + name for name in ("tokenizer.json", "chat_template.jinja", "config.json"))

# Normalization shortens a text where it composes characters; no script loses three quarters by it.
_MOST_SHORTENING = 4


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
        self._texts: dict[bool, TokenTexts | None] = {}
        self._special_tokens = dict(config.get("special_tokens", {}))

    @classmethod
    def of(cls, engine: EngineFile) -> Tokenizer | None:
        """The tokenizer of an engine; None if it has none and takes token ids only."""
        if TOKENIZER not in engine.sizes:
            return None
        template = engine.read(CHAT_TEMPLATE).decode() if CHAT_TEMPLATE in engine.sizes else None
        return cls(engine.read(TOKENIZER), read_config(engine), template)

    def to_json(self) -> str:
        """What it was made of, in the format of the package tokenizers."""
        text: str = self._tokenizer.to_str()
        return text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids, by default with those that the model wants around a text, such as BOS."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def surely_exceeds(self, text: str, num_tokens: int) -> bool:
        """Whether a text is too long for so many tokens, told by its length alone: without the work of encoding it."""
        return len(text) > _MOST_SHORTENING * self._longest_token * num_tokens

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def stream(self, prompt: Sequence[int] = (), skip_special_tokens: bool = True) -> TextStream:
        """The text of the tokens that follow on `prompt`, as they come."""
        texts = self._table(skip_special_tokens)
        if texts is not None:
            return TableStream(texts, prompt)
        return WindowStream(partial(self.decode, skip_special_tokens=skip_special_tokens), prompt)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text, special tokens by name, in UTF-8; not always whole characters."""
        texts = self._table(skip_special_tokens=False)
        if texts is not None:
            entry = texts[token_id]
            return entry.encode() if isinstance(entry, str) else entry
        # Decoders may drop the blank before a text's first word, so another token comes before.
        before = self._before
        text = self.decode([*before, token_id], skip_special_tokens=False)
        return text[len(self.decode(before, skip_special_tokens=False)) :].encode()

    @cached_property
    def _before(self) -> list[int]:
        return self.encode("a", add_special_tokens=False)[-1:]

    def _table(self, skip_special_tokens: bool) -> TokenTexts | None:
        if skip_special_tokens not in self._texts:
            self._texts[skip_special_tokens] = token_texts(self._tokenizer, skip_special_tokens)
        return self._texts[skip_special_tokens]

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
    if CONFIG not in engine.sizes:
        return {}
    config: dict[str, Any] = json.loads(engine.read(CONFIG))
    return config
