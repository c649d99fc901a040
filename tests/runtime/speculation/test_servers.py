"""Several tokens of one answer in one output, as clients see them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ingot.runtime.executor import step_loop
from ingot.runtime.executor.loading import EngineOptions
from ingot.runtime.speculation import Speculator
from tests.runtime.servers.test_http_engine import client_of, serving
from tests.runtime.servers.test_metrics_text import page, samples

pytestmark = pytest.mark.usefixtures("free_steps")


class Told:
    """Proposes what the requests before have answered."""

    certainty = 1
    known: tuple[int, ...] = ()

    def propose(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        begin = len(tokens)
        return list(self.known[begin : begin + max_tokens]) if tuple(tokens) == self.known[:begin] else []

    def accepted(self, count: int) -> None:
        pass


def extra(choice: Any) -> dict[str, Any]:
    """Fields that OpenAI does not have."""
    fields: dict[str, Any] = choice.model_extra
    return fields


def ask(address: str) -> dict[str, Any]:
    """The answer to one prompt, whole and as streams."""
    with client_of(address) as client:
        asked: dict[str, Any] = {"model": "tiny", "prompt": "Hello", "max_tokens": 24, "temperature": 0, "logprobs": 2,
                                 "extra_body": {"ignore_eos": True, "return_token_ids": True}}
        whole = client.completions.create(**asked)
        chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        chat = list(client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=24, temperature=0,
            stream=True, logprobs=True, stop=["\n\n\n"], extra_body={"ignore_eos": True}))
    choice, told = whole.choices[0], [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert choice.logprobs is not None
    usage = chunks[-1].usage
    assert usage is not None
    rows = [chunk.choices[0].logprobs for chunk in chat]
    entries = [entry for row in rows if row is not None for entry in row.content or ()]
    return {
        "text": choice.text, "ids": extra(choice)["token_ids"], "logprobs": choice.logprobs.model_dump(),
        "streamed": "".join(chunk.text for chunk in told),
        "streamed ids": [token for chunk in told for token in extra(chunk)["token_ids"]],
        "offsets": [offset for chunk in told if chunk.logprobs for offset in chunk.logprobs.text_offset or ()],
        "usage": (usage.prompt_tokens, usage.completion_tokens),
        "chat": "".join(chunk.choices[0].delta.content or "" for chunk in chat),
        "chat tokens": [entry.token for entry in entries], "ends": told[-1].finish_reason,
    }


def test_openai_clients_see_no_difference(mock_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_loop, "Speculator", partial(Speculator, make_drafter=Told))
    answers = []
    for drafts in (0, 3):
        options = EngineOptions(kv_cache_tokens=200, num_workers=1, speculative_tokens=drafts)
        with serving(mock_path, options) as (address, loaded):
            answers.append(ask(address))
            counted = samples(page(address))
            assert loaded.tokenizer is not None
            Told.known = (*loaded.tokenizer.encode("Hello"), *answers[0]["ids"])
        assert (counted["ingot_draft_tokens_accepted_total[]"] > 0) == (drafts > 0)
        assert counted["ingot_draft_tokens_total[]"] >= counted["ingot_draft_tokens_accepted_total[]"]
    assert answers[0]["ids"] == answers[0]["streamed ids"] and answers[0]["usage"] == (5, 24)
    logprobs = [answer.pop("logprobs") for answer in answers]
    assert answers[0] == answers[1]
    assert logprobs[0]["tokens"] == logprobs[1]["tokens"] and logprobs[0]["text_offset"] == logprobs[1]["text_offset"]
    assert logprobs[0]["token_logprobs"] == pytest.approx(logprobs[1]["token_logprobs"], abs=1e-4)
