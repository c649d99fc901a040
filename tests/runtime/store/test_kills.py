"""kill -9 at random moments of add, pull, pin and gc: the store verifies, and what it has can be used."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from ingot.runtime.engine_file import EngineFile
from ingot.runtime.store.remotes import open_remote
from ingot.runtime.store.store import Store
from ingot.runtime.store.transfer import pull, push
from tests.runtime.store.samples import add, engine, move

NUM_KILLS = 50


def test_random_kills_leave_a_store_that_verifies(tmp_path: Path) -> None:
    paths = [engine(tmp_path / f"{i}.engine", *(bytes([i, j]) * 40_000 for j in range(4))) for i in range(3)]
    remote_url = str(tmp_path / "remote")
    source = Store(tmp_path / "source")
    hashes = [add(source, path) for path in paths]
    with open_remote(remote_url) as remote:
        for hash in hashes:
            push(source, remote, hash)
    store = Store(tmp_path / "store")
    kept = add(store, paths[0], "prod")

    def cycle() -> None:
        """Adds, pulls, pins, and removes it all again."""
        with EngineFile.open(paths[1]) as file:
            store.add(file)
            store.lock.move("prod", move(file, "pin"))
        with open_remote(remote_url) as remote:
            pull(store, remote, hashes[2])
        with EngineFile.open(paths[0]) as file:
            store.lock.move("prod", move(file, "pin"))
        store.collect_garbage(keep_history=0)

    def work() -> None:
        while True:
            cycle()

    begin = time.perf_counter()
    cycle()
    longest_s = 1.5 * (time.perf_counter() - begin)  # on a busy machine a fixed time would hit its beginning alone
    chance = random.Random(1)
    left = set()
    for _ in range(NUM_KILLS):
        kill_during(work, chance.uniform(0.001, longest_s))
        check = store.verify()
        assert check.good, check
        now = store.lock.now()["prod"].hash
        assert store.has(now) and now in hashes[:2]
        for hash in store.engines():
            with store.open(hash) as file:
                assert len(file.verify()) == len(file.sizes)
        left.add((len(store.engines()), len(list(store.blobs)), len(store.blobs.partial()), now))
    assert len(left) > 5, "the kills hit different moments"

    # What the killed ones left is no obstacle.
    for path in paths:
        add(store, path)
    with EngineFile.open(paths[0]) as file:
        store.lock.move("prod", move(file, "pin"))
    store.collect_garbage(keep_history=0)
    assert store.engines() == [kept] and store.blobs.partial() == [] and store.verify().good


def kill_during(work: Callable[[], None], seconds: float) -> None:
    """Runs `work` in a process of its own and kills that after a while."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the work ended by itself, with an error"
