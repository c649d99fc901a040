"""engines.lock: written and read the same, merged by git, a name never moves silently."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.runtime.store.lock_file import LockError, LockFile, Move, before, check_name, move_of, parse, removal, render

HASHES = [digit * 64 for digit in "abcdef"]
FIRST = Move(HASHES[0], "smollm2", "cpu:x86-64-v3", "w4a8", "max_seq_len=8192", "", datetime(2026, 1, 2, tzinfo=UTC),
             "ada", "add", "")


def pin(number: int, action: str = "pin", why: str = "") -> Move:
    return replace(FIRST, hash=HASHES[number], action=action, why=why)


@given(st.text(), st.text(), st.datetimes(timezones=st.just(UTC), min_value=datetime(1980, 1, 1)))
def test_whatever_is_written_is_read(why: str, model: str, time: datetime) -> None:
    move = replace(FIRST, why=why, model=model, time=time.replace(microsecond=0))
    names = {"prod": [move, pin(1)], "a.b-c_1": [move]}
    assert parse(render(names)) == names


def test_half_a_surrogate_pair_does_no_harm() -> None:
    assert parse(render({"prod": [replace(FIRST, why="\ud800")]}))["prod"][0].why == "?"


def test_a_name_never_moves_silently(tmp_path: Path) -> None:
    lock = LockFile(tmp_path / "engines.lock")
    assert lock.read() == {} and lock.named() == set()
    lock.move("prod", FIRST)
    with pytest.raises(LockError, match="ingot engines pin prod bbbbbbbbbbbb"):
        lock.move("prod", pin(1, "add"))
    with pytest.raises(LockError, match="no engine is named canary; the names are: prod"):
        lock.move("canary", pin(1))
    lock.move("prod", pin(1, why="better"))
    assert lock.now()["prod"].hash == HASHES[1] and [move.why for move in lock.history("prod")] == ["", "better"]
    with pytest.raises(LockError, match="no engine is or was named canary"):
        lock.history("canary")


def test_a_removed_name_keeps_its_history_and_can_be_added_again(tmp_path: Path) -> None:
    lock = LockFile(tmp_path / "engines.lock")
    lock.move("prod", FIRST)
    lock.move("prod", removal(FIRST, "retired"))
    assert lock.now() == {} and lock.named() == {HASHES[0]}
    with pytest.raises(LockError, match="no engine is named prod"):
        lock.move("prod", pin(1))
    lock.move("prod", pin(1, "add"))
    assert lock.now()["prod"].hash == HASHES[1] and len(lock.history("prod")) == 3


def test_what_counts_as_named(tmp_path: Path) -> None:
    lock = LockFile(tmp_path / "engines.lock")
    for number in range(4):
        lock.move("prod", pin(number, "add" if number == 0 else "pin"))
    assert lock.named() == set(HASHES[:4])
    assert lock.named(keep_history=0) == {HASHES[3]} and lock.named(keep_history=2) == set(HASHES[1:4])


@pytest.mark.parametrize(("moves", "steps", "expected"), [
    ([0, 1], 1, 1 - 1), ([0, 1, 1], 1, 0), ([0, 1, 2], 2, 0), ([0, 1, 0], 1, 1), ([0, 1, 0], 2, 0),
])  # fmt: skip
def test_steps_back(moves: list[int], steps: int, expected: int) -> None:
    assert before([pin(number) for number in moves], steps).hash == HASHES[expected]


@pytest.mark.parametrize("steps", [-1, 0, 2])
def test_no_step_beyond_the_history(steps: int) -> None:
    with pytest.raises(LockError, match="has changed 1 times"):
        before([pin(0), pin(1), pin(1)], steps)


def test_moves_by_several_processes_at_once(tmp_path: Path) -> None:
    lock = LockFile(tmp_path / "engines.lock")
    children = []
    for name in "abcd":
        child = os.fork()
        if child == 0:
            try:
                lock.move(name, FIRST)
                for number in (1, 2, 3):
                    lock.move(name, pin(number))
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    assert lock.read() == {name: [FIRST, pin(1), pin(2), pin(3)] for name in "abcd"}


def test_git_merges_moves_of_two_names(tmp_path: Path) -> None:
    base = {"canary": [FIRST], "prod": [FIRST]}
    ours = {"canary": [FIRST, pin(1)], "prod": [FIRST]}
    theirs = {"canary": [FIRST], "prod": [FIRST, pin(2)]}
    status, text = merge(tmp_path, base, ours, theirs)
    assert status == 0 and parse(text) == {"canary": [FIRST, pin(1)], "prod": [FIRST, pin(2)]}


def test_two_moves_of_one_name_are_a_conflict_that_is_explained(tmp_path: Path) -> None:
    status, text = merge(tmp_path, {"prod": [FIRST]}, {"prod": [FIRST, pin(1)]}, {"prod": [FIRST, pin(2)]})
    assert status != 0
    with pytest.raises(LockError, match="Two branches moved the same name"):
        parse(text)


def merge(folder: Path, *versions: dict[str, list[Move]]) -> tuple[int, str]:
    """What git makes of base, ours, theirs."""
    base, ours, theirs = (folder / name for name in ("base", "ours", "theirs"))
    for path, names in zip((base, ours, theirs), versions, strict=True):
        path.write_text(render(names))
    done = subprocess.run(["git", "merge-file", "-p", ours, base, theirs], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize(("old", "new", "message"), [
    ('hash = "a', 'hash = "A', "prod, table 1: hash is .*expected 64 hexadecimal digits"),
    ('action = "add"', 'action = "move"', "action is 'move'; expected one of add, pin"),
    ('by = "ada"\n', "", "expected the keys hash, model"),
    ('by = "ada"', "by = 3", "by is 3; expected a text"),
    ("time = 2026-01-02T00:00:00Z", 'time = "now"', "time is 'now'; expected a time"),
    ("[[prod]]", "[prod]", r"expected \[\[prod\]\]"),
    ("[[prod]]", '[["a b"]]', "'a b' is no name"),
    ("hash =", "hash ==", "not TOML"),
])  # fmt: skip
def test_a_broken_lock_file_says_where(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "engines.lock"
    text = render({"prod": [FIRST]})
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(LockError, match=message) as caught:
        LockFile(path).read()
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["", "a b", ".x", "x.engine", "deadbeef", "a/b", "x" * 101, "ä"])
def test_names_that_could_be_something_else(name: str) -> None:
    with pytest.raises(LockError, match="is no name"):
        check_name(name)


def test_a_move_tells_what_the_engine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_USER", "ci")
    manifest = {"model": {"name": "m"}, "target": {"name": "h200"}, "precision": "fp8",
                "recipe": {"name": "m", "target": "h200", "max_seq_len": 10, "nothing": None},
                "quality": {"perplexity": 21.123456789}}
    move = move_of(manifest, HASHES[0], "add", "why")
    assert (move.model, move.target, move.precision, move.by) == ("m", "h200", "fp8", "ci")
    assert (move.recipe, move.quality) == ("max_seq_len=10", "perplexity=21.1235")
