"""What each format's parser finds in an answer, in whatever pieces the answer comes."""

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.runtime.servers.tool_calls import Form
from ingot.runtime.servers.tool_calls.hermes import Hermes
from ingot.runtime.servers.tool_calls.llama import Llama
from ingot.runtime.servers.tool_calls.mistral import Mistral
from ingot.runtime.servers.tool_calls.pythonic import Pythonic
from ingot.runtime.servers.tool_calls.qwen_coder import QwenCoder
from tests.runtime.servers.tool_calls.parsed import Parsed, events, parsed

HERMES, LLAMA, MISTRAL, CODER, PYTHONIC = Hermes(), Llama(), Mistral(True), QwenCoder(), Pythonic()
FORMS: list[Form] = [HERMES, LLAMA, MISTRAL, CODER, PYTHONIC]
PARIS = ("weather", {"city": "Paris"})
NOW: tuple[str, Any] = ("now", {})

RIGHT: list[tuple[Form, str, str, list[tuple[str, Any]]]] = [
    (HERMES, '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [PARIS]),
    (HERMES, 'Let me see.\n\n<tool_call>{"name":"weather","arguments":{"city":"Paris"}}</tool_call>\n'
             '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n', "Let me see.", [PARIS, NOW]),
    (HERMES, '<tool_call>{"arguments": {"city": "Paris"}, "name": "weather"}</tool_call> Done. ', "Done. ", [PARIS]),
    (HERMES, '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', "", [PARIS]),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}', "", [PARIS]),
    (HERMES, '<tool_call>{"name": "now"}</tool_call>', "", [NOW]),
    (HERMES, '<tool_call>{"name": "now", "arguments": null, "id": 3}</tool_call>', "", [NOW]),
    (HERMES, '<tool_call>{"name": "x", "arguments": {"t": "</tool_call>}\\"\\\\", "n": [1, {"a": -2.5e3}, true]}}'
             '</tool_call>', "", [("x", {"t": '</tool_call>}"\\', "n": [1, {"a": -2500.0}, True]})]),
    (HERMES, "<think>\nWell.\n</think>\n\n<tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>",
     "<think>\nWell.\n</think>", [NOW]),
    (LLAMA, '{"name": "weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    (LLAMA, '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    (LLAMA, ' {"type": "function", "name": "now", "parameters": {}}; {"name": "weather", "arguments": '
            '{"city": "Paris"}}', "", [NOW, PARIS]),
    (LLAMA, 'Sure:\n<|python_tag|>{"name": "now", "parameters": {}}\n{"name": "now"}', "Sure:", [NOW, NOW]),
    (MISTRAL, '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]', "",
     [PARIS, NOW]),
    (MISTRAL, ' I look. [TOOL_CALLS] [{"arguments": {}, "name": "now", "id": "abcdefghi"}]', " I look.", [NOW]),
    (MISTRAL, 'Yes[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{}', "Yes",
     [PARIS, NOW]),
    (MISTRAL, '[TOOL_CALLS]weather{"city": "Paris"}', "", [PARIS]),
    (CODER, "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
            "</parameter>\n</function>\n</tool_call>", "", [("weather", {"city": "Paris", "days": 3})]),
    (CODER, "I look.\n<function=weather>\n<parameter=city>\n3\n\n4\n</parameter>\n<parameter=at>\nnull\n</parameter>\n"
            '<parameter=where>\n{"x": 1}\n</parameter></function>\n</tool_call>\n<tool_call>\n<function=now>\n'
            "</function>\n</tool_call>", "I look.",
     [("weather", {"city": "3\n\n4", "at": None, "where": '{"x": 1}'}), NOW]),
    (CODER, "<tool_call><function=weather><parameter=days>soon</parameter></function></tool_call>", "",
     [("weather", {"days": "soon"})]),
    (PYTHONIC, "[weather(city='Paris')]", "", [PARIS]),
    (PYTHONIC, '<|python_start|>[weather(city="Paris"), now()]<|python_end|>', "", [PARIS, NOW]),
    (PYTHONIC, '[weather(city="a]\\")", days=-3, where={"x": [1.5, True, null]})]', "",
     [("weather", {"city": 'a]")', "days": -3, "where": {"x": [1.5, True, None]}})]),
]
WRONG: list[tuple[Form, str]] = [
    (HERMES, "No calls.\n\n"), (HERMES, "a < b <tool"), (HERMES, "<tool_call>now</tool_call>"), (HERMES, "  \n"),
    (HERMES, '<tool_call>\n{"name": "weather", "arguments": {"city": }}\n</tool_call>'),
    (HERMES, 'Look: <tool_call>{"name": "weather", "arguments": {"city": "Par'),
    (HERMES, '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "a", "name": "b", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "a", "arguments": {}, "parameters": {}}</tool_call>'),
    (HERMES, "<tool_call>{'name': 'now', 'arguments': {}}</tool_call>"),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"x": 01}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"x": "a\nb"}}</tool_call>'),
    (LLAMA, '{"city": "Paris", "name": "weather"}'), (LLAMA, '{"name": "Ann", "parameters": {}}'),
    (LLAMA, 'So: {"name": "now", "parameters": {}}'), (LLAMA, '<|python_tag|>print("now")'), (LLAMA, "{"),
    (LLAMA, '{"name": "now", "parameters": {}, "more": 1}'),
    (MISTRAL, "[TOOL_CALLS]"), (MISTRAL, "[TOOL_CALLS][]"), (MISTRAL, "[TOOL_CALLS]weather of today"),
    (MISTRAL, "[TOOL_CALLS]weather[ARGS]{\"city\": oops}"), (MISTRAL, "[1, 2]"), (MISTRAL, "[TOOL_CALLS][{"),
    (CODER, "<tool_call>\n<function=weather>\n<parameter=city>\nParis"), (CODER, "<function=>\n</function>"),
    (CODER, "<tool_call>{}</tool_call>"), (CODER, "<function=weather>\nParis\n</function>"),
    (PYTHONIC, "[1] says so"), (PYTHONIC, "[unknown(a=1)]"), (PYTHONIC, "[weather('Paris')]"), (PYTHONIC, "["),
    (PYTHONIC, "[weather(city=place)]"), (PYTHONIC, "[weather(city='Paris'"), (PYTHONIC, "[weather(days=1e999)]"),
    (PYTHONIC, "[weather(city=__import__('os'))]"), (PYTHONIC, "[weather(city={1, 2})]"),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), RIGHT)
