"""The HTTP server by plain HTTP: statuses, errors, tokens, TLS, limits, clients that go away, shutting down."""

import asyncio
import dataclasses
import http.client
import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot.runtime.errors import IngotError, RequestError
from ingot.runtime.executor.request import (
    Draining,
    DuplicateRequest,
    EngineFailed,
    QueueFull,
    RequestOutput,
    TokenLogprobs,
)
from ingot.runtime.sampling import SamplingError
from ingot.runtime.servers.address import host_and_port
from ingot.runtime.servers.context import ServerSettings
from tests.runtime.servers.scripted_engine import ANSWER, ScriptedRunner, outputs, start_at, tokenizer
from tests.runtime.servers.scripted_engine import http as http_server


def call(address: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None,
         tls: ssl.SSLContext | None = None) -> tuple[int, Any, Any]:
    """(status, headers, the JSON or the text of the answer). body: bytes, or what becomes JSON."""
    connection = http.client.HTTPConnection(address, timeout=20) if tls is None else \
        http.client.HTTPSConnection(address, timeout=20, context=tls)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, data, headers or {})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    is_json = (response.headers["Content-Type"] or "").startswith("application/json")
    return response.status, response.headers, json.loads(text) if is_json else text


def complete(address: str, headers: dict[str, str] | None = None, **body: Any) -> tuple[int, Any, Any]:
    return call(address, "POST", "/v1/completions", {"prompt": "ab", "max_tokens": 100, **body}, headers)


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def test_completion(address: str, runner: ScriptedRunner) -> None:
    status, _, answer = complete(address)
    assert status == 200
    assert answer["object"] == "text_completion" and answer["model"] == "mock"
    assert answer["choices"] == [{"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop",
                                  "stop_reason": None}]
    length = len(ANSWER.encode())
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": length, "total_tokens": 2 + length,
                               "prompt_tokens_details": {"cached_tokens": 1}}
    assert runner.requests[0].params.temperature == 1.0


def test_models(address: str) -> None:
    status, _, models = call(address, "GET", "/v1/models")
    assert status == 200 and [model["id"] for model in models["data"]] == ["mock"]
    assert models["data"][0]["max_model_len"] == 1000 and len(models["data"][0]["engine"]["hash"]) == 64
    assert call(address, "GET", "/v1/models/mock")[2] == models["data"][0]
    status, _, error = call(address, "GET", "/v1/models/other")
    assert status == 404 and error["error"]["code"] == "model_not_found"


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


def test_an_engine_without_tokenizer_takes_token_ids(runner: ScriptedRunner, tmp_path: Path) -> None:
    with http_server(tmp_path, runner, with_tokenizer=False) as address:
        status, _, answer = complete(address, prompt="text")
        assert (status, answer["error"]["param"]) == (400, "prompt")
        status, _, answer = call(address, "POST", "/v1/chat/completions",
                                 {"messages": [{"role": "user", "content": "a"}]})
        assert (status, answer["error"]["code"]) == (400, "no_chat_template")
        status, _, answer = complete(address, prompt=[1, 2], logprobs=0, return_token_ids=True, max_tokens=1)
        assert status == 200
        token, = answer["choices"][0]["token_ids"]
        assert answer["choices"][0]["logprobs"]["tokens"] == [f"token_id:{token}"]
        assert answer["choices"][0]["prompt_token_ids"] == [1, 2]


@pytest.mark.parametrize(("refusal", "status", "code"), [
    (QueueFull("64 requests wait"), 429, "queue_full"),
    (Draining("the server is going down"), 503, "draining"),
    (EngineFailed("the device is gone"), 503, "engine_failed"),
    (DuplicateRequest("again"), 409, "duplicate_request"),
    (RequestError("never fits"), 400, "invalid_value"),
])
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(address: str, runner: ScriptedRunner, refusal: IngotError, status: int, code: str,
                  stream: bool) -> None:
    runner.refusal = refusal
    got, headers, answer = complete(address, stream=stream)
    assert (got, answer["error"]["code"], answer["error"]["message"]) == (status, code, str(refusal))
    assert (headers["Retry-After"] is not None) == (status in (429, 503))


def test_one_refused_prompt_refuses_all(address: str, runner: ScriptedRunner) -> None:
    runner.script = lambda request: []
    status, _, answer = complete(address, prompt=["a", "b", ""])
    assert (status, answer["error"]["param"]) == (400, "prompt[2]")
    assert eventually(lambda: len(set(runner.cancelled)) == 2)


