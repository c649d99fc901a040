"""tools/perplexity.py on the mock engine."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.runtime.mock_engine import compile_code, reference_logits, write_engine
from tools import perplexity

TEXT = "The quick brown fox jumps over the lazy dog. " * 5


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mock")
    return write_engine(folder / "mock.engine", compile_code(folder))


def run(monkeypatch: pytest.MonkeyPatch, *argv: object) -> int:
    monkeypatch.setattr(sys, "argv", ["perplexity", "no checkpoint", *map(str, argv), "--no-reference"])
    return perplexity.main()


def test_against_the_reference_in_numpy(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    assert run(monkeypatch, engine, engine, "--text", text, "--tokens", 100, "--window", 25, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    # The byte-level vocabulary in order: printable ASCII starts at "!" = 0; a blank is the letter Ġ.
    tokens = [ord(char) - ord("!") if char != " " else 220 for char in TEXT[:100]]
    nll = []
    for begin in range(0, 100, 25):
        window = tokens[begin : begin + 25]
        rows = reference_logits(window)[:-1].astype(np.float64)
        nll += list(np.log(np.exp(rows).sum(1)) - rows[range(24), window[1:]])
    first, second = report["results"]
    assert (first["num_predicted"], report["num_tokens"]) == (96, 100)
    assert first["perplexity"] == pytest.approx(math.exp(np.mean(nll)), rel=1e-4)
    assert (first["increase"], second["increase"]) == (0, 0)


def test_for_people(engine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, engine, "--tokens", 200, "--window", 40) == 0
    out = capsys.readouterr().out
    assert out.startswith("documentation of Python 3.")
    assert "mock.engine" in out
    assert "+0.00%" in out


def test_a_text_that_is_too_short(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("short")
    assert run(monkeypatch, engine, "--text", text) == 2
    assert "the text has 5 tokens, --tokens asks for 24000" in capsys.readouterr().err
