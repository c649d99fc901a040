"""The adapters of an engine, by name."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import pytest

from ingot.runtime.adapters.adapter import Adapter
from ingot.runtime.adapters.errors import AdapterError, AdapterExists, UnknownAdapter
from ingot.runtime.adapters.loaded import LoadedAdapters
from tests.runtime.adapters.samples import room, seeded_adapter


def test_names_and_numbers(tmp_path: Path) -> None:
    adapters = LoadedAdapters(room())
    first, second = (Adapter.read(seeded_adapter(tmp_path / str(seed), seed)) for seed in (1, 2))
    one = adapters.load("one", first)
    assert adapters.get("one") is one and adapters.load("one", Adapter.read(tmp_path / "1")) is one
    two = adapters.load("org/two:v1.0", second)
    assert [each.name for each in adapters.all()] == ["one", "org/two:v1.0"]
    with pytest.raises(AdapterExists, match=r"'one' is loaded already, with another content .*\n  Unload it first"):
        adapters.load("one", second)
    assert adapters.unload("one") is one
    for call in (adapters.get, adapters.unload):
        with pytest.raises(UnknownAdapter, match=r"no adapter 'one' is loaded; loaded are: org/two:v1\.0"):
            call("one")
    again = adapters.load("one", first)
    assert len({one.number, two.number, again.number}) == 3, "what is cached of one must not be found by another"


def test_numbers_are_those_of_no_other_engine(tmp_path: Path) -> None:
    adapter = Adapter.read(seeded_adapter(tmp_path, 1))
    assert LoadedAdapters(room()).load("a", adapter).number != LoadedAdapters(room()).load("a", adapter).number


@pytest.mark.parametrize("name", ["", "-a", "a b", "a=b", "a@b", "ä", "a" * 129, "a\n"])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(AdapterError, match="cannot be the name of an adapter"):
        LoadedAdapters(room()).load(name, Adapter.read(seeded_adapter(tmp_path, 1)))


def test_without_room(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="no room for LoRA adapters"):
        LoadedAdapters(None).load("a", Adapter.read(seeded_adapter(tmp_path, 1)))


def test_many_load_the_same(tmp_path: Path) -> None:
    """Whoever comes first wins, and all get his."""
    adapters, found = LoadedAdapters(room()), []
    adapter = Adapter.read(seeded_adapter(tmp_path, 1))
    threads = [threading.Thread(target=lambda: found.append(adapters.load("a", adapter))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {adapters.get("a")}


def test_two_contents_at_once_under_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second finds the name free when it begins, and taken when it is done."""
    adapters = LoadedAdapters(room())
    first, second = (Adapter.read(seeded_adapter(tmp_path / str(seed), seed)) for seed in (1, 2))
    image = Adapter.image

    def slow(adapter: Adapter, place: object) -> object:
        if adapter is second:
            adapters.load("a", first)
        return image(adapter, place)  # type: ignore[arg-type]

    monkeypatch.setattr(Adapter, "image", slow)
    with pytest.raises(AdapterExists):
        adapters.load("a", second)
    assert adapters.get("a").adapter.sha256 == first.sha256


def test_memory_goes_with_the_last_who_uses_it(tmp_path: Path) -> None:
    adapters = LoadedAdapters(room())
    loaded = adapters.load("a", Adapter.read(seeded_adapter(tmp_path, 1)))
    image = weakref.ref(loaded.image)
    adapters.unload("a")
    assert image() is loaded.image
    del loaded
    gc.collect()
    assert image() is None
