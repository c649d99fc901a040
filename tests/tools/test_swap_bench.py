"""Rollback under load, on the mock engine: no failed and no mixed answer, and the tool says so."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.mock_engine import TABLE, compile_code, write_engine
from tests.runtime.servers.swap_server import HEADS
from tools.bench import swap
from tools.bench.answer_check import AnswerCheck


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("swapped")
    code = compile_code(folder)
    tables = {"a": TABLE, "b": np.ascontiguousarray(TABLE[:, ::-1])}
    return [write_engine(folder / f"{name}.engine", code, head=HEADS[name], table=tables[name]) for name in tables]


def run(engines: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
        *options: str) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["swap", *map(str, engines), "--json", "--num-prompt-tokens", "8", *options])
    status = swap.main()
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("clients", "swaps"), [
    (8, 4), pytest.param(32, 20, marks=pytest.mark.slow),
])
def test_rollback_under_load(engines: list[Path], clients: int, swaps: int, monkeypatch: pytest.MonkeyPatch,
                             capsys: pytest.CaptureFixture[str]) -> None:
    status, told = run(engines, monkeypatch, capsys, "--clients", str(clients), "--swaps", str(swaps), "--pause", "0.2",
                       "--max-tokens", "30")
    assert status == 0 and all(told["held"].values()), told
    assert told["swaps"] == swaps and told["answers"] > 2 * swaps and told["failed"] == {} and told["mixed"] == 0
    assert told["as_computed_alone"] == told["answers"] and told["planted_mixed_answers_noticed"] == "96 of 96"
    assert told["trials"] == {"recorded": swaps} or told["trials"].keys() == {"recorded", "returned"}
    assert "FAILED_PRECONDITION" in told["broken_engine"]


def test_a_mixed_answer_is_noticed(engines: list[Path], monkeypatch: pytest.MonkeyPatch,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    """Each engine's answers under the other's name."""
    right = swap.checks

    @contextmanager
    def exchanged(paths: Sequence[Path], load: swap.Load) -> Iterator[dict[str, AnswerCheck]]:
        with right(paths, load) as found:
            yield dict(zip(found, reversed(found.values()), strict=True))

    monkeypatch.setattr(swap, "checks", exchanged)
    status, told = run(engines, monkeypatch, capsys, "--clients", "2", "--swaps", "1", "--pause", "0.1",
                       "--max-tokens", "20")
    assert status == 1 and told["mixed"] == told["answers"] > 0 and not told["held"]["no answer is mixed"]
    assert told["held"]["mixed answers are noticed"]
