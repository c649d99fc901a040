"""/tokenize, /detokenize and /version: the token ids that a completion would compute."""
from __future__ import annotations

from typing import Any

import pytest

from ingot.runtime.tokenizer import Tokenizer
from tests.runtime.servers.scripted_engine import ScriptedRunner
from tests.runtime.servers.test_http_server import call

MESSAGES = [{"role": "user", "content": "ab"}]


def tokenize(address: str, **body: Any) -> Any:
    status, headers, answer = call(address, "POST", "/tokenize", body)
    assert status == 200 and headers["ingot-engine-hash"] and answer["count"] == len(answer["tokens"])
    return answer


def test_prompts_and_chats_are_tokenized_as_they_are_computed(address: str, runner: ScriptedRunner) -> None:
    call(address, "POST", "/v1/completions", {"prompt": "ab", "max_tokens": 5})
    call(address, "POST", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 5})
    text, chat = (list(request.prompt_token_ids) for request in runner.requests)
    assert tokenize(address, prompt="ab", model="mock")["tokens"] == text
    assert tokenize(address, messages=MESSAGES)["tokens"] == chat
    limit = call(address, "GET", "/v1/models/mock")[2]["max_model_len"]
    assert tokenize(address, prompt="")["max_model_len"] == limit


def test_the_template_gets_what_was_asked(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def recorded(self: Tokenizer, messages: Any, **variables: Any) -> str:
        seen.append(variables)
        return "x"

    monkeypatch.setattr(Tokenizer, "chat", recorded)
    tokenize(address, messages=MESSAGES)
    tokenize(address, messages=MESSAGES, add_generation_prompt=False, chat_template_kwargs={"date": "today"})
    assert seen == [{"add_generation_prompt": True}, {"add_generation_prompt": False, "date": "today"}]


def test_tokens_become_their_text_again(address: str) -> None:
    tokens = tokenize(address, messages=[{"role": "user", "content": "grüße"}])["tokens"]
    status, _, answer = call(address, "POST", "/detokenize", {"tokens": tokens})
    assert status == 200 and "grüße" in answer["prompt"]
    assert call(address, "POST", "/detokenize", {"tokens": []})[2] == {"prompt": ""}


@pytest.mark.parametrize(("path", "body", "param"), [
    ("tokenize", {}, "prompt"), ("tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
    ("tokenize", {"prompt": 3}, "prompt"), ("tokenize", {"promt": "a"}, "promt"),
    ("tokenize", {"prompt": "a", "add_generation_prompt": True}, "messages"),
    ("tokenize", {"messages": []}, "messages"), ("tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
    ("tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    ("detokenize", {}, "tokens"), ("detokenize", {"tokens": [1, -1]}, "tokens[1]"),
    ("detokenize", {"tokens": [10**9]}, "tokens[0]"), ("detokenize", {"tokens": "ab"}, "tokens"),
])
def test_what_is_wrong_is_named(address: str, path: str, body: dict[str, Any], param: str) -> None:
    status, _, answer = call(address, "POST", f"/{path}", body)
    assert (status, answer["error"]["param"]) == (400, param)


def test_another_model_is_not_found(address: str) -> None:
    for path, body in (("tokenize", {"prompt": "a"}), ("detokenize", {"tokens": [1]})):
        assert call(address, "POST", f"/{path}", {**body, "model": "other"})[0] == 404


def test_version(address: str) -> None:
    status, _, answer = call(address, "GET", "/version")
    assert status == 200 and set(answer) == {"version"} and answer["version"]
