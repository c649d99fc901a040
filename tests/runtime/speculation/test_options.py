"""--speculative-tokens of each verb, and what the server tells of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot.runtime.cli import main
from ingot.runtime.executor.loading import EngineOptions, LoadedEngine
from ingot.runtime.program import Limits
from ingot.runtime.scheduler import SchedulerSettings, SettingsError

pytestmark = pytest.mark.usefixtures("free_steps")


def ingot(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return status, out, err


def test_generate(capsys: pytest.CaptureFixture[str], mock_path: Path) -> None:
    arguments = ["generate", mock_path, "Hello", "--raw", "--max-tokens", 20, "--ignore-eos", "--json"]
    told = []
    for drafts in (0, 3):
        status, out, _ = ingot(capsys, *arguments, "--speculative-tokens", drafts)
        assert status == 0
        told.append(json.loads(out))
    assert told[0]["token_ids"] == told[1]["token_ids"] and told[0]["text"] == told[1]["text"]


def test_bench_tells_what_was_accepted(capsys: pytest.CaptureFixture[str], mock_path: Path) -> None:
    """Random prompts of a model that soon repeats itself."""
    status, out, _ = ingot(capsys, "bench", mock_path, "--speculative-tokens", 3, "--isl", 4, "--osl", 40,
                           "--concurrency", 1, "--num-requests", 6, "--json")
    assert status == 0
    server = json.loads(out)["server"]
    assert server["draft_tokens"] > 0
    assert server["draft_acceptance"] == round(server["accepted_draft_tokens"] / server["draft_tokens"], 4)


def test_settings_are_told_and_given_to_the_cache(mock_path: Path) -> None:
    with LoadedEngine(mock_path, EngineOptions(speculative_tokens=2, kv_cache_tokens=100)) as engine:
        assert engine.facts()["speculative_tokens"] == 2 and engine.kv.max_draft == 2


@pytest.mark.parametrize("verb", [("generate", "Hello"), ("bench",)])
@pytest.mark.parametrize("count", [-1, 65])
def test_numbers_that_are_none(capsys: pytest.CaptureFixture[str], mock_path: Path, verb: tuple[str, ...],
                               count: int) -> None:
    status, _, err = ingot(capsys, verb[0], mock_path, *verb[1:], "--speculative-tokens", count)
    assert status == 2 and "a whole number of 0 to 64" in err and err.count("\n") <= 2


def test_an_engine_without_rows_for_drafts() -> None:
    with pytest.raises(SettingsError, match=r"(?s)needs a row of logits.*--max-batch-size 5"):
        SchedulerSettings.within(Limits(1, 16, 64), speculative_tokens=4)
    assert SchedulerSettings.within(Limits(2, 16, 64), speculative_tokens=4).speculative_tokens == 4
