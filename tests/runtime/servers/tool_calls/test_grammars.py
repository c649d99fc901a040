"""Guides that bind an answer to be calls: what they let through is what the format's parser reads, and nothing else."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from ingot.runtime.guides import Guides, Matcher, write_masks
from ingot.runtime.sampling import Guide
from ingot.runtime.servers.tool_calls import Form, Grammar, Tool
from ingot.runtime.servers.tool_calls.hermes import Hermes
from ingot.runtime.servers.tool_calls.llama import Llama
from ingot.runtime.servers.tool_calls.mistral import Mistral
from ingot.runtime.servers.tool_calls.pythonic import Pythonic
from ingot.runtime.servers.tool_calls.qwen_coder import QwenCoder
from ingot.runtime.tokenizer import Tokenizer
from tests.runtime.mock_engine import EOS, VOCAB_SIZE, tokenizer_json
from tests.runtime.servers.tool_calls.parsed import TOOLS, parsed

pytest.importorskip("llguidance")
TOKENIZER = Tokenizer(tokenizer_json(), {})
SPECIAL = 256
SMALL = [Tool("weather", {"type": "object", "properties": {
    "city": {"type": "string", "enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9, "minimum": 0},
    "at": {"type": "string", "maxLength": 3}}, "required": ["city"], "additionalProperties": False}), Tool("now")]
FORMS: list[Form] = [Hermes(), Llama(), Mistral(False), Mistral(True), QwenCoder(), Pythonic()]


@pytest.fixture(scope="module")
def guides() -> Guides:
    return Guides(TOKENIZER, VOCAB_SIZE, [EOS])


def guide(form: Form, tools: list[Tool], several: bool = True, special: dict[str, int] | None = None) -> Guide:
    grammar = Grammar((special or {}).get)
    return Guide("grammar", grammar.text(form.calls(grammar, tools, several)))


def allowed(matcher: Matcher) -> list[int]:
    masks = np.zeros((1, -(-VOCAB_SIZE // 32)), np.uint32)
    write_masks([(matcher, 0)], masks)
    found: list[int] = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little")).tolist()
    return found


def accepts(matcher: Matcher, text: str) -> bool:
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        if token not in allowed(matcher):
            return False
        matcher.advance(token)
    return EOS in allowed(matcher)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("several", [False, True])
def test_whatever_is_let_through_is_read(guides: Guides, form: Form, several: bool) -> None:
    rng, num_complete = random.Random(5), 0
    for _ in range(6):
        matcher, tokens = guides.start(guide(form, SMALL, several)), list[int]()
        while EOS not in (following := allowed(matcher)) and len(tokens) < 1500:
            tokens.append(rng.choice(following))
            matcher.advance(tokens[-1])
        if EOS not in following:
            continue
        num_complete += 1
        found = parsed(form, TOKENIZER.decode(tokens))
        assert found.content == "" and found.calls
        for name, arguments in found.calls:
            assert name in ("weather", "now")
            if name == "weather":
                assert arguments["city"] in ("Rome", "Oslo")
                assert set(arguments) <= {"city", "days", "at"}
                assert 0 <= arguments.get("days", 0) <= 9
            else:
                assert arguments == {}
    assert num_complete > 2


WRITTEN: list[tuple[Form, str, str]] = [
    (Hermes(), '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>', "\n"),
    (Llama(), '{"name": "weather", "parameters": {"city": "Paris"}}', "; "),
    (Mistral(True), '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}', ""),
    (QwenCoder(), "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
     "\n"),
]


@pytest.mark.parametrize(("form", "text", "separator"), WRITTEN)
def test_calls_as_models_write_them(guides: Guides, form: Form, text: str, separator: str) -> None:
    tools = list(TOOLS.values())
    assert accepts(guides.start(guide(form, tools)), text)
    assert accepts(guides.start(guide(form, tools)), f"{text}{separator}{text}")
    assert not accepts(guides.start(guide(form, tools, several=False)), f"{text}{separator}{text}")
    assert not accepts(guides.start(guide(form, [Tool("now")])), text)
    assert not accepts(guides.start(guide(form, tools)), text.replace("city", "town"))
    assert not accepts(guides.start(guide(form, tools)), "Paris is nice.")


@pytest.mark.parametrize(("form", "text"), [
    (Mistral(False), '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]'),
    (Pythonic(), '[weather(city="Paris", days=3), now()]'), (Pythonic(), '[weather(city="Paris", where={"x": 1.5})]'),
    (QwenCoder(), "<tool_call>\n<function=weather>\n<parameter=city>\nA\n\nB\n</parameter>\n<parameter=days>\n3\n"
                  "</parameter>\n</function>\n</tool_call>"),
])  # fmt: skip
def test_lists_and_several_arguments(guides: Guides, form: Form, text: str) -> None:
    assert accepts(guides.start(guide(form, list(TOOLS.values()))), text)


def test_arguments_that_must_come(guides: Guides) -> None:
    tools = list(TOOLS.values())
    assert not accepts(guides.start(guide(Pythonic(), tools)), "[weather(days=3)]")
    assert not accepts(guides.start(guide(Llama(), tools)), '{"name": "weather", "parameters": {"days": 3}}')
    without: list[dict[str, Any]] = [{"a": {"type": "integer"}, "b": {"type": "integer"}}]
    tool = Tool("f", {"type": "object", "properties": without[0]})
    for text in ("[f()]", "[f(a=1)]", "[f(b=1)]", "[f(a=1, b=2)]"):
        assert accepts(guides.start(guide(Pythonic(), [tool])), text)
    assert not accepts(guides.start(guide(Pythonic(), [tool])), "[f(, b=2)]")


def test_blanks_are_those_that_models_are_shown(guides: Guides) -> None:
    tool = Tool("f", {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {}}})
    text = '{"name": "f", "parameters": {"a": [1, 2], "b": {"c": null}}}'
    assert accepts(guides.start(guide(Llama(), [tool])), text)
    for other in (text.replace('": [', '":  ['), text.replace("[1, 2", "[1,2"), text.replace("{}", "{ }")):
        assert accepts(guides.start(guide(Llama(), [tool])), other) == (other == text)


def test_special_tokens_are_tokens(guides: Guides) -> None:
    """A marker that is one token is asked for by its number, not spelt."""
    matcher = guides.start(guide(Mistral(True), [Tool("now")], special={"[TOOL_CALLS]": SPECIAL}))
    assert allowed(matcher) == [SPECIAL]
    matcher.advance(SPECIAL)
    assert accepts(matcher, "now[ARGS]{}")


@pytest.mark.parametrize("special", [{}, {"</think>": SPECIAL}])
def test_text_before_a_marker(guides: Guides, special: dict[str, int]) -> None:
    grammar = Grammar(special.get)
    matcher = guides.start(Guide("grammar", grammar.text(f'{grammar.text_and("</think>")} "x"')))
    for token in TOKENIZER.encode("a <\nb", add_special_tokens=False):
        matcher.advance(token)
    assert (SPECIAL in allowed(matcher)) == bool(special)
    if special:
        matcher.advance(SPECIAL)
    assert accepts(matcher, "x" if special else "</think>x")


def test_names_are_quoted(guides: Guides) -> None:
    tool = Tool('a"b\\', json.loads('{"type": "object", "properties": {}, "additionalProperties": false}'))
    assert accepts(guides.start(guide(Llama(), [tool])), '{"name": "a\\"b\\\\", "parameters": {}}')
