"""Tools through the HTTP server: requests, prompts, guides, answers whole and streamed, OpenAI's client."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from ingot.runtime.engine_file import EngineFile
from ingot.runtime.executor.async_engine import AsyncEngine
from ingot.runtime.executor.request import Request, RequestOutput
from ingot.runtime.sampling import SamplingError, SamplingParams
from ingot.runtime.servers import http_server
from ingot.runtime.servers.context import ServerContext, ServerSettings
from ingot.runtime.servers.served import ServedEngine
from ingot.runtime.tokenizer import Tokenizer
from tests.runtime.mock_engine import VOCAB_SIZE, tokenizer_json, write_engine
from tests.runtime.servers.scripted_engine import LIMITS, ScriptedRunner, outputs, running
from tests.runtime.servers.test_http_server import call as http_call

PROMPT = ("{% for t in tools or [] %}[{{ t.function.name }} {{ t.function.parameters.properties | length }}]"
          "{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
          "{{ c.function.arguments.city }}{% endfor %}|{% endfor %}")
HERMES = PROMPT + "{# <tool_call> #}"
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a city", "strict": True,
                                            "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}}}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS: Any = [WEATHER, NOW]
MESSAGES: Any = [{"role": "user", "content": "hi"}]
PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris 😀"}}\n</tool_call>'
TWO = f'Let me look.\n\n{PARIS}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'


def special_tokenizer(template: str, *special: str) -> Tokenizer:
    """A token a byte, and these."""
    data = json.loads(tokenizer_json())
    for number, text in enumerate(special):
        data["added_tokens"].append({**data["added_tokens"][0], "id": VOCAB_SIZE + number, "content": text})
    return Tokenizer(json.dumps(data).encode(), {}, template)


@contextmanager
def serving(folder: Path, runner: ScriptedRunner, tokenizer: Tokenizer, parser: str | None = None,
            reasoning: str | None = None) -> Iterator[str]:
    path = folder / "tools.engine"
    if not path.exists():
        write_engine(path, b"no code")

    async def start() -> http_server.HttpServer:
        engine = ServedEngine(AsyncEngine(runner), EngineFile.open(path), tokenizer, LIMITS, VOCAB_SIZE, frozenset())
        settings = ServerSettings(tool_call_parser=parser, reasoning_parser=reasoning)
        return await http_server.start(ServerContext(engine, "mock", settings), "127.0.0.1:0")

    with running(start) as address:
        yield address


@pytest.fixture
def hermes(tmp_path_factory: pytest.TempPathFactory, runner: ScriptedRunner) -> Iterator[str]:
    with serving(tmp_path_factory.getbasetemp(), runner, special_tokenizer(HERMES)) as address:
        yield address


def chat(address: str, tools: Any = TOOLS, **body: Any) -> tuple[int, Any]:
    status, _, answer = http_call(address, "POST", "/v1/chat/completions",
                                  {"messages": MESSAGES, "tools": tools, **body})
    return status, answer


def streamed(address: str, **body: Any) -> list[Any]:
    status, text = chat(address, stream=True, **body)
    assert status == 200
    *events, done = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def joined(chunks: list[Any]) -> tuple[str | None, list[Any], str]:
    """(content, calls without ids, why it ended) of a stream; checks the form of its chunks."""
    content, calls, ends = "", {}, []
    for chunk in chunks:
        choice, = chunk["choices"]
        delta = choice["delta"]
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] not in calls:  # the name first
                assert call["id"] and call["type"] == "function" and call["function"]["arguments"] == ""
                calls[call["index"]] = [call["function"]["name"], ""]
            else:
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
            calls[call["index"]][1] += call["function"]["arguments"]
        ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert list(calls) == list(range(len(calls))) and len(ends) == 1 and chunks[-1]["choices"][0]["finish_reason"]
    return content or None, [tuple(call) for call in calls.values()], ends[0]


def told(choice: Any) -> tuple[str | None, list[Any], str]:
    message = choice["message"]
    calls = message.get("tool_calls", [])
    assert all(call["id"] and call["type"] == "function" for call in calls)
    return (message["content"], [(call["function"]["name"], call["function"]["arguments"]) for call in calls],
            choice["finish_reason"])


@pytest.mark.parametrize(("answer", "expected"), [
    (PARIS, (None, [("weather", '{"city": "Paris 😀"}')], "tool_calls")),
    (TWO, ("Let me look.", [("weather", '{"city": "Paris 😀"}'), ("now", "{}")], "tool_calls")),
    ("Nothing to call. <tool", ("Nothing to call. <tool", [], "stop")),
    ("<tool_call>broken</tool_call>", ("<tool_call>broken</tool_call>", [], "stop")),
])
def test_calls_whole_and_streamed(hermes: str, runner: ScriptedRunner, answer: str,
                                  expected: tuple[str | None, list[Any], str]) -> None:
    runner.script = lambda request: outputs(request, answer)
    status, body = chat(hermes)
    assert status == 200 and told(body["choices"][0]) == expected
    assert joined(streamed(hermes)) == expected
    assert runner.requests[0].params == runner.requests[1].params
    prompt = special_tokenizer(HERMES).decode(runner.requests[0].prompt_token_ids)
    assert prompt == "[weather 1][now 0]user:hi|"
    assert runner.requests[0].params.guide is None and runner.requests[0].params.skip_special_tokens


def test_arguments_are_streamed_in_pieces(hermes: str, runner: ScriptedRunner) -> None:
    runner.script = lambda request: outputs(request, PARIS)
    pieces = [call["function"]["arguments"] for chunk in streamed(hermes)
              for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert pieces == ["", *'{"city": "Paris 😀"}']


def test_a_call_that_breaks_off(hermes: str, runner: ScriptedRunner) -> None:
    """Whole it is content; a stream has begun to tell it, and tells its text too."""
    text = PARIS[: PARIS.index("Paris") + 3]
    runner.script = lambda request: outputs(request, text, "length")
    assert told(chat(hermes)[1]["choices"][0]) == (text, [], "length")
    assert joined(streamed(hermes)) == (text, [("weather", '{"city": "Par')], "length")


def test_only_one_call(hermes: str, runner: ScriptedRunner) -> None:
    runner.script = lambda request: outputs(request, TWO)
    expected = ("Let me look.", [("weather", '{"city": "Paris 😀"}')], "tool_calls")
    assert told(chat(hermes, parallel_tool_calls=False)[1]["choices"][0]) == expected
    assert joined(streamed(hermes, parallel_tool_calls=False)) == expected


def test_several_answers(hermes: str, runner: ScriptedRunner) -> None:
    runner.script = lambda request: outputs(request, PARIS)
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in chat(hermes, n=3)[1]["choices"]}
    assert len(ids) == 3


def test_no_tools_no_calls(hermes: str, runner: ScriptedRunner) -> None:
    """Neither does the model see them, nor is its answer read."""
    runner.script = lambda request: outputs(request, PARIS)
    bodies: list[dict[str, Any]] = [{"tool_choice": "none"}, {"tools": []}, {"tools": None, "tool_choice": "auto"}]
    for body in bodies:
        assert told(chat(hermes, **body)[1]["choices"][0]) == (PARIS, [], "stop")
        assert runner.requests[-1].prompt_token_ids == special_tokenizer(HERMES).encode("user:hi|")


def test_log_probabilities_come_with_the_last_chunk_of_a_token(hermes: str, runner: ScriptedRunner) -> None:
    runner.script = lambda request: outputs(request, PARIS)
    chunks = streamed(hermes, logprobs=True)
    told = [token for chunk in chunks if chunk["choices"][0]["logprobs"]
            for token in chunk["choices"][0]["logprobs"]["content"]]
    assert len(told) == len(PARIS.encode())


@pytest.mark.parametrize(("choice", "right", "wrong"), [
    ("required", ["weather", "now"], []), ({"type": "function", "function": {"name": "now"}}, ["now"], ["weather"])])
def test_forced_calls_are_guided(hermes: str, runner: ScriptedRunner, choice: Any, right: list[str],
                                 wrong: list[str]) -> None:
    assert chat(hermes, tool_choice=choice, response_format={"type": "json_object"})[0] == 200
    guide = runner.requests[0].params.guide
    assert guide is not None and guide.kind == "grammar"
    assert all(name in guide.text for name in right) and not any(name in guide.text for name in wrong)


def test_a_form_or_calls(hermes: str, runner: ScriptedRunner) -> None:
    assert chat(hermes, response_format={"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"type": "array"}}})[0] == 200
    guide = runner.requests[0].params.guide
    assert guide is not None and '%json {"type": "array",' in guide.text and "weather" in guide.text


def test_a_schema_that_cannot_be_followed(hermes: str, runner: ScriptedRunner,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(params: SamplingParams) -> None:
        if params.guide is not None:
            raise SamplingError("guide", "guide is no grammar that can be followed: no such type")
    monkeypatch.setattr(runner, "prepare", refuse)
    status, answer = chat(hermes, tool_choice="required")
    assert (status, answer["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize(("body", "param"), [
    ({"tools": {}}, "tools"), ({"tools": [5]}, "tools[0]"), ({"tools": [{"type": "custom"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [NOW, NOW]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "description": 5}}]}, "tools[0].function.description"),
    ({"tools": [{"type": "function", "function": {"name": "a", "strict": "yes"}}]}, "tools[0].function.strict"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
     "tools[0].function.parameters.type"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"properties": 1}}}]},
     "tools[0].function.parameters.properties"),
    ({"tool_choice": "any"}, "tool_choice"), ({"tool_choice": 5}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice"), ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
])
def test_wrong_requests_name_the_field(hermes: str, runner: ScriptedRunner, body: Any, param: str) -> None:
    status, answer = chat(hermes, **{"tools": TOOLS, **body})
    assert (status, answer["error"]["param"]) == (400, param)
    assert answer["error"]["message"].startswith(param) and not runner.requests


def test_a_template_without_tools(address: str, runner: ScriptedRunner) -> None:
    """The one of the mock engine."""
    status, answer = chat(address)
    assert (status, answer["error"]["param"]) == (400, "tools") and "variable tools" in answer["error"]["message"]
    assert chat(address, tool_choice="none")[0] == 200


def test_a_format_that_is_not_known(tmp_path: Path, runner: ScriptedRunner) -> None:
    with serving(tmp_path, runner, special_tokenizer(PROMPT)) as address:
        status, answer = chat(address)
        assert (status, answer["error"]["param"]) == (400, "tools")
        assert "--tool-call-parser" in answer["error"]["message"]
    runner.script = lambda request: outputs(request, PARIS)
    with serving(tmp_path, runner, special_tokenizer(PROMPT), "hermes") as address:
        assert told(chat(address)[1]["choices"][0])[2] == "tool_calls"


def in_pieces(request: Request, pieces: list[str]) -> list[RequestOutput]:
    """A token a piece."""
    return [RequestOutput(request.request_id, 0, [0], piece, 1, 0, number,
                          finish_reason="stop" if number == len(pieces) else None)
            for number, piece in enumerate(pieces, 1)]


def test_markers_that_are_special_tokens(tmp_path: Path, runner: ScriptedRunner) -> None:
    """They are seen; other special tokens stay hidden, unless the request wants them."""
    tokenizer = special_tokenizer(PROMPT + "{# [TOOL_CALLS] [ARGS] #}", "[TOOL_CALLS]", "[ARGS]", "<pad>")
    runner.script = lambda request: in_pieces(
        request, ["Yes", "<pad>", ".", "[TOOL_CALLS]", "now", "[ARGS]", "{", "}", "</s>"])
    with serving(tmp_path, runner, tokenizer) as address:
        choice = chat(address)[1]["choices"][0]
        assert told(choice) == ("Yes.", [("now", "{}")], "tool_calls")
        assert len(choice["message"]["tool_calls"][0]["id"]) == 9  # Mistral's templates take no other
        assert joined(streamed(address)) == told(choice)
        assert told(chat(address, skip_special_tokens=False)[1]["choices"][0])[0] == "Yes<pad>.</s>"
        assert not any(request.params.skip_special_tokens for request in runner.requests)
        chat(address, tool_choice="required")
        guide = runner.requests[-1].params.guide
        assert guide is not None and f'<[{VOCAB_SIZE}]> "now" <[{VOCAB_SIZE + 1}]>' in guide.text
        chat(address, tool_choice="none")
        assert runner.requests[-1].params.skip_special_tokens


def test_openais_client_runs_a_tool(hermes: str, runner: ScriptedRunner) -> None:
    """A call, its result sent back as clients do, and the answer; whole and by the client's own stream helper."""
    runner.script = lambda request: outputs(request, TWO if len(runner.requests) == 1 else "Sunny.")
    with openai.OpenAI(base_url=f"http://{hermes}/v1", api_key="none", max_retries=0) as client:
        message = client.chat.completions.create(model="mock", messages=MESSAGES, tools=TOOLS).choices[0].message
        assert message.tool_calls is not None and message.content == "Let me look."
        first = message.tool_calls[0]
        assert first.type == "function" and json.loads(first.function.arguments) == {"city": "Paris 😀"}
        results: list[Any] = [{"role": "tool", "tool_call_id": each.id, "content": "sun"}
                              for each in message.tool_calls]
        history: list[Any] = [*MESSAGES, message.model_dump(exclude_none=True), *results]
        answer = client.chat.completions.create(model="mock", messages=history, tools=TOOLS)
        assert answer.choices[0].message.content == "Sunny." and answer.choices[0].message.tool_calls is None
        prompt = special_tokenizer(HERMES).decode(runner.requests[1].prompt_token_ids)
        assert prompt == "[weather 1][now 0]user:hi|assistant:Let me look.Paris 😀|tool:sun|tool:sun|"
        runner.requests.clear()
        with client.chat.completions.stream(model="mock", messages=MESSAGES, tools=TOOLS) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls" and final.message.tool_calls is not None
        assert [call.function.name for call in final.message.tool_calls] == ["weather", "now"]


def test_counting_tokens_of_tools(hermes: str, address: str) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS}
    assert http_call(hermes, "POST", "/tokenize", body)[2]["count"] == len("[weather 1][now 0]user:hi|")
    status, _, answer = http_call(address, "POST", "/tokenize", body)
    assert (status, answer["error"]["param"]) == (400, "tools")
