"""What clients send to the HTTP server: bodies that are wrong, and by which field they are told; chats."""

from typing import Any

import pytest

from ingot.runtime.executor.request import RequestOutput, TokenLogprobs
from tests.runtime.servers.scripted_engine import ANSWER, ScriptedRunner, tokenizer
from tests.runtime.servers.test_http_server import call, complete


@pytest.mark.parametrize(("body", "param", "code"), [
    (b"{", None, None),
    (b"[]", None, None),
    (b"\xff", None, None),
    (b'{"prompt": "a", "temperature": NaN}', None, None),
    (b"[" * 100_000, None, None),
    ({}, "prompt", "missing_field"),
    ({"prompt": []}, "prompt", "invalid_type"),
    ({"prompt": {"a": 1}}, "prompt", "invalid_type"),
    ({"prompt": ["a", 1]}, "prompt[1]", "invalid_type"),
    ({"prompt": [[1], [2, "x"]]}, "prompt[1][1]", "invalid_type"),
    ({"prompt": "\ud800"}, "prompt", "invalid_value"),
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": "a" * 1000}, "prompt", "context_length_exceeded"),
    ({"prompt": ["a", ""]}, "prompt[1]", "invalid_value"),
    ({"prompt": [99999]}, "prompt", "invalid_value"),
    ({"prompt": [-1]}, "prompt", "invalid_value"),
    ({"prompt": "a", "temprature": 1}, "temprature", "unknown_parameter"),
    ({"prompt": "a", "messages": []}, "messages", "unknown_parameter"),
    ({"prompt": "a", "temperature": "hot"}, "temperature", "invalid_type"),
    ({"prompt": "a", "temperature": True}, "temperature", "invalid_type"),
    ({"prompt": "a", "temperature": -1}, "temperature", "invalid_value"),
    ({"prompt": "a", "temperature": 10**400}, "temperature", "invalid_value"),
    ({"prompt": "a", "top_p": 1.5}, "top_p", "invalid_value"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens", "invalid_type"),
    ({"prompt": "a", "n": 0}, "n", "invalid_value"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "invalid_value"),
    ({"prompt": "a", "stop": 5}, "stop", "invalid_type"),
    ({"prompt": "a", "stop": [""]}, "stop", "invalid_value"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"prompt": "a", "logit_bias": {"5": "x"}}, "logit_bias.5", "invalid_type"),
    ({"prompt": "a", "stream_options": {}}, "stream_options", "invalid_value"),
    ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
    ({"prompt": "a", "stream": True, "echo": True}, "echo", "invalid_value"),
    ({"prompt": "a", "best_of": 2}, "best_of", "invalid_value"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "unsupported_parameter"),
    ({"prompt": "a", "timeout_s": 0}, "timeout_s", "invalid_value"),
    (b'{"prompt": "a", "timeout_s": 1e999}', "timeout_s", "invalid_value"),
    ({"prompt": ["a"] * 65}, "prompt", "invalid_value"),
    ({"prompt": "a", "cache_salt": "s" * 1025}, "cache_salt", "invalid_value"),
    ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"prompt": "a", "structured_outputs": {"regex": ""}}, "structured_outputs", "invalid_value"),
    ({"prompt": "a", "structured_outputs": {}}, "structured_outputs", "invalid_value"),
])
def test_wrong_requests_name_the_field(address: str, body: Any, param: str | None, code: str | None) -> None:
    status, _, answer = call(address, "POST", "/v1/completions", body)
    assert status == 400
    error = answer["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert error["message"] and "Traceback" not in error["message"]


def test_a_misspelt_field_is_told_its_neighbour(address: str) -> None:
    for name, message in (("max_token", "unknown field 'max_token'; did you mean 'max_tokens'?"),
                          ("xyzzy", "unknown field 'xyzzy'")):
        _, _, answer = call(address, "POST", "/v1/completions", {"prompt": "a", name: 1})
        assert answer["error"]["message"] == message


@pytest.mark.parametrize(("body", "param"), [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools[0].type"),
    ({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"bos_token": "\ud800"}}, "messages"),
    ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 1}, "top_logprobs"),
    ({"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
    ({"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": [{"role": "user", "content": "a" * 1000}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": []}},
     "chat_template_kwargs"),
])
def test_wrong_chats_name_the_field(address: str, body: Any, param: str) -> None:
    status, _, answer = call(address, "POST", "/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize("body", [{"prompt": "a" * 100_000},
                                  {"messages": [{"role": "user", "content": "a" * 100_000}]}])
def test_a_text_that_is_far_too_long_is_not_encoded(address: str, body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(tokenizer()), "encode", None)
    status, _, answer = call(address, "POST", "/v1/chat/completions" if "messages" in body else "/v1/completions", body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert answer["error"]["param"] in body and "1,000 tokens" in answer["error"]["message"]


def test_a_body_that_is_not_as_its_headers_say_is_the_clients_fault(address: str,
                                                                    caplog: pytest.LogCaptureFixture) -> None:
    status, headers, answer = call(address, "POST", "/v1/completions", b"none", {"Content-Encoding": "gzip"})
    assert (status, headers["Connection"]) == (400, "close") and "Content-Encoding" in answer["error"]["message"]
    assert not caplog.records


def test_tokens_of_half_a_character_are_told_apart(address: str, runner: ScriptedRunner) -> None:
    """Else the alternatives of a token would hide each other, and itself."""
    first, second = tokenizer().encode("\U0001f600")[0], tokenizer().encode("\xe9")[0]
    runner.script = lambda request: [RequestOutput(
        request.request_id, 0, [first], "\ufffd", 2, 0, 1, [TokenLogprobs(first, -3.0, 3, [second, 0], [-0.5, -2.0])],
        finish_reason="length")]
    _, _, answer = complete(address, logprobs=2)
    told = answer["choices"][0]["logprobs"]
    assert told["tokens"] == ["bytes:\\xf0"]
    assert told["top_logprobs"][0] == {"bytes:\\xf0": -3.0, "bytes:\\xc3": -0.5, "!": -2.0}


def test_a_chat_goes_through_the_template(address: str, runner: ScriptedRunner) -> None:
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "y"}]}]
    status, _, answer = call(address, "POST", "/v1/chat/completions", {"messages": messages})
    assert status == 200
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert runner.requests[0].prompt_token_ids == tokenizer().encode("s:x|u:y|<s>a:", add_special_tokens=False)


@pytest.mark.parametrize("variables", [{"self": 1}, {"cls": 1, "text": 2, "args": [], "kwargs": {}}])
def test_a_templates_variables_have_any_name(address: str, variables: dict[str, Any]) -> None:
    status, _, answer = call(address, "POST", "/v1/chat/completions", {
        "messages": [{"role": "user", "content": "y"}], "chat_template_kwargs": variables})
    assert (status, answer["choices"][0]["message"]["content"]) == (200, ANSWER)
