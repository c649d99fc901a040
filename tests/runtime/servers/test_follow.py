"""What a follower tries again, and what it leaves alone until the file changes."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ingot.runtime.errors import IngotError, RequestError, WorkFailed
from ingot.runtime.executor.overlap import NoRoom
from ingot.runtime.executor.request import Draining
from ingot.runtime.self_test import SelfTestFailed
from ingot.runtime.servers.follow import Follower
from ingot.runtime.servers.swap import SwapRequest
from ingot.runtime.store.lock_file import LockFile, move_of
from ingot.runtime.store.store import NotInStore
from tests.runtime.engine_sample import MANIFEST_FIELDS


class Swaps:
    """Fails with each error in turn, then succeeds."""

    def __init__(self, context: Any, *errors: IngotError) -> None:
        self.asked: list[str | None] = []
        self._context = context
        self._errors = list(errors)

    async def swap(self, request: SwapRequest) -> None:
        self.asked.append(request.engine)
        if self._errors:
            raise self._errors.pop(0)
        self._context.current = SimpleNamespace(hash=request.engine)


@pytest.fixture
def lock(tmp_path: Path) -> LockFile:
    lock = LockFile(tmp_path / "engines.lock")
    mean(lock, "1", "add")
    return lock


def mean(lock: LockFile, digit: str, action: str = "pin") -> None:
    lock.move("prod", move_of(MANIFEST_FIELDS, digit * 64, action, ""))


def follow(lock: LockFile, *errors: IngotError, retry_s: float = 0.0, fetch: Any = None) -> tuple[Follower, Swaps, Any]:
    context = SimpleNamespace(current=SimpleNamespace(hash="1" * 64), swaps=Counter(), is_draining=False)
    swaps = Swaps(context, *errors)
    follower = Follower(context, swaps, lock, "prod", 0.0, fetch, retry_s)  # type: ignore[arg-type]
    return follower, swaps, context


def look(follower: Follower, times: int = 1) -> None:
    for _ in range(times):
        asyncio.run(follower.look())


def test_nothing_changes(lock: LockFile) -> None:
    follower, swaps, _ = follow(lock)
    look(follower, 3)
    assert swaps.asked == []


@pytest.mark.parametrize("error", [NotInStore("not there"), NoRoom("no room")])
def test_what_may_succeed_later_is_tried_again_and_told_once(lock: LockFile, error: IngotError,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    follower, swaps, _ = follow(lock, error, error)
    mean(lock, "2")
    look(follower, 5)
    assert swaps.asked == ["2" * 64] * 3
    assert capsys.readouterr().err.count(str(error)) == 1
    follower, swaps, _ = follow(lock, error, retry_s=100.0)
    look(follower, 5)
    assert swaps.asked == ["2" * 64], "not before its time"


@pytest.mark.parametrize("error", [SelfTestFailed("wrong"), WorkFailed("broken"), RequestError("refused")])
def test_what_failed_is_left_alone_until_the_file_changes(lock: LockFile, error: IngotError) -> None:
    follower, swaps, _ = follow(lock, error)
    mean(lock, "2")
    look(follower, 5)
    assert swaps.asked == ["2" * 64]
    mean(lock, "3")
    look(follower, 3)
    mean(lock, "2", "rollback")
    look(follower, 3)
    assert swaps.asked == ["2" * 64, "3" * 64, "2" * 64]


def test_a_file_in_bad_shape_is_counted_once_for_each_problem(lock: LockFile,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    follower, swaps, context = follow(lock)
    good = lock.path.read_bytes()
    for data in (b"<<<<<<<", b"<<<<<<<", b"", b"", good, b"", b"<<<<<<<"):
        lock.path.write_bytes(data)
        look(follower, 2)
    assert swaps.asked == [] and context.swaps["bad_lock"] == 4
    assert capsys.readouterr().err.count("goes on") == 4


def test_engines_are_fetched_before_they_take_over(lock: LockFile) -> None:
    fetched: list[str] = []
    left = [2]

    def fetch(hash: str) -> None:
        fetched.append(hash)
        if left[0]:
            left[0] -= 1
            raise RequestError("not pushed yet")

    follower, swaps, _ = follow(lock, fetch=fetch)
    mean(lock, "2")
    look(follower, 6)
    assert fetched == ["2" * 64] * 3 and swaps.asked == ["2" * 64]


def test_a_draining_server_follows_no_more(lock: LockFile) -> None:
    follower, swaps, context = follow(lock, Draining("bye"))
    mean(lock, "2")
    look(follower)
    context.is_draining = True
    asyncio.run(follower.run())
    assert swaps.asked == ["2" * 64]
