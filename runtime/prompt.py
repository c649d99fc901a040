"""From a text or a chat to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .chat_template import Message
    from .tokenizer import Tokenizer


def encode(prompt: str | Sequence[Message], tokenizer: Tokenizer | None, where: str | PathLike[str]) -> list[int]:
    """Token ids, not checked against the vocabulary. where: the engine, for errors.

    Raises PromptError for an engine without a tokenizer or a chat template, and for text that is none in Unicode;
    ChatTemplateError.
    """
    from .executor.request import PromptError  # here, as most of what comes with it is not needed to encode

    if tokenizer is None:
        what = "a text" if isinstance(prompt, str) else "a chat"
        raise PromptError(f"{where} has no tokenizer: the prompt must be token ids, got {what}")
    if isinstance(prompt, str):
        return tokenizer.encode(_checked(prompt))
    if not tokenizer.has_chat_template:
        raise PromptError(f"{where} has no chat template; give it a text instead of messages")
    assert all(isinstance(message, Mapping) for message in prompt[:1])
    # The template writes BOS and its like itself.
    return tokenizer.encode(_checked(tokenizer.chat(prompt)), add_special_tokens=False)


def _checked(text: str) -> str:
    """Raises PromptError for halves of surrogate pairs, as Python makes them of bytes that are no UTF-8."""
    from .executor.request import PromptError

    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"the prompt is no UTF-8 text at character {error.start}: is it a binary file, or in another "
                          "encoding?") from None
    return text
