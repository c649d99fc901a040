"""Writes vocabulary.bin (ingot/runtime/vocabulary.py): names of tokens, and the parts that encode short texts.

A part can be made of a BPE model that reads a text, or its bytes, as they stand. A merge that matters to a text makes a
token whose name is found in it; so do all that lead there, and what remains keeps its order. Pieces of a text between
added tokens, and those that pre-tokenizers cut, are substrings of it; normalizers are taken where that holds for what
they make of it too. What is written is tried on texts first, and left out if one of them comes out otherwise.
"""
from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from ingot.runtime.text_stream import has_table, special_tokens
from ingot.runtime.vocabulary import ARRAYS, FLAGS, Vocabulary

_TEXT = Path(__file__).parent / "calibration/text.txt"
_NUM_TRIED = 48
_ODD = (
    "", " ", "  a", "a  \n\n\n b\t\t", "1234567 0.5e-3", "don't they'LL", "Grüße, naïve café", "e\u0301\u0338>\u0338",
    "Ελληνικά и русский", "中文字符与日本語かな", "한국어 문장", "हिन्दी عربى",
    "\U0001f642\U0001f469\u200d\U0001f467", "\u00a0\u2003\u200b\ufeff",
    "def f(x):\n    return x**2  # ok\n", "<|im_start|>", "<0x41> <unk>", "▁Ġ▁ Ċ", "\x00\x01\x7f", "https://a.b/c?d=e&f")


def vocabulary_file(tokenizer: tokenizers.Tokenizer) -> bytes | None:
    """None if its decoder writes a token in more than one way, so that names do not tell an answer."""
    if not has_table(tokenizer):
        return None
    spec: dict[str, Any] = json.loads(tokenizer.to_str())
    encoder = encoder_of(spec)
    data = _pack(tokenizer, spec, encoder)
    if encoder is not None and not _agrees(tokenizer, Vocabulary(data)):
        data = _pack(tokenizer, spec, None)
    return data


def encoder_of(spec: dict[str, Any]) -> dict[str, Any] | None:
    """What the header says of a tokenizer.json; None if parts of it would not do."""
    model = spec["model"]
    if model["type"] != "BPE" or any(model.get(name) for name in
                                     ("dropout", "continuing_subword_prefix", "end_of_word_suffix")):
        return None
    normalizers = _flat(spec["normalizer"], "normalizers")
    composed = bool(normalizers) and normalizers[0]["type"] == "NFC"
    replaced = [_replacement(entry) for entry in normalizers[composed:]]
    cuts = _flat(spec["pre_tokenizer"], "pretokenizers")
    if None in replaced or not all(_only_cuts(entry) for entry in cuts):
        return None
    vocabulary, added = model["vocab"], spec["added_tokens"]
    outside = [entry for entry in added if entry["content"] not in vocabulary]
    if outside and (normalizers or any(entry["single_word"] or entry["normalized"] for entry in outside)):
        return None  # as a word of the text, one would be found in the part's vocabulary
    unknown = [model["unk_token"]] if model.get("unk_token") in vocabulary else []
    by_name = [f"<0x{byte:02X}>" for byte in range(256)] if model.get("byte_fallback") else []
    return {
        "frame": {**spec, "truncation": None, "padding": None, "added_tokens": [],
                  "model": {**model, "vocab": {}, "merges": []}},
        "kept": sorted(vocabulary[name] for name in {*unknown, *by_name} if name in vocabulary),
        "added": [[entry["id"], sum(entry[flag] << bit for bit, flag in enumerate(FLAGS)),
                   bool(normalizers) and entry["normalized"]] for entry in added],
        "by_bytes": any(entry["type"] == "ByteLevel" for entry in cuts), "composed": composed, "replaced": replaced,
    }


def _flat(entry: dict[str, Any] | None, members: str) -> list[dict[str, Any]]:
    if entry is None:
        return []
    if entry["type"] != "Sequence":
        return [entry]
    return [part for inner in entry[members] for part in _flat(inner, members)]


def _replacement(entry: dict[str, Any]) -> list[str] | None:
    """[old, new] of a normalizer that replaces one character, wherever it stands; None for others."""
    old = entry["pattern"].get("String", "") if entry["type"] == "Replace" else ""
    return [old, entry["content"]] if len(old) == 1 else None


def _only_cuts(entry: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer's words are pieces of the text, or of its bytes."""
    return entry["type"] in ("Split", "Digits") or (entry["type"] == "ByteLevel" and not entry["add_prefix_space"])


def _pack(tokenizer: tokenizers.Tokenizer, spec: dict[str, Any], encoder: dict[str, Any] | None) -> bytes:
    last = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    names = [(tokenizer.id_to_token(token) or "").encode() for token in range(last + 1)]
    vocabulary: dict[str, int] = spec["model"]["vocab"] if encoder is not None else {}
    merges: list[list[tuple[int, int]]] = [[] for _ in names]
    for rank, pair in enumerate(spec["model"]["merges"] if encoder is not None else ()):
        left, right = pair.split(" ") if isinstance(pair, str) else pair
        merges[vocabulary[left + right]].append((rank, len(left.encode())))
    flat = [merge for of_token in merges for merge in of_token]
    values = {
        "ends": np.cumsum([len(name) for name in names]),
        "sorted": [token for _, token in sorted((name.encode(), token) for name, token in vocabulary.items())],
        "merge_ends": np.cumsum([len(of_token) for of_token in merges]),
        "ranks": [rank for rank, _ in flat], "lefts": [left for _, left in flat],
        "names": np.frombuffer(b"".join(names), np.uint8),
    }
    arrays = {name: np.asarray(values[name], f"<{'u4' if kind == 'I' else 'u2' if kind == 'H' else 'u1'}")
              for name, kind in ARRAYS.items()}
    header = json.dumps({
        "decoder": json.loads(tokenizer.decoder.__getstate__()), "special": sorted(special_tokens(tokenizer)),
        "sizes": {name: array.size for name, array in arrays.items()}, "encoder": encoder,
    }, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 4)
    return b"".join([struct.pack("<I", len(header)), header, *(array.tobytes() for array in arrays.values())])


def _agrees(tokenizer: tokenizers.Tokenizer, vocabulary: Vocabulary) -> bool:
    whole = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    whole.no_padding()
    whole.no_truncation()
    for text in _texts(whole):
        part = vocabulary.part_for(text)
        if part is None:
            continue
        small = tokenizers.Tokenizer.from_str(part)
        if any(small.encode(text, add_special_tokens=special).ids != whole.encode(text, add_special_tokens=special).ids
               for special in (True, False)):
            return False
    return True


def _texts(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """Of many scripts, with added tokens between them, and slices of real text."""
    chance = random.Random(1)
    added = [entry.content for entry in tokenizer.get_added_tokens_decoder().values()]
    some = chance.sample(added, min(len(added), 12))
    real = _TEXT.read_text()
    slices = [real[begin : begin + chance.randrange(8, 300)] for begin in chance.sample(range(len(real)), _NUM_TRIED)]
    mixed = ["".join(part + chance.choice(_ODD) for part in chance.sample(some, min(len(some), 3))) for _ in range(12)]
    return [*_ODD, *(f"{odd}{name} a{name}{name}" for odd, name in zip(_ODD, some, strict=False)), *mixed, *slices]
