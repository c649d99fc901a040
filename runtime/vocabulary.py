"""vocabulary.bin of an engine: the tokens' names, and for most BPE tokenizers what a short text needs of them to be
encoded, found by binary search in the mapped file. Reading a whole tokenizer.json takes from a tenth of a second to
more than one; this takes some milliseconds.

    u32 size of the header; the header, JSON with blanks behind it up to a multiple of 4 bytes:
        decoder   as in tokenizer.json
        special   ids of tokens that are no text
        sizes     of the arrays below, in elements
        encoder   null, or how the part of the tokenizer for a text is made (compiler/vocabulary.py says when it can be)
            frame      tokenizer.json without vocabulary, merges and added tokens
            kept       ids of the vocabulary that any text may need
            added      [id, flags, always]: added tokens by _FLAGS; always: not only where the text has them
            by_bytes   the model reads bytes by their characters; composed: texts not in NFC are left to the whole;
            replaced   [old, new] in the text before the model reads it
    u32 ends[tokens]         of each token's name in `names`, by id; nothing for ids that there are not
    u32 sorted[vocabulary]   ids of the vocabulary by their names in UTF-8
    u32 merge_ends[tokens]   of each token's merges
    u32 ranks[merges]        of a merge among all
    u16 lefts[merges]        bytes of the token's name that the left one of the two has
    u8  names[bytes]         UTF-8

Numbers are little-endian.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from .byte_alphabet import CHARACTERS

ARRAYS: Mapping[str, Literal["I", "H", "B"]] = {
    "ends": "I", "sorted": "I", "merge_ends": "I", "ranks": "I", "lefts": "H", "names": "B"}
FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")
_AFTER = b"\xff"
"""Above every byte of UTF-8."""
_TOKENS_A_CHARACTER = 100
"""Looking a character up takes about as long as reading a hundred tokens of the whole."""


class Vocabulary:
    """The mapped table. decoder, special: see above."""

    def __init__(self, data: bytes | memoryview) -> None:
        """Raises ValueError, KeyError or TypeError for what is no such file."""
        if sys.byteorder != "little":
            raise ValueError("this machine has another byte order")
        view = memoryview(data)
        begin = 4 + int.from_bytes(view[:4], "little")
        if begin > len(view):
            raise ValueError(f"the header has {begin - 4} bytes, the file {len(view)}")
        header: dict[str, Any] = json.loads(bytes(view[4:begin]))
        self.decoder: dict[str, Any] = header["decoder"]
        self.special = frozenset[int](header["special"])
        self._encoder: dict[str, Any] | None = header["encoder"]
        arrays: dict[str, memoryview] = {}
        for name, kind in ARRAYS.items():
            end = begin + header["sizes"][name] * (4 if kind == "I" else 2 if kind == "H" else 1)
            if not begin <= end <= len(view):
                raise ValueError(f"{name} ends at {end} of {len(view)} bytes")
            arrays[name] = view[begin:end].cast(kind)
            begin = end
        if begin != len(view):
            raise ValueError(f"{len(view) - begin} bytes too many")
        self._ends, self._merge_ends = arrays["ends"], arrays["merge_ends"]
        self._sorted, self._names = arrays["sorted"], arrays["names"]
        self._ranks, self._lefts = arrays["ranks"], arrays["lefts"]

    def name(self, token: int) -> str | None:
        """None, or an empty one, if there is no such token."""
        return str(self._name(token), "utf-8") if 0 <= token < len(self._ends) else None

    @property
    def longest_text(self) -> int:
        """Characters, beyond which the whole tokenizer is read sooner than the part is found."""
        return len(self._ends) // _TOKENS_A_CHARACTER

    def part_for(self, text: str) -> str | None:
        """A tokenizer.json that encodes `text` as the whole one does, for it holds all tokens whose names are found in
        the text and all merges that make them. None where that cannot be told.

        Raises IndexError, KeyError, TypeError or ValueError where the file is damaged.
        """
        encoder = self._encoder
        if encoder is None or (encoder["composed"] and not unicodedata.is_normalized("NFC", text)):
            return None
        read = text
        for old, new in encoder["replaced"]:
            read = read.replace(old, new)
        try:
            data = read.encode()
        except UnicodeEncodeError:  # half a surrogate pair: the package has its own words for it
            return None
        added = [[token, flags] for token, flags, always in encoder["added"]
                 if always or (name := self.name(token) or "") in text or name in read]
        model_text = "".join([CHARACTERS[byte] for byte in data]) if encoder["by_bytes"] else read
        tokens = self._occurring(model_text) | set(encoder["kept"])
        frame = encoder["frame"]
        named = {self.name(token) or "": token for token in [*tokens, *(token for token, _ in added)]}
        model = {**frame["model"], "vocab": named, "merges": self._merges(tokens)}
        entries = [{"id": token, "content": self.name(token),
                    **{flag: bool(flags >> bit & 1) for bit, flag in enumerate(FLAGS)}} for token, flags in added]
        return json.dumps({**frame, "added_tokens": entries, "model": model})

    def _name(self, token: int) -> memoryview:
        return self._names[self._ends[token - 1] if token else 0 : self._ends[token]]

    def _occurring(self, text: str) -> set[int]:
        """The tokens of the vocabulary whose names are substrings of `text`."""
        found: set[int] = set()
        names = _Sorted(self)
        ranges: dict[bytes, tuple[int, int]] = {}
        characters = [character.encode() for character in text]
        for begin in range(len(characters)):
            prefix, low, high = b"", 0, len(names)
            for character in characters[begin:]:
                prefix += character
                known = ranges.get(prefix)
                if known is None:
                    low = bisect_left(names, prefix, low, high)
                    high = bisect_left(names, prefix + _AFTER, low, high)
                    ranges[prefix] = low, high
                    if low < high and names[low] == prefix:
                        found.add(self._sorted[low])
                else:
                    low, high = known
                if low == high:
                    break
        return found

    def _merges(self, tokens: set[int]) -> list[tuple[str, str]]:
        """Those that give one of `tokens`, in their order."""
        merges = []
        for token in tokens:
            name = bytes(self._name(token))
            for index in range(self._merge_ends[token - 1] if token else 0, self._merge_ends[token]):
                left = self._lefts[index]
                merges.append((self._ranks[index], (name[:left].decode(), name[left:].decode())))
        return [pair for _, pair in sorted(merges)]


class _Sorted(Sequence[bytes]):
    """The names of the vocabulary in their order."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = vocabulary._sorted
        self._name = vocabulary._name

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: Any) -> Any:
        return bytes(self._name(self._ids[index]))
