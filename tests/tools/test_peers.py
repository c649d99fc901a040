"""The arithmetic of tools/bench/peers: ratios within rounds, rates of a driver, shares of the roofline."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pytest

from ingot.runtime.errors import RequestError
from tools.bench.peers import report
from tools.bench.peers.__main__ import _chosen, _earlier, _keep, prepare
from tools.bench.peers.contestants import Contestant
from tools.bench.peers.environments import run
from tools.bench.peers.job import Job, Result, measure
from tools.bench.peers.prepare import Kitchen, Model, _v4_rope

PEERS = {"Ingot w4a8": "ingot", "A": "a", "B": "b"}
RESULTS = {
    "Ingot w4a8": [Result(generation=200, context=900), Result(generation=300, context=800)],
    "A": [Result(generation=100, context=1000, requests=5), Result(generation=120, context=1000, requests=7)],
    "B": [Result(generation=110, context=10), Result(generation=60, context=10)],
}


def test_a_ratio_is_taken_within_a_round_to_the_best_of_each_task() -> None:
    lines = report.ratios(RESULTS, PEERS)[2:]
    assert lines == ["| Ingot w4a8 | generation | A | 2.25 (2.00–2.50) × |",
                     "| Ingot w4a8 | context | A | 0.85 (0.80–0.90) × |"]


def test_the_table_tells_what_a_peer_cannot_do_and_who_failed() -> None:
    lines = report.table(RESULTS, {"C": "no compiler\nmore"})
    assert lines[2] == "| Ingot w4a8 | 250 (200–300) | 850 (800–900) | – | – | – |"
    assert lines[3].startswith("| A | 110 (100–120) | 1000 (1000–1000) | 6 (5–7) |")
    assert lines[-1] == "| C | failed: no compiler | | | | |"


def test_the_share_of_the_roofline() -> None:
    assert report.roofline(RESULTS, {"Ingot w4a8": 100}, 50_000)[-1] == "| Ingot w4a8 | 0.0 | 500 | 50% |"


def test_a_driver_counts_tokens_after_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def run(prompts: list[list[int]], count: int) -> tuple[list[float], list[int]]:
        asked.append((len(prompts), len(prompts[0]), count))
        time.sleep(0.001)
        return [10.0 + index / 4 for index in range(count)], list(range(count))

    measure(Job("", 2, [1] * 3, [[1] * 5] * 3, [[1] * 4] * 2, new_tokens=9), Result(load_s=1.5), run)
    assert asked == [(1, 4, 8), (1, 3, 9), *[(1, 5, 1)] * 3, (2, 4, 9)]
    result = Result(**json.loads(capsys.readouterr().out.removeprefix("RESULT ")))
    assert result.generation == 4 and result.answer == list(range(9)) and result.load_s == 1.5
    assert result.context is not None and 0 < result.context < 5000
    assert result.requests is not None and 0 < result.requests < 18000


def test_unknown_peers_are_named() -> None:
    assert {contestant.peer for contestant in _chosen("llama.cpp")} == {"ingot", "llama.cpp"}
    with pytest.raises(RequestError, match=r"--peers: nobody unknown; expected some of .*llama\.cpp"):
        _chosen("nobody,llama.cpp")


@pytest.mark.parametrize(("parameters", "old"), [
    ({"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": 5e5}), ({}, {"rope_theta": 1e4}),
    ({"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
     {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
])
def test_rope_in_the_words_of_older_libraries(parameters: dict[str, Any], old: dict[str, float]) -> None:
    assert _v4_rope(parameters) == old


def test_one_that_cannot_be_prepared_keeps_no_other_from_it(tmp_path: Path) -> None:
    def lacks_a_program(kitchen: Kitchen) -> Path:
        run(["no-such-program-anywhere"], tmp_path / "log")
        raise AssertionError

    def lacks_a_file(kitchen: Kitchen) -> Path:
        return Path((tmp_path / "nothing").read_text())

    said: list[str] = []
    kitchen = Kitchen(tmp_path, Model("m", tmp_path, tmp_path), 1, said.append)
    chosen = [Contestant(name, name, make, lambda *_: Result())
              for name, make in [("A", lacks_a_program), ("B", lacks_a_file), ("C", lambda _: tmp_path)]]
    ready, failures = prepare(chosen, kitchen)
    assert ready == {chosen[2]: tmp_path}
    assert failures["A"] == "not prepared: no-such-program-anywhere is not installed here"
    assert "nothing" in failures["B"]
    assert len(said) == 2


def test_an_interrupted_run_goes_on_with_the_next_round(tmp_path: Path) -> None:
    arguments = argparse.Namespace(model="m", threads=2, peers=None, json=tmp_path / "x.json", resume=True)
    assert _earlier(arguments) == ({}, [])
    _keep(arguments, RESULTS, [1.0, 2.0])
    assert _earlier(arguments) == (RESULTS, [1.0, 2.0])
    arguments.threads = 4
    with pytest.raises(RequestError, match=r"x\.json holds rounds of .*'threads': 2.* asked for are .*'threads': 4"):
        _earlier(arguments)
    arguments.json = None
    with pytest.raises(RequestError, match="name it"):
        _earlier(arguments)
