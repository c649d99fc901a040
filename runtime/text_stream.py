"""Turns the tokens of an answer into text as they come, and never gives out half a character.

For most vocabularies the text of an answer is the texts of its tokens one behind the other, where a token may hold part
of a character's bytes. They need a look-up a token. For all others the last few tokens are decoded again with each new
one, which is right for any tokenizer.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .byte_alphabet import BYTES

if TYPE_CHECKING:
    import tokenizers

    from .vocabulary import Vocabulary

# Tokens of the prompt that may matter to how the first token of the answer is written: a blank before it or not.
_CONTEXT = 6
_Utf8 = codecs.getincrementaldecoder("utf-8")


class TextStream(Protocol):
    def add(self, token: int) -> str:
        """The text that can be given out with this token; empty while a character is incomplete."""

    def end(self) -> str:
        """What is still held back, when no token follows."""


class TokenTexts(dict[int, str | bytes]):
    """Token id -> what it adds to a text: whole characters, or bytes that are no whole characters by themselves.

    Filled as tokens come up. blanks: how many leading blanks a text loses at its very beginning.
    """

    def __init__(self, name: Callable[[int], str | None], decoder: _PerToken, skipped: frozenset[int]) -> None:
        """name: of a token in the vocabulary; skipped: tokens that add nothing."""
        super().__init__()
        self.blanks = decoder.blanks
        self._name = name
        self._bytes = decoder.token_bytes
        self._skipped = skipped

    def __missing__(self, token: int) -> str | bytes:
        name = None if token in self._skipped else self._name(token)
        data = b"" if name is None else self._bytes(name)
        try:
            entry: str | bytes = data.decode()
        except UnicodeDecodeError:
            entry = data
        self[token] = entry
        return entry


class TableStream:
    """A TextStream over TokenTexts."""

    __slots__ = ("_blanks", "_is_plain", "_texts", "_utf8")

    def __init__(self, texts: TokenTexts, prompt: Sequence[int]) -> None:
        self._texts = texts
        # Behind a prompt that ends in text the answer is no beginning.
        self._blanks = 0 if any(texts[token] for token in prompt[-_CONTEXT:]) else texts.blanks
        self._utf8: codecs.IncrementalDecoder | None = None  # made when a character comes in parts
        self._is_plain = not self._blanks

    def add(self, token: int) -> str:
        entry = self._texts[token]
        if self._is_plain and type(entry) is str:
            return entry
        return self._text(entry)

    def _text(self, entry: str | bytes) -> str:
        if not entry:  # a special token, even between the bytes of a character
            return ""
        if self._utf8 is None:
            self._utf8 = _Utf8("replace")
        text = self._utf8.decode(entry.encode() if isinstance(entry, str) else entry)
        if self._blanks and text:
            text = text[min(self._blanks, len(text) - len(text.lstrip(" "))) :]
            self._blanks = 0
        self._is_plain = not self._blanks and not self._utf8.getstate()[0]
        return text

    def end(self) -> str:
        return "" if self._utf8 is None else self._utf8.decode(b"", final=True)


class WindowStream:
    """A TextStream for any tokenizer. decode: token ids to text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._window = list(prompt[-_CONTEXT:])
        self._num_given = len(self._window)  # tokens of the window whose text has been given out, or is the prompt's

    def add(self, token: int) -> str:
        self._window.append(token)
        return self._text(hold_incomplete=True)

    def end(self) -> str:
        return self._text(hold_incomplete=False)

    def _text(self, hold_incomplete: bool) -> str:
        given = self._decode(self._window[: self._num_given])
        text = self._decode(self._window)
        if len(text) <= len(given) or (hold_incomplete and text.endswith("\N{REPLACEMENT CHARACTER}")):
            return ""
        self._window = self._window[self._num_given :]
        self._num_given = len(self._window)
        return text[len(given) :]


class _PerToken:
    """A decoder that writes each token by itself.

    token_bytes  name of a token in the vocabulary -> what it writes, in UTF-8
    blanks       leading blanks that the whole text loses
    """

    def __init__(self, token_bytes: Callable[[str], bytes], blanks: int = 0) -> None:
        self.token_bytes = token_bytes
        self.blanks = blanks


def token_texts(tokenizer: tokenizers.Tokenizer, skip_special_tokens: bool) -> TokenTexts | None:
    """The table of a tokenizer; None if its decoder writes a token in more than one way."""
    decoder = _decoder_of(tokenizer)
    if decoder is None:
        return None
    skipped = special_tokens(tokenizer) if skip_special_tokens else frozenset()
    return TokenTexts(tokenizer.id_to_token, decoder, skipped)


def texts_of_vocabulary(vocabulary: Vocabulary, skip_special_tokens: bool) -> TokenTexts | None:
    """The table of the tokenizer that `vocabulary` was made of. Raises KeyError or TypeError for what is none."""
    decoder = _per_token(vocabulary.decoder)
    skipped = vocabulary.special if skip_special_tokens else frozenset[int]()
    return None if decoder is None else TokenTexts(vocabulary.name, decoder, skipped)


def has_table(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether its decoder writes a token always in the same way."""
    return _decoder_of(tokenizer) is not None


def _decoder_of(tokenizer: tokenizers.Tokenizer) -> _PerToken | None:
    return None if tokenizer.decoder is None else _per_token(json.loads(tokenizer.decoder.__getstate__()))


def special_tokens(tokenizer: tokenizers.Tokenizer) -> frozenset[int]:
    return frozenset(token for token, entry in tokenizer.get_added_tokens_decoder().items() if entry.special)


def _per_token(spec: dict[str, Any]) -> _PerToken | None:
    """spec: a decoder as it stands in tokenizer.json."""
    if spec["type"] == "ByteLevel":
        return _PerToken(_byte_level)
    if spec["type"] != "Sequence":
        return None
    # Replacements, bytes by name, all joined, and leading blanks dropped: the form that sentencepiece models have.
    replacements: list[tuple[str, str]] = []
    has_bytes, is_joined, blanks = False, False, 0
    for item in spec["decoders"]:
        match item:
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if not (has_bytes or is_joined):
                replacements.append((old, new))
            case {"type": "ByteFallback"} if not is_joined:
                has_bytes = True
            case {"type": "Fuse"}:
                is_joined = True
            case {"type": "Strip", "content": " ", "start": start, "stop": 0} if is_joined:
                blanks += start
            case _:
                return None
    return _PerToken(_Named(replacements, has_bytes), blanks) if is_joined else None


class _Named:
    def __init__(self, replacements: list[tuple[str, str]], has_bytes: bool) -> None:
        self._replacements = replacements
        self._has_bytes = has_bytes

    def __call__(self, name: str) -> bytes:
        for old, new in self._replacements:
            name = name.replace(old, new)
        if self._has_bytes and len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            try:
                return bytes((int(name[3:5], 16),))
            except ValueError:  # <0xyz>: a word like any other
                pass
        return name.encode()


def _byte_level(name: str) -> bytes:
    try:
        return bytes([BYTES[char] for char in name])
    except KeyError:  # an added token, written as it is
        return name.encode()
