"""ingot chat on the mock engine, whose sequences have 48 tokens at most."""
from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ingot.runtime.cli import chat, main
from ingot.runtime.engine import Engine


def say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str,
        *argv: object) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    status = main(["chat", *map(str, argv)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def answers(out: str) -> list[Any]:
    return [json.loads(line) for line in out.splitlines()]


def test_what_was_said_before_is_part_of_the_next_turn(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mock_path: Path) -> None:
    seen: list[Any] = []
    stream = Engine.stream

    def recorded(self: Engine, prompt: Any, *others: Any) -> Any:
        seen.append(prompt)
        return stream(self, prompt, *others)

    monkeypatch.setattr(Engine, "stream", recorded)
    status, out, err = say(monkeypatch, capsys, "Hi\n\n  \nAnd\n/new\nHi\n/quit\nnever\n", mock_path, "--system", "S",
                           "--max-tokens", 4, "--json")
    first, second, third = answers(out)
    assert (status, err) == (0, "") and first == third and first["num_tokens"] == 4
    begin = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]
    later = [{"role": "assistant", "content": first["text"]}, {"role": "user", "content": "And"}]
    assert seen == [begin, [*begin, *later], begin]
    assert second["finish_reason"] in ("stop", "length")


def test_a_conversation_that_becomes_too_long_is_told_and_goes_on(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mock_path: Path) -> None:
    status, out, err = say(monkeypatch, capsys, f"Hi\n{'x' * 60}\n/new\nHi\n", mock_path, "--max-tokens", 3, "--json")
    first, last = answers(out)
    assert status == 0 and first == last
    assert "sequences of 48 at most" in err and "/new begins another conversation" in err and "Traceback" not in err


def test_an_interrupt_ends_the_answer_not_the_conversation(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mock_path: Path) -> None:
    stream = Engine.stream

    def interrupted(self: Engine, *args: Any) -> Any:
        pieces = stream(self, *args)
        yield next(pieces)
        os.kill(os.getpid(), signal.SIGINT)
        yield from pieces

    monkeypatch.setattr(Engine, "stream", interrupted)
    before = signal.getsignal(signal.SIGINT)
    status, out, _ = say(monkeypatch, capsys, "Hi\nHi\n", mock_path, "--max-tokens", 9, "--json")
    assert status == 0 and [answer["finish_reason"] for answer in answers(out)] == ["interrupted"] * 2
    assert all(answer["num_tokens"] < 9 for answer in answers(out)) and signal.getsignal(signal.SIGINT) is before


def test_answers_are_shown_as_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                   mock_path: Path) -> None:
    _, out, _ = say(monkeypatch, capsys, "Hi\n", mock_path, "--max-tokens", 4, "--json")
    status, text, err = say(monkeypatch, capsys, "Hi\n", mock_path, "--max-tokens", 4)
    answer, = answers(out)
    assert status == 0 and text == answer["text"] + "\n"
    assert err == ("" if answer["finish_reason"] == "stop" else "[length, 4 tokens]\n")


def test_engines_without_a_chat_template_are_refused(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mock_path: Path) -> None:
    monkeypatch.setattr("ingot.runtime.tokenizer.Tokenizer.has_chat_template", False)
    status, _, err = say(monkeypatch, capsys, "Hi\n", mock_path)
    assert status == 2 and "has no chat template" in err and "ingot generate" in err


def test_at_a_terminal_the_end_of_input_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", ended)
    assert chat._read(True) is None
    monkeypatch.setattr("builtins.input", lambda prompt: "hello")
    assert chat._read(True) == "hello"
