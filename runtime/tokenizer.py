"""Text to token ids and back, from the members of an engine: without transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from .engine_file import EngineFile
from .engine_format import EngineFormatError
from .text_stream import TableStream, TextStream, TokenTexts, WindowStream, texts_of_vocabulary, token_texts
from .vocabulary import Vocabulary

if TYPE_CHECKING:
    import tokenizers

    from .chat_template import ChatTemplate, Message

FOLDER = "tokenizer/"
TOKENIZER, CHAT_TEMPLATE, CONFIG, VOCABULARY = (
    FOLDER + name for name in ("tokenizer.json", "chat_template.jinja", "config.json", "vocabulary.bin"))

# So many short texts are encoded by the part of the tokenizer that they need, before all of it is read for good.
_TEXTS_IN_PARTS = 8

# Normalization shortens a text where it composes characters; no script loses three quarters by it.
_MOST_SHORTENING = 4


class Tokenizer:
    """The tokenizer of an engine.

    stop_token_ids  the tokens that the model ends its answers with
    """

    def __init__(self, tokenizer_json: bytes | Callable[[], bytes], config: Mapping[str, Any],
                 chat_template: str | None = None, vocabulary: Callable[[], bytes | memoryview] | None = None) -> None:
        """tokenizer_json: if it is a function, it is read when it is first needed; that takes from a tenth of a second
        to more than one. vocabulary: the member of that name, so that short texts and answers need no more.

        Raises EngineFormatError if tokenizer_json is none; where it is read later, then.
        """
        self._source = tokenizer_json
        self._chat_template = chat_template
        self._vocabulary_source = vocabulary
        self._num_in_parts = 0
        self._texts: dict[bool, TokenTexts | None] = {}
        self._special_tokens = dict(config.get("special_tokens", {}))
        if isinstance(tokenizer_json, bytes):
            self._tokenizer  # noqa: B018 (so that errors show now)

    @cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        import tokenizers  # here, because an engine can be inspected and verified without it

        data = self._source if isinstance(self._source, bytes) else self._source()
        self._source = b""
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the package raises nothing more specific
            raise EngineFormatError(f"{TOKENIZER}: {error}") from None
        # Settings of training that some checkpoints leave in the file.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    @classmethod
    def of(cls, engine: EngineFile, when_needed: bool = False) -> Tokenizer | None:
        """The tokenizer of an engine; None if it has none and takes token ids only. when_needed: read no more than
        answers need; the engine must stay open."""
        if TOKENIZER not in engine.sizes:
            return None
        template = engine.read(CHAT_TEMPLATE).decode() if CHAT_TEMPLATE in engine.sizes else None
        vocabulary = partial(engine.read, VOCABULARY) if VOCABULARY in engine.sizes and when_needed else None
        source = partial(engine.read, TOKENIZER) if when_needed else engine.read(TOKENIZER)
        return cls(source, read_config(engine), template, vocabulary)

    def to_json(self) -> str:
        """What it was made of, in the format of the package tokenizers."""
        text: str = self._tokenizer.to_str()
        return text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids, by default with those that the model wants around a text, such as BOS."""
        tokenizer = self._part_for(text) or self._tokenizer
        ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _part_for(self, text: str) -> tokenizers.Tokenizer | None:
        """A tokenizer that serves for this text; None where all of it has been read, or should be."""
        if "_tokenizer" in self.__dict__ or self._num_in_parts >= _TEXTS_IN_PARTS \
                or self._vocabulary is None or len(text) > self._vocabulary.longest_text:
            return None
        import tokenizers

        self._num_in_parts += 1
        try:
            part = self._vocabulary.part_for(text)
            return None if part is None else tokenizers.Tokenizer.from_str(part)
        except Exception as error:  # of the package too, which raises nothing more specific
            raise EngineFormatError(f"{VOCABULARY}: malformed: {error!r}") from None

    @cached_property
    def _vocabulary(self) -> Vocabulary | None:
        if self._vocabulary_source is None:
            return None
        try:
            return Vocabulary(self._vocabulary_source())
        except (ValueError, KeyError, TypeError) as error:
            raise EngineFormatError(f"{VOCABULARY}: malformed: {error!r}") from None

    def surely_exceeds(self, text: str, num_tokens: int) -> bool:
        """Whether a text is too long for so many tokens, told by its length alone: without the work of encoding it."""
        least = _MOST_SHORTENING * num_tokens
        if len(text) <= least:  # no token is shorter than a character: the vocabulary need not be read for it
            return False
        return len(text) > least * self._longest_token

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
            if "_tokenizer" not in self.__dict__ and self._vocabulary is not None:
                texts = self._vocabulary_texts(skip_special_tokens)
            else:
                texts = token_texts(self._tokenizer, skip_special_tokens)
            self._texts[skip_special_tokens] = texts
        return self._texts[skip_special_tokens]

    def _vocabulary_texts(self, skip_special_tokens: bool) -> TokenTexts | None:
        assert self._vocabulary is not None
        try:
            return texts_of_vocabulary(self._vocabulary, skip_special_tokens)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineFormatError(f"{VOCABULARY}: malformed: {error!r}") from None

    def special_tokens(self) -> dict[str, int]:
        """The tokens that `decode` leaves out, by their texts."""
        return {entry.content: token for token, entry in self._tokenizer.get_added_tokens_decoder().items()
                if entry.special}

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def chat_template(self) -> str | None:
        """Its source."""
        return self._chat_template

    def template_uses(self, variable: str) -> bool:
        """Whether the chat template asks for it. Raises ChatTemplateError."""
        return variable in self._template.names

    @cached_property
    def _template(self) -> ChatTemplate:
        from .chat_template import ChatTemplate  # jinja2 is loaded for the first chat, not for plain prompts

        assert self._chat_template is not None, "has_chat_template first"
        return ChatTemplate(self._chat_template, self._special_tokens)

    def chat(self, messages: Sequence[Message], /, **variables: Any) -> str:
        """The text that the model's template makes of a chat, special tokens included. Raises ChatTemplateError."""
        return self._template.render(messages, **variables)


def read_config(engine: EngineFile) -> dict[str, Any]:
    """tokenizer/config.json: bos_token_id, eos_token_ids, special_tokens, generation; empty if there is none."""
    if CONFIG not in engine.sizes:
        return {}
    config: dict[str, Any] = json.loads(engine.read(CONFIG))
    return config
