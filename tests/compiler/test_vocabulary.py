"""vocabulary.bin: short texts and answers without the whole tokenizer, to the same tokens."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ingot.compiler import vocabulary as written
from ingot.compiler.vocabulary import encoder_of, vocabulary_file
from ingot.runtime.engine_format import EngineFormatError
from ingot.runtime.tokenizer import _TEXTS_IN_PARTS, Tokenizer
from ingot.runtime.vocabulary import Vocabulary
from tests.runtime.mock_engine import tokenizer_json

TEXT = ["the cat sat on the mat, and that was that: 1234 caf\u00e9s",
        "na\u00efve  Gr\u00fc\u00dfe\n\n\n\u4e2d\u6587 <s>"] * 3


def by_bytes(ignore_merges: bool = False, composed: bool = False, outside: bool = False) -> tokenizers.Tokenizer:
    """As SmolLM2, Llama 3 and Qwen have theirs. outside: special tokens have no place in the vocabulary."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.normalizer = normalizers.NFC() if composed else None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\p{L}+|[^\p{N}\p{L}]+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<s>", "</s>", "<long s>"]
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(
        vocab_size=330, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[] if outside else names))
    tokenizer.add_special_tokens(names)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[
        ("<s>", tokenizer.token_to_id("<s>"))])
    return tokenizer


def by_characters() -> tokenizers.Tokenizer:
    """As Gemma: blanks are a character, what is not in the vocabulary is written byte by byte."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(
        vocab_size=500, show_progress=False,
        special_tokens=["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)),
                        AddedToken("mat, a", normalized=True), AddedToken("the  cat", normalized=False, lstrip=True)]))
    return tokenizer


MAKERS: list[Callable[[], tokenizers.Tokenizer]] = [
    by_bytes, lambda: by_bytes(ignore_merges=True, outside=True), lambda: by_bytes(composed=True), by_characters]


def light(data: bytes) -> Tokenizer:
    def unread() -> bytes:
        raise AssertionError("the tokenizer was read")
    return Tokenizer(unread, {}, None, lambda: data)


@pytest.fixture(scope="module", params=range(len(MAKERS)))
def pair(request: pytest.FixtureRequest) -> tuple[tokenizers.Tokenizer, Vocabulary]:
    tokenizer = MAKERS[request.param]()
    data = vocabulary_file(tokenizer)
    assert data is not None
    vocabulary = Vocabulary(data)
    assert vocabulary.part_for("") is not None, "left out"
    return tokenizer, vocabulary


FAMILIAR = st.sampled_from("that catmon19 \n<s>/lg\u00e9e\u0301\u4e2d\u2581\U0001f642,")


@given(st.text(FAMILIAR, max_size=40) | st.text(max_size=20))
def test_a_part_encodes_its_text_as_the_whole(pair: tuple[tokenizers.Tokenizer, Vocabulary], text: str) -> None:
    tokenizer, vocabulary = pair
    part = vocabulary.part_for(text)
    if part is None:
        assert tokenizer.normalizer is not None and tokenizer.normalizer.normalize_str(text) != text
        return
    small = tokenizers.Tokenizer.from_str(part)
    for special in (True, False):
        assert small.encode(text, add_special_tokens=special).ids == tokenizer.encode(
            text, add_special_tokens=special).ids


@pytest.mark.parametrize("make", [*MAKERS, lambda: tokenizers.Tokenizer.from_str(tokenizer_json().decode())])
def test_the_vocabulary_alone_tells_an_answer(make: Callable[[], tokenizers.Tokenizer]) -> None:
    package = make()
    data = vocabulary_file(package)
    assert data is not None
    whole, small = Tokenizer(package.to_str().encode(), {}), light(data)
    for token in range(-1, package.get_vocab_size() + 2):
        assert small.token_bytes(max(token, 0)) == whole.token_bytes(max(token, 0))
        for skip in (True, False):
            for prompt in ([], [package.get_vocab_size() - 1]):
                one, other = (t.stream(prompt, skip_special_tokens=skip) for t in (small, whole))
                assert (one.add(max(token, 0)), one.end()) == (other.add(max(token, 0)), other.end())


def test_short_texts_leave_the_tokenizer_unread_and_many_or_long_ones_do_not() -> None:
    package = by_bytes()
    data = vocabulary_file(package)
    assert data is not None
    tokenizer = light(data)
    for _ in range(_TEXTS_IN_PARTS):
        assert tokenizer.encode("cat") == package.encode("cat").ids
    with pytest.raises(AssertionError, match="the tokenizer was read"):
        tokenizer.encode("cat")
    with pytest.raises(AssertionError, match="the tokenizer was read"):
        light(data).encode("the cat sat")
    assert not light(data).surely_exceeds("cat", 1)
    assert Tokenizer(package.to_str().encode(), {}).surely_exceeds("c" * 1000, 1)


def test_a_tokenizer_that_parts_do_not_serve_has_its_names_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "_agrees", lambda *_: False)
    data = vocabulary_file(by_bytes())
    assert data is not None
    assert Vocabulary(data).part_for("a") is None
    assert light(data).token_bytes(70)


def test_a_decoder_without_a_table_has_no_vocabulary() -> None:
    tokenizer = by_bytes()
    tokenizer.decoder = decoders.WordPiece()
    assert vocabulary_file(tokenizer) is None


def _with(**changes: Any) -> dict[str, Any]:
    return {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "normalizer": None, "pre_tokenizer": None,
            "added_tokens": [], **changes}


@pytest.mark.parametrize("spec", [
    _with(model={"type": "Unigram", "vocab": [], "unk_id": 0}),
    _with(model={"type": "BPE", "vocab": {}, "merges": [], "dropout": 0.1}),
    _with(model={"type": "BPE", "vocab": {}, "merges": [], "end_of_word_suffix": "</w>"}),
    _with(normalizer={"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]}),
    _with(normalizer={"type": "Replace", "pattern": {"String": "ab"}, "content": "c"}),
    _with(normalizer={"type": "Lowercase"}),
    _with(pre_tokenizer={"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}),
    _with(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}),
    _with(added_tokens=[{"id": 1, "content": "<b>", "single_word": True, "lstrip": False, "rstrip": False,
                         "normalized": False, "special": True}]),
])
def test_what_parts_cannot_tell_is_left_to_the_whole(spec: dict[str, Any]) -> None:
    assert encoder_of(_with()) is not None
    assert encoder_of(spec) is None


def test_what_a_damaged_file_tells_is_an_error_of_the_engine() -> None:
    data = vocabulary_file(by_bytes())
    assert data is not None
    size = int.from_bytes(data[:4], "little")
    header = json.loads(data[4 : 4 + size])
    header["encoder"]["kept"] = [10**6]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 4)
    with pytest.raises(EngineFormatError, match=r"vocabulary\.bin: malformed"):
        light(len(text).to_bytes(4, "little") + text + data[4 + size :]).encode("a")
    for begin in range(4 + size, len(data), 97):  # whatever bits are wrong: other tokens, or an error that tells it
        broken = data[:begin] + b"\xff\xff\xff\xff" + data[begin + 4 :]
        with suppress(EngineFormatError):
            light(broken).encode("cat")
