"""Text and tokens: the stream gives out whole characters only, whatever way a vocabulary spells them."""

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from ingot.runtime.engine_format import EngineFormatError
from ingot.runtime.tokenizer import Tokenizer
from tests.runtime.mock_engine import BOS, EOS, TEMPLATE, tokenizer_json

CONFIG = {"special_tokens": {"bos_token": "<s>"}}


@pytest.fixture(scope="module")
def by_bytes() -> Tokenizer:
    """Byte-level: a token a byte."""
    return Tokenizer(tokenizer_json(), CONFIG, TEMPLATE)


def package_tokenizer(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(tokenizer.to_json())


def fallback_tokenizer() -> Tokenizer:
    """As sentencepiece has it: words with ▁ for a blank, and <0x..> for the bytes of what is not in the vocabulary."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [("▁", "a"), ("▁", "b")], byte_fallback=True,
                   unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    return Tokenizer(tokenizer.to_str().encode(), {})


def pieces(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    stream = tokenizer.stream(prompt or [])
    return [*(stream.add(token) for token in ids), stream.end()]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_byte_level_text_comes_back_character_by_character(text: str) -> None:
    tokenizer = Tokenizer(tokenizer_json(), CONFIG)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    # Each piece is empty or one character, and comes with the last byte of it.
    got = pieces(tokenizer, ids)
    expected = [piece for char in text for piece in [""] * (len(char.encode()) - 1) + [char]]
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert got == [*expected, ""]
    assert "".join(got) == text


@given(st.text(st.sampled_from("ab é😀漢"), max_size=12))
def test_byte_fallback_never_gives_half_a_character(text: str) -> None:
    tokenizer = fallback_tokenizer()
    ids = tokenizer.encode(text)
    got = pieces(tokenizer, ids)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(got)
    assert "".join(got) == tokenizer.decode(ids)


def test_the_blank_before_the_first_word_depends_on_the_prompt() -> None:
    tokenizer = fallback_tokenizer()
    prompt, answer = tokenizer.encode("a"), tokenizer.encode("b")
    assert "".join(pieces(tokenizer, answer)) == "b"
    assert "".join(pieces(tokenizer, answer, prompt)) == " b"


def test_bytes_that_are_no_character(by_bytes: Tokenizer) -> None:
    broken = by_bytes.encode("é")[:1]
    good = by_bytes.encode("x")
    assert pieces(by_bytes, broken + good) == ["", "\N{REPLACEMENT CHARACTER}x", ""]
    assert pieces(by_bytes, good + broken) == ["x", "", "\N{REPLACEMENT CHARACTER}"]


def test_special_tokens_are_no_text(by_bytes: Tokenizer) -> None:
    ids = by_bytes.encode("a<s>b</s>")
    assert ids[1] == BOS
    assert ids[-1] == EOS
    assert pieces(by_bytes, ids) == ["a", "", "b", "", ""]
    assert by_bytes.decode(ids, skip_special_tokens=False) == "a<s>b</s>"


def test_chat(by_bytes: Tokenizer) -> None:
    assert by_bytes.has_chat_template
    assert by_bytes.chat([{"role": "user", "content": "Hi"}]) == "u:Hi|<s>a:"
    assert not Tokenizer(tokenizer_json(), {}).has_chat_template


def test_settings_of_training_do_not_cut_or_pad() -> None:
    trained = tokenizers.Tokenizer.from_str(tokenizer_json().decode())
    trained.enable_truncation(2)
    trained.enable_padding(length=9)
    assert len(Tokenizer(trained.to_str().encode(), {}).encode("abcd")) == 4


def test_what_is_no_tokenizer() -> None:
    with pytest.raises(EngineFormatError, match=r"tokenizer/tokenizer\.json: "):
        Tokenizer(b'{"model": 1}', {})


@given(st.text(st.sampled_from("ab é😀漢"), min_size=1, max_size=12))
def test_the_bytes_of_tokens_make_up_a_text(text: str) -> None:
    tokenizer = fallback_tokenizer()
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode() == " " + text


def test_token_bytes_without_a_table_keep_the_blank() -> None:
    tokenizer = fallback_tokenizer()
    ids = tokenizer.encode("a b")
    tokenizer._texts[False] = None  # as for a decoder that writes a token in more than one way
    assert [tokenizer.token_bytes(token) for token in ids] == [b" a", b" b"]


def test_a_tokenizer_that_is_read_late_is_the_same() -> None:
    late = Tokenizer(tokenizer_json, CONFIG, TEMPLATE)
    early = Tokenizer(tokenizer_json(), CONFIG, TEMPLATE)
    assert late.encode("héllo") == early.encode("héllo") and late.to_json() == early.to_json()


@pytest.mark.parametrize("data", [
    b"", b"{", b"\x02\0\0\0{}", b"\x04\0\0\0null", b"\xff\xff\xff\xff",
    b"\x88\0\0\0" + json.dumps({"decoder": {}, "special": [], "encoder": None, "sizes": {
        "ends": 9, "sorted": 0, "merge_ends": 0, "ranks": 0, "lefts": 0, "names": 0}}).ljust(0x88).encode(),
])
def test_a_malformed_vocabulary_is_refused(data: bytes) -> None:
    for use in (lambda late: late.stream(), lambda late: late.encode("a")):
        with pytest.raises(EngineFormatError, match=r"tokenizer/vocabulary\.bin: malformed"):
            use(Tokenizer(tokenizer_json, CONFIG, None, lambda: data))