def test_unknown_urls_and_methods(address: str) -> None:
    assert call(address, "GET", "/v2/models")[0] == 404
    status, headers, answer = call(address, "GET", "/v1/completions")
    assert (status, headers["Allow"], answer["error"]["type"]) == (405, "POST", "invalid_request_error")
    status, _, answer = complete(address, model="gpt-5")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_large_bodies_are_refused(runner: ScriptedRunner, tmp_path: Path) -> None:
    with http_server(tmp_path, runner, ServerSettings(max_message_bytes=1000)) as address:
        status, _, answer = complete(address, prompt="a" * 2000)
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
        assert complete(address, prompt="a" * 100)[0] == 200


def test_tokens(runner: ScriptedRunner, tmp_path: Path) -> None:
    with http_server(tmp_path, runner, ServerSettings(auth_token="s3cret")) as address:
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "s3cret"},
                        {"Authorization": "Bearer s3cret\xe9"}):
            status, _, answer = complete(address, headers)
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
        assert call(address, "GET", "/metrics")[0] == 401
        assert call(address, "GET", "/health")[0] == call(address, "GET", "/ready")[0] == 200
        assert not runner.requests
        assert complete(address, {"Authorization": "Bearer s3cret"})[0] == 200


def self_signed(folder: Path) -> tuple[Path, Path]:
    """(certificate, key) of 127.0.0.1."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-keyout", key, "-out", certificate, "-days", "1", "-subj", "/CN=127.0.0.1",
                    "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    return certificate, key


def test_clients_may_have_to_show_a_certificate(runner: ScriptedRunner, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    settings = ServerSettings(tls_certificate=certificate.read_bytes(), tls_key=key.read_bytes(),
                              tls_client_ca=certificate.read_bytes())
    with http_server(tmp_path, runner, settings) as address:
        tls = ssl.create_default_context(cafile=str(certificate))
        with pytest.raises((ssl.SSLError, ConnectionError)):
            call(address, "GET", "/v1/models", tls=tls)
        tls.load_cert_chain(certificate, key)
        assert call(address, "GET", "/v1/models", tls=tls)[0] == 200
    with pytest.raises(RequestError, match="PEM"), \
            http_server(tmp_path, runner, dataclasses.replace(settings, tls_client_ca=b"x")):
        pass


def test_tls(runner: ScriptedRunner, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    settings = ServerSettings(tls_certificate=certificate.read_bytes(), tls_key=key.read_bytes())
    with http_server(tmp_path, runner, settings) as address:
        trusting = ssl.create_default_context(cafile=str(certificate))
        assert call(address, "GET", "/v1/models", tls=trusting)[0] == 200
        with pytest.raises(ssl.SSLError):
            call(address, "GET", "/v1/models", tls=ssl.create_default_context())
    with pytest.raises(RequestError, match="TLS"), \
            http_server(tmp_path, runner, ServerSettings(tls_certificate=b"x", tls_key=b"y")):
        pass


def test_addresses_that_cannot_be_bound(runner: ScriptedRunner, tmp_path: Path) -> None:
    assert host_and_port("[::1]:80", "HTTP") == ("::1", 80)
    for wrong in ("localhost", "localhost:http", "localhost:99999"):
        with pytest.raises(RequestError, match="host:port"):
            host_and_port(wrong, "HTTP")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RequestError, match="cannot serve HTTP"):
        asyncio.run(start_at(tmp_path, runner, f"127.0.0.1:{taken.getsockname()[1]}"))


def test_bytes_that_are_not_http_leave_no_trace_in_the_log(address: str, caplog: pytest.LogCaptureFixture) -> None:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))  # how a gRPC client begins
        assert client.recv(100).startswith(b"HTTP/1.0 400 Bad Request")
    assert call(address, "GET", "/ready")[0] == 200
    assert not caplog.records


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_requests(address: str, runner: ScriptedRunner, stream: bool) -> None:
    runner.script = lambda request: outputs(request)[:2]
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port))) as client:
        body = json.dumps({"prompt": ["a", "b"], "stream": stream}).encode()
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        assert eventually(lambda: len(runner.requests) == 2)
        if stream:
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        assert not runner.cancelled
    assert eventually(lambda: len(set(runner.cancelled)) == 2)


@pytest.mark.parametrize(("reason", "status", "code"), [("timeout", 408, "timeout"), ("cancelled", 503, "cancelled"),
                                                        ("error", 500, None)])
def test_requests_that_end_badly(address: str, runner: ScriptedRunner, reason: str, status: int,
                                 code: str | None) -> None:
    runner.script = lambda request: outputs(request, reason=reason)
    got, _, answer = complete(address)
    assert (got, answer["error"]["code"]) == (status, code)
    # In mid-stream the status has gone out already.
    got, _, text = complete(address, stream=True)
    assert got == 200 and text.endswith("data: [DONE]\n\n")
    assert json.loads(text.split("\n\n")[-3].removeprefix("data: "))["error"]["code"] == code


@pytest.mark.parametrize("form", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": "a"}}])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_guide_that_cannot_be_followed_names_its_field(address: str, runner: ScriptedRunner, form: dict[str, Any],
                                                         at_once: bool) -> None:
    error = SamplingError("guide", "guide is no regex that can be followed")
    runner.refusal = error if at_once else None
    runner.script = lambda request: [dataclasses.replace(output, error=error)
                                     for output in outputs(request, reason="error")]
    status, _, answer = complete(address, **form)
    assert (status, answer["error"]["param"]) == (400, *form)


def test_faults_are_logged_and_not_shown(address: str, runner: ScriptedRunner, caplog: pytest.LogCaptureFixture
                                         ) -> None:
    def fault(request: Any) -> Any:
        raise ZeroDivisionError("secret")
    runner.script = fault
    status, _, answer = complete(address)
    assert (status, answer["error"]["code"]) == (500, "internal_error")
    assert "secret" not in json.dumps(answer) and "secret" in caplog.text


def test_health(address: str, runner: ScriptedRunner) -> None:
    for health, alive, ready in (("serving", 200, 200), ("draining", 200, 503), ("failed", 503, 503),
                                 ("stopped", 503, 503)):
        runner.health = health  # type: ignore[assignment]
        assert call(address, "GET", "/health")[0] == alive
        status, _, answer = call(address, "GET", "/ready")
        assert (status, answer) == (ready, {"status": health})


def test_request_ids_and_settings_reach_the_engine(address: str, runner: ScriptedRunner) -> None:
    complete(address, {"X-Request-Id": "mine-1"}, priority=3, cache_salt="tenant", timeout_s=5, seed=-1, top_k=-1,
             stop="\n", logit_bias={"5": -100}, min_tokens=2, ignore_eos=True, stop_token_ids=[7], bad_words=["no"],
             include_stop_str_in_output=True, user="me", presence_penalty=None, n=2, max_tokens=9)
    request, = runner.requests
    assert request.request_id.startswith("cmpl-mine-1-")
    assert (request.priority, request.cache_salt, request.deadline_s) == (3, "tenant", 5)
    params = request.params
    assert (params.seed, params.top_k, params.stop, params.logit_bias) == ((1 << 64) - 1, 0, ("\n",), {5: -100.0})
    assert (params.min_tokens, params.ignore_eos, params.stop_token_ids) == (2, True, (7,))
    assert (params.bad_words, params.include_stop, params.n, params.max_tokens) == (("no",), True, 2, 9)


@pytest.mark.parametrize(("form", "kind"), [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, "json_object"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
     "json_schema"),
    ({"structured_outputs": {"regex": "a+"}}, "regex"),
    ({"structured_outputs": {"choice": ["a", "b"]}}, "choice"),
    ({"structured_outputs": {"json": {"type": "integer"}}}, "json_schema"),
])
def test_guides(address: str, runner: ScriptedRunner, form: dict[str, Any], kind: str | None) -> None:
    assert complete(address, **form)[0] == 200
    guide = runner.requests[0].params.guide
    assert (guide.kind if guide else None) == kind


def test_stopping_lets_calls_end(runner: ScriptedRunner, tmp_path: Path) -> None:
    """What runs ends within the grace; what does not is cut off, and its request is cancelled."""
    runner.script = lambda request: []
    results: list[Any] = []
    with http_server(tmp_path, runner) as address:
        thread = threading.Thread(target=lambda: results.append(_outcome(address)))
        thread.start()
        assert eventually(lambda: len(runner.requests) == 1)
    thread.join(20)
    assert results == ["cut off"] and set(runner.cancelled) == {runner.requests[0].request_id}
    runner.requests.clear()
    with http_server(tmp_path, runner, grace_s=20) as address:
        thread = threading.Thread(target=lambda: results.append(_outcome(address)))
        thread.start()
        assert eventually(lambda: len(runner.requests) == 1)
        runner.finish_later(runner.requests[0], after_s=0.3)
    thread.join(20)
    assert results[1:] == [200]


def _outcome(address: str) -> int | str:
    try:
        return complete(address)[0]
    except (http.client.HTTPException, OSError):
        return "cut off"
