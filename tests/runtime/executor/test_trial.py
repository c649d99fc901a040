"""Engines are tried out before they take requests; those that answer wrongly are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ingot.compiler.self_test import record_self_test
from ingot.runtime.devices import cpu
from ingot.runtime.engine import Engine
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.executor import loading, trial
from ingot.runtime.executor.loading import EngineOptions, LoadedEngine
from ingot.runtime.program import Program
from ingot.runtime.self_test import NUM_TOKENS, SelfTest, SelfTestFailed
from ingot.runtime.step import StepInputs
from tests.runtime.executor.null_engine import Sink, request
from tests.runtime.mock_engine import reference_greedy, write_engine

OPTIONS = EngineOptions(kv_cache_tokens=100, num_workers=1)


@pytest.fixture
def recorded_path(mock_code: bytes, tmp_path: Path) -> Path:
    return write_engine(tmp_path / "recorded.engine", mock_code, before_finish=record_self_test)


def test_an_engine_gives_again_what_was_recorded(recorded_path: Path) -> None:
    with EngineFile.open(recorded_path) as file, Engine.load(recorded_path, num_workers=1) as engine:
        record = SelfTest.read(file)
        assert record is not None and len(record.token_ids) == NUM_TOKENS
        logits = engine.logits([*record.prompt_token_ids, *record.token_ids])[len(record.prompt_token_ids) - 1 :]
    for row, token, (ids, values) in zip(logits, record.token_ids, record.top, strict=False):
        assert int(row.argmax()) == token == ids[0]
        assert values[0] == pytest.approx(-float(np.log(np.exp(row - row.max()).sum())), abs=1e-4)
    with LoadedEngine(recorded_path, OPTIONS, extent="full") as loaded:
        assert loaded.trial is not None and loaded.trial.recorded and loaded.trial.largest_difference < 1e-4


def test_a_trial_leaves_no_trace(mock_path: Path, tmp_path: Path) -> None:
    sink, log = Sink(), tmp_path / "requests"
    with LoadedEngine(mock_path, replace(OPTIONS, log_requests=str(log)), extent="full") as loaded:
        assert loaded.trial is not None and not loaded.trial.recorded
        recorder, usage = loaded.executor.recorder, loaded.kv.usage()
        assert (recorder.requests_received, recorder.steps, loaded.kv.stats.queried_tokens) == (0, 0, 0)
        assert (usage.num_used, usage.num_cached) == (0, 0) and log.read_text() == ""
        # Rows of the step's inputs that the trial has filled are no obstacle to the first requests.
        for number, prompt in enumerate(([5] * 20, [9] * 9, [5] * 20)):
            loaded.executor.submit(request(str(number), prompt, 6), sink)
            assert sink.finished(str(number)).token_ids == reference_greedy(prompt, 6)


def test_lowered_limits_and_little_memory(recorded_path: Path) -> None:
    for options in (replace(OPTIONS, max_seq_len=30), replace(OPTIONS, max_seq_len=2),
                    replace(OPTIONS, kv_cache_tokens=4)):
        with LoadedEngine(recorded_path, options, extent="full") as loaded:
            assert loaded.trial is not None


class Broken(cpu.CpuProgram):
    """Changes the tokens or the log probabilities of steps of so many rows."""

    rows: Callable[[int], bool]
    change: Callable[[Broken, StepInputs], None]

    def wait(self):  # type: ignore[no-untyped-def]
        inputs = self._in_flight
        outputs = super().wait()
        assert inputs is not None
        if type(self).rows(inputs.num_logits):
            type(self).change(self, inputs)
        return outputs


def shifted(program: Broken, inputs: StepInputs) -> None:
    inputs.sampling.outputs.top_logprobs[:] -= 0.5


def invalid(program: Broken, inputs: StepInputs) -> None:
    inputs.sampling.outputs.tokens[:] = -1


def test_a_brief_trial_asks_for_the_record_alone(recorded_path: Path, mock_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    ask = trial._Asking.ask

    def counted(self: trial._Asking, prompts: list[list[int]], max_tokens: int) -> object:
        asked.append(len(prompts))
        return ask(self, prompts, max_tokens)

    monkeypatch.setattr(trial._Asking, "ask", counted)
    for path, extent, expected in ((recorded_path, "brief", [1]), (mock_path, "brief", [1]),
                                   (recorded_path, "full", [1, 1, 4, 1]), (mock_path, "full", [1, 4, 1])):
        with LoadedEngine(path, OPTIONS, extent=extent):  # type: ignore[arg-type]
            assert asked == expected
        asked.clear()


@pytest.mark.parametrize(("rows", "change", "message"), [
    (lambda count: True, shifted, "other logits than were recorded"),
    (lambda count: count > 1, shifted, "another answer alone than among 3 others"),
    (lambda count: count > 1, invalid, "logits are no numbers"),
])
def test_a_broken_engine(recorded_path: Path, monkeypatch: pytest.MonkeyPatch, rows: Callable[[int], bool],
                         change: Callable[[Broken, StepInputs], None], message: str) -> None:
    def load(engine: EngineFile, tokens: int, workers: int | None = None, host: int = 0, **more: object) -> Program:
        return Broken(engine, tokens, workers, host)

    monkeypatch.setattr(Broken, "rows", staticmethod(rows), raising=False)
    monkeypatch.setattr(Broken, "change", staticmethod(change), raising=False)
    monkeypatch.setattr(loading, "load_program", load)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(SelfTestFailed, match=message):
        LoadedEngine(recorded_path, OPTIONS, extent="full")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