def test_calls(form: Form, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    assert parsed(form, text) == Parsed(content, calls)


@pytest.mark.parametrize(("form", "text"), WRONG)
def test_what_is_no_call_stays_content(form: Form, text: str) -> None:
    """To the last character."""
    assert parsed(form, text) == Parsed(text, [])


@pytest.mark.parametrize(("form", "text"), [*((form, text) for form, text, _, _ in RIGHT), *WRONG])
def test_every_split(form: Form, text: str) -> None:
    whole = events(form, [text])
    assert events(form, text) == whole
    for place in range(len(text)):
        assert events(form, [text[:place], text[place:]]) == whole


FRAGMENTS = st.sampled_from([
    "<tool_call>", "</tool_call>", '{"name": "now",', '"arguments": {}', '"parameters": {"a": [1]}', "}", "{", "]",
    "[", ", ", ": ", '"',
    "\\", '{"name": "weather", "arguments": {"city": "Paris"}}', "<|python_tag|>", "; ", "\n", " ",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "now", "weather", "<function=now>", "<function=", "<parameter=city>",
    "</parameter>", "</function>", ">", "(", ")", "city='x'", "=", "[now()", "1", "true", "<|python_start|>", "é😀"])


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FORMS), st.lists(FRAGMENTS, max_size=14).map("".join), st.data())
def test_any_text_in_any_pieces(form: Form, text: str, data: st.DataObject) -> None:
    whole = events(form, [text])
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]
    assert events(form, pieces) == whole
    assert events(form, text) == whole
    found = parsed(form, text)  # arguments are valid JSON
    if not found.calls:
        assert found.content == text


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)), max_size=4),
    st.booleans())
def test_any_arguments(arguments: dict[str, Any], ascii_only: bool) -> None:
    text = json.dumps(arguments, ensure_ascii=ascii_only)
    assert parsed(HERMES, f'<tool_call>{{"name": "x", "arguments": {text}}}</tool_call>') == Parsed(
        "", [("x", arguments)])
    assert parsed(LLAMA, f'{{"name": "now", "parameters": {text}}}') == Parsed("", [("now", arguments)])
    assert parsed(MISTRAL, f"[TOOL_CALLS]x[ARGS]{text}") == Parsed("", [("x", arguments)])


def test_content_is_told_as_it_comes_and_markers_are_not() -> None:
    parser = HERMES.parser({})
    told = [parser.feed(piece) for piece in ("Hello ", "you", " <", "b> <tool", "_call", ">{")]
    assert [[getattr(event, "text", None) for event in some] for some in told] == [
        ["Hello"], [" you"], [], [" <b>"], [], []]


def test_arguments_are_told_as_they_come() -> None:
    parser = HERMES.parser({})
    parser.feed('<tool_call>{"name": "x", "arguments": {"text": "once')
    assert [getattr(event, "text", None) for event in parser.feed(" upon")] == [" upon"]


@pytest.mark.parametrize(("form", "piece"), [
    (HERMES, '<tool_call>{"name": "x", "arguments": {"a": '), (HERMES, "<tool_call>"), (HERMES, "<tool_call>{"),
    (CODER, "<function=now><parameter=a>"), (PYTHONIC, "<|python_start|>[now("), (LLAMA, "<|python_tag|>{"),
    (MISTRAL, "[TOOL_CALLS][{"), (MISTRAL, '[TOOL_CALLS]x[ARGS]{"a": '), (HERMES, '{"a": [' * 5),
])  # fmt: skip
def test_time_grows_with_the_length(form: Form, piece: str) -> None:
    """Of answers that try hard."""
    begin = time.process_time()
    for end in ("", "</parameter>}", '"}]'):
        assert parsed(form, piece * 20_000 + end).content == piece * 20_000 + end
    assert time.process_time() - begin < 10  # quadratic, it would be minutes
