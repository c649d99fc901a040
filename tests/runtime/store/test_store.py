"""The store: what engines share is there once, engines are opened where they lie, gc and checks name what they find."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ingot.compiler.engine_writer import EngineWriter
from ingot.runtime.engine_file import EngineFile, WeightsMissing
from ingot.runtime.engine_format import EngineHashMismatch
from ingot.runtime.errors import RequestError
from ingot.runtime.store.store import NotInStore, Store
from tests.runtime.engine_sample import MANIFEST_FIELDS, SMALL, weight_members
from tests.runtime.store.samples import SHARED, add, engine, hash_of, move, sha256


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def damage(path: Path) -> None:
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_engines_share_what_they_have_in_common(store: Store, tmp_path: Path) -> None:
    with EngineFile.open(engine(tmp_path / "a.engine", b"a" * 5000)) as a:
        first = store.add(a)
    with EngineFile.open(engine(tmp_path / "b.engine", b"b" * 7000)) as b:
        second = store.add(b)
    assert (first.num_new_blobs, first.new_bytes) == (first.num_blobs, first.size_bytes)
    assert (second.num_new_blobs, second.new_bytes) == (1, 7000)
    assert store.engines() == sorted([first.hash, second.hash]) and first.hash == a.hash
    assert sum(store.blobs.path(blob).stat().st_size for blob in store.blobs) == first.size_bytes + 7000
    assert store.verify().good


def test_an_engine_is_opened_where_it_lies(store: Store, tmp_path: Path) -> None:
    path = engine(tmp_path / "a.engine", b"a" * 5000)
    hash = add(store, path)
    with EngineFile.open(path) as whole, store.open(hash) as loose:
        assert (loose.hash, loose.manifest, loose.plan) == (whole.hash, whole.manifest, whole.plan)
        assert len(loose.members) == 0
        assert loose.sizes == {name: size for name, size in whole.sizes.items() if name != "manifest.json"}
        for name in loose.sizes:
            assert loose.read(name) == whole.read(name)
            assert np.array_equal(loose.map(name), whole.map(name))
        assert {check.name: check.sha256 for check in loose.verify()} == {
            name: entry["sha256"] for name, entry in whole.manifest["members"].items()}
        with pytest.raises(ValueError, match="read-only"):
            loose.map("weights/" + sha256(SHARED) + ".bin")[0] = 1


def test_an_engine_of_the_store_can_be_added_to_another(store: Store, tmp_path: Path) -> None:
    hash = add(store, engine(tmp_path / "a.engine", b"a" * 5000))
    other = Store(tmp_path / "other")
    with store.open(hash) as loose:
        other.add(loose)
    assert other.engines() == [hash] and other.verify().good


def test_a_stripped_engine_finds_its_weights(store: Store, tmp_path: Path) -> None:
    whole, stripped = tmp_path / "whole.engine", tmp_path / "stripped.engine"
    for path in (whole, stripped):
        with EngineWriter(path, strip_weights=path == stripped) as writer:
            for data in weight_members([SHARED, b"x" * 9000]).values():
                writer.add_weight(data)
            for name, data in SMALL.items():
                writer.add(name, data)
            writer.finish(MANIFEST_FIELDS)
    with EngineFile.open(stripped, store.find_blob) as file, pytest.raises(WeightsMissing):
        store.add(file)
    assert store.engines() == []
    hash = add(store, whole)
    with EngineFile.open(stripped, store.find_blob) as file:
        assert file.hash == hash and len(file.verify()) == len(file.sizes) and len(file.stripped) == 2
        assert store.add(file).num_new_blobs == 0


def test_what_a_hash_stands_for(store: Store, tmp_path: Path) -> None:
    hash = add(store, engine(tmp_path / "a.engine"), "prod")
    assert store.resolve("prod") == store.resolve(hash) == store.resolve(hash[:6]) == hash
    for wrong in ("0" * 64, hash[:5], "staging"):
        with pytest.raises(NotInStore):
            store.resolve(wrong)
    twin = hash[:8] + ("0" if hash[8] != "0" else "1") * 56
    store.manifest_path(twin).write_bytes(b"{}")
    with pytest.raises(RequestError, match=f"2 hashes.*\n  .*{twin}|\n  {twin}"):
        store.resolve(hash[:8])
    assert store.resolve(hash[:9]) == hash


def test_a_manifest_under_a_wrong_name(store: Store, tmp_path: Path) -> None:
    hash = add(store, engine(tmp_path / "a.engine"))
    wrong = "0" * 64
    store.manifest_path(hash).rename(store.manifest_path(wrong))
    for use in (store.open, store.manifest):
        with pytest.raises(EngineHashMismatch, match=hash):
            use(wrong)
    assert list(store.verify().broken) == [wrong]


def test_garbage_is_what_no_name_means_or_has_meant(store: Store, tmp_path: Path) -> None:
    paths = [engine(tmp_path / f"{i}.engine", bytes([i]) * 5000) for i in range(4)]
    hashes = [add(store, path) for path in paths]
    for i, action in ((0, "add"), (1, "pin"), (2, "pin")):
        with EngineFile.open(paths[i]) as file:
            store.lock.move("prod", move(file, action))
    partial = store.blobs.folder / "partial" / ("1" * 64)
    partial.write_bytes(b"half")

    garbage = store.garbage()
    assert garbage.engines == [hashes[3]] and garbage.blobs == [sha256(b"\3" * 5000)]
    assert garbage.size_bytes == store.manifest_path(hashes[3]).stat().st_size + 5000 + 4
    assert store.has(hashes[3]), "looking removes nothing"
    assert store.collect_garbage() == garbage
    assert store.engines() == sorted(hashes[:3]) and not partial.exists() and store.verify().good

    assert store.garbage(keep_history=1).engines == [hashes[0]]
    store.collect_garbage(keep_history=0)
    assert store.engines() == [hashes[2]] and store.verify().good
    with store.open(hashes[2]) as file:
        file.verify()


def test_nothing_is_collected_by_a_lock_that_cannot_be_read(store: Store, tmp_path: Path) -> None:
    hash = add(store, engine(tmp_path / "a.engine"), "prod")
    store.lock.path.write_text("<<<<<<< HEAD\n")
    with pytest.raises(RequestError, match=r"engines\.lock"):
        store.collect_garbage(0)
    assert store.has(hash)


def test_damage_is_found_and_named(store: Store, tmp_path: Path) -> None:
    a, b = (add(store, engine(tmp_path / f"{name}.engine", name.encode() * 5000)) for name in "ab")
    damage(store.blobs.path(sha256(SHARED)))
    store.blobs.path(sha256(b"b" * 5000)).unlink()
    check = store.verify()
    assert not check.good and (check.num_engines, check.broken) == (2, {})
    assert {key: sorted(users) for key, users in check.damaged.items()} == {sha256(SHARED): sorted([a, b])}
    assert check.missing == {sha256(b"b" * 5000): [b]}
    assert store.verify([a]).missing == {}
    add(store, tmp_path / "b.engine")
    assert store.verify().missing == {}, "adding again heals what is missing"


def test_an_engine_with_a_damaged_plan_is_refused_when_it_is_opened(store: Store, tmp_path: Path) -> None:
    path = engine(tmp_path / "a.engine")
    hash = add(store, path)
    damage(store.blobs.path(sha256(SMALL["plan.json"])))
    with pytest.raises(EngineHashMismatch, match="blobs"):
        store.open(hash)


def test_a_damaged_file_is_not_taken_in(store: Store, tmp_path: Path) -> None:
    path = engine(tmp_path / "a.engine", b"a" * 5000)
    data = bytearray(path.read_bytes())
    data[data.index(b"a" * 5000) + 7] ^= 1
    path.write_bytes(data)
    with EngineFile.open(path) as file, pytest.raises(Exception, match=sha256(b"a" * 5000)):
        store.add(file)
    assert store.engines() == [] and store.verify().good and hash_of(path)
