"""Whatever is added, named, moved and collected in whatever order: what the lock file or its history names is there."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ingot.runtime.engine_file import EngineFile
from ingot.runtime.errors import IngotError
from ingot.runtime.store.lock_file import again, before, move_of, removal
from ingot.runtime.store.store import Store
from tests.runtime.store.samples import engine, hash_of

NUMBERS = st.integers(0, 5)
NAMES = st.sampled_from(["prod", "canary", "v1.2"])


class Collecting(RuleBasedStateMachine):
    """kept: the engines that must be there, as far as they ever were: all that the history names, until a collection
    was allowed to forget a part of it."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ingot-gc-"))
        # Neighbours share a weight, so that no blob belongs to one engine alone.
        self.paths = [engine(self.folder / f"{number}.engine", bytes([number]) * 3000, bytes([number + 1]) * 3000)
                      for number in range(6)]
        self.hashes = [hash_of(path) for path in self.paths]
        self.store = Store(self.folder / "store")
        self.there: set[str] = set()

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(number=NUMBERS)
    def add(self, number: int) -> None:
        with EngineFile.open(self.paths[number]) as file:
            self.store.add(file)
        self.there.add(self.hashes[number])

    @rule(name=NAMES, number=NUMBERS)
    def name(self, name: str, number: int) -> None:
        """add or pin; of an engine that is not in the store nothing."""
        hash = self.hashes[number]
        if hash not in self.there:
            return
        action = "pin" if name in self.store.lock.now() else "add"
        self.store.lock.move(name, move_of(self.store.manifest(hash), hash, action, ""))

    @rule(name=NAMES, steps=st.integers(1, 2))
    def rollback(self, name: str, steps: int) -> None:
        try:
            target = before(self.store.lock.history(name), steps)
            self.store.lock.move(name, again(target, "rollback" if name in self.store.lock.now() else "add", ""))
        except IngotError:
            pass  # there is nothing to go back to

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        if name in self.store.lock.now():
            self.store.lock.move(name, removal(self.store.lock.now()[name], ""))

    @rule(data=st.binary(min_size=1, max_size=50), digit=st.sampled_from("0123456789abcdef"))
    def break_off_a_transfer(self, data: bytes, digit: str) -> None:
        path = self.store.blobs.folder / "partial" / (digit * 64)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    @rule()
    @precondition(lambda self: self.store.folder.exists())
    def collect(self) -> None:
        told = self.store.garbage()
        assert self.store.collect_garbage() == told
        named = self.store.lock.named()
        self.there &= named
        assert set(told.engines).isdisjoint(named)
        assert set(self.store.engines()) == self.there and self.store.blobs.partial() == []
        assert self.store.garbage().size_bytes == 0, "nothing is left for a second time"

    @rule(keep=st.integers(0, 3))
    @precondition(lambda self: self.store.folder.exists())
    def collect_all_but_the_last_moves(self, keep: int) -> None:
        self.store.collect_garbage(keep)
        kept = self.store.lock.named(keep)
        assert {move.hash for move in self.store.lock.now().values()} <= kept
        self.there &= kept

    @invariant()
    def what_is_there_is_whole(self) -> None:
        if not hasattr(self, "store"):
            return
        assert set(self.store.engines()) == self.there
        check = self.store.verify(sorted(self.there))
        assert check.good and check.num_engines == len(self.there)
        for name, move in self.store.lock.now().items():
            assert move.hash in self.there or move.action in ("rollback", "add"), name
            if move.hash in self.there:
                with self.store.open(move.hash) as file:
                    assert file.hash == move.hash


Collecting.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None,
                                        suppress_health_check=[HealthCheck.too_slow])
test_no_collection_removes_what_is_named = Collecting.TestCase
