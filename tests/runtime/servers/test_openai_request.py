"""Bodies of any kind are parsed or refused with an error that a client understands; nothing else happens."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.runtime.servers.openai_errors import ApiError
from ingot.runtime.servers.openai_request import (
    _CHAT,
    _COMPLETION,
    _UNSUPPORTED,
    Call,
    parse_chat,
    parse_completion,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(
        ["text", "json_object", "user", "\ud800", "a" * 100]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["type", "role", "content", "json", "regex", "choice", "function", "tool_calls", "5", "x"]),
        inner, max_size=3), max_leaves=6)
NAMES = st.sampled_from([*_COMPLETION, *_CHAT, *_UNSUPPORTED, "unheard_of"])
BODIES = st.dictionaries(NAMES, JSON, max_size=5)


def outcome(parse: Any, body: bytes) -> Call | ApiError:
    try:
        call: Call = parse(body, "mock", {"temperature": 1.0}, 100)
    except ApiError as error:
        assert 400 <= error.status < 500 and str(error) and "\n  File" not in str(error)
        assert json.dumps(error.body())
        return error
    return call


@settings(max_examples=400, deadline=None)
@given(BODIES)
def test_any_json(body: dict[str, Any]) -> None:
    completion = {"prompt": "a", **body}
    chat = {"messages": [{"role": "user", "content": "a"}], **body}
    for parse, whole in ((parse_completion, completion), (parse_chat, chat)):
        result = outcome(parse, json.dumps(whole).encode())
        if isinstance(result, Call):
            assert "unheard_of" not in whole or whole["unheard_of"] is None
        elif result.param is not None:
            # The field that is told is one that was sent.
            name = result.param.partition("[")[0].partition(".")[0]
            assert name in whole, result


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes(body: bytes) -> None:
    assert isinstance(outcome(parse_completion, body), ApiError)


def test_numbers_of_json_are_one_kind() -> None:
    call = outcome(parse_completion, b'{"prompt": "a", "max_tokens": 7.0, "temperature": 1}')
    assert isinstance(call, Call) and (call.params.max_tokens, call.params.temperature) == (7, 1.0)


def test_defaults() -> None:
    call = parse_completion(b'{"prompt": "a"}', "mock", {"temperature": 0.6, "top_p": 0.9}, 100)
    assert (call.params.temperature, call.params.top_p, call.params.max_tokens) == (0.6, 0.9, 16)
    call = parse_chat(b'{"messages": [{"role": "user", "content": "a"}], "temperature": 0}', "mock",
                      {"temperature": 0.6}, 100)
    assert (call.params.temperature, call.params.max_tokens) == (0.0, 100)


@pytest.mark.parametrize("messages", [
    [{"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
     {"role": "tool", "content": "42", "tool_call_id": "1"}],
])
def test_tool_calls_reach_the_template_as_objects(messages: list[dict[str, Any]]) -> None:
    call = parse_chat(json.dumps({"messages": messages}).encode(), "mock", {}, 100)
    assert call.messages is not None
    assert call.messages[0]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert call.messages[0]["content"] == "" and call.messages[1] == messages[1]


def test_what_is_null_in_a_message_is_not_there() -> None:
    """Mistral's templates ask whether tool_calls is defined."""
    sent = {"role": "assistant", "content": "a", "refusal": None, "function_call": None}
    no_calls: list[Any] = [None, []]
    for calls in no_calls:
        body = json.dumps({"messages": [{**sent, "tool_calls": calls}]}).encode()
        assert parse_chat(body, "mock", {}, 100).messages == [{"role": "assistant", "content": "a"}]
