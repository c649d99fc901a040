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
from ingot.runtime.executor.request import Draining, DuplicateRequest, EngineFailed, QueueFull
from ingot.runtime.sampling import SamplingError
from ingot.runtime.servers.address import host_and_port
from ingot.runtime.servers.context import ServerSettings
from tests.runtime.servers.scripted_engine import ANSWER, ScriptedRunner, outputs, start_at
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
    assert answer["error"]["message"].endswith("Method Not Allowed; expected POST")
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
