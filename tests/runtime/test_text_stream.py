"""Streams over tables and over windows: the same text, for every kind of decoder; one look-up a token for most."""

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from ingot.runtime.text_stream import TableStream, TextStream, WindowStream
from ingot.runtime.tokenizer import Tokenizer
from tests.runtime.mock_engine import BOS, tokenizer_json
from tests.runtime.test_tokenizer import fallback_tokenizer
from tools.demo_models import Result

TOKENIZERS = {"byte-level": Tokenizer(tokenizer_json(), {}), "byte fallback": fallback_tokenizer()}


def text_of(stream: TextStream, ids: list[int]) -> str:
    return "".join([*map(stream.add, ids), stream.end()])


def word_pieces() -> Tokenizer:
    """Joins its tokens with blanks, but for those that begin with ##: no table can hold that."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2, "a": 3}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return Tokenizer(tokenizer.to_str().encode(), {})


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_table_and_window_give_the_same_text(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    words = st.text(st.sampled_from("ab é😀漢"), max_size=8)
    ids = tokenizer.encode(data.draw(words))
    prompt = data.draw(st.sampled_from([[], *([[BOS]] if kind == "byte-level" else []), tokenizer.encode("ab")]))
    table, window = tokenizer.stream(prompt), WindowStream(tokenizer.decode, prompt)
    assert isinstance(table, TableStream)
    assert text_of(table, ids) == text_of(window, ids)


@given(st.lists(st.integers(0, 257), max_size=12))
def test_any_bytes_at_all(ids: list[int]) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert text_of(tokenizer.stream(), ids) == tokenizer.decode(ids)
    assert text_of(tokenizer.stream([], skip_special_tokens=False), ids) == tokenizer.decode(ids, False)


def test_special_tokens_as_text() -> None:
    ids = TOKENIZERS["byte-level"].encode("a<s>b")
    assert text_of(TOKENIZERS["byte-level"].stream([], skip_special_tokens=False), ids) == "a<s>b"
    assert text_of(TOKENIZERS["byte-level"].stream(), ids) == "ab"


def test_ids_beyond_the_vocabulary_are_no_text() -> None:
    """The matrix of logits is often padded: its last rows have no token."""
    assert text_of(TOKENIZERS["byte-level"].stream(), [70, 258, 99999]) == TOKENIZERS["byte-level"].decode([70])


def test_names_that_only_look_like_bytes() -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE({"<0xZZ>": 0, "<0x41>": 1, "x": 2}, []))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    stream = Tokenizer(tokenizer.to_str().encode(), {}).stream()
    assert isinstance(stream, TableStream)
    assert text_of(stream, [0, 1, 2]) == "<0xZZ>Ax"


@pytest.mark.parametrize("decoder", [
    decoders.WordPiece(), decoders.Metaspace(), decoders.BPEDecoder(),
    decoders.Sequence([decoders.Fuse(), decoders.Replace("x", "y")]),
    decoders.Sequence([decoders.Replace("x", "y")]),
    decoders.Sequence([decoders.Replace(tokenizers.Regex("x"), "y"), decoders.Fuse()]),
    None,
], ids=lambda decoder: "none" if decoder is None else json.loads(decoder.__getstate__())["type"])  # fmt: skip
def test_other_decoders_are_asked_each_time(decoder: Any) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE({"a": 0, "x": 1}, []))
    if decoder is not None:
        tokenizer.decoder = decoder
    wrapped = Tokenizer(tokenizer.to_str().encode(), {})
    stream = wrapped.stream()
    assert isinstance(stream, WindowStream)
    assert text_of(stream, [0, 1, 0]) == wrapped.decode([0, 1, 0])


def test_words_in_pieces() -> None:
    assert text_of(word_pieces().stream([3]), [1, 2, 3]) == " playing a"


@pytest.mark.parametrize("model", ["smollm2_demo", "gemma3_demo"])
def test_real_vocabularies(model: str, request: pytest.FixtureRequest) -> None:
    demo: Result = request.getfixturevalue(model)
    tokenizer = Tokenizer((demo.checkpoint / "tokenizer.json").read_bytes(), {})
    text = "  Hello wörld, 漢字 and 😀😀!\n\n\tdef f(x):\n        return 1e-3  # “quoted” … ÿ\0 x̂"
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = tokenizer.stream()
    assert isinstance(stream, TableStream)
    assert text_of(stream, ids) == text == tokenizer.decode(ids)
