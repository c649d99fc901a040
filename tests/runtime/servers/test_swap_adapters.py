"""Another engine takes over, and the adapters with it: or it does not, and says why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from ingot.runtime.adapters.source import AdapterSource
from ingot.runtime.servers.context import ServerSettings
from ingot.runtime.servers.proto import control_pb2 as pb
from ingot.runtime.store.store import Store
from tests.runtime.adapters.samples import SHAPES, Q, room, seeded_adapter
from tests.runtime.mock_engine import write_engine
from tests.runtime.servers.swap_server import HEADS, Swapping, finished, refusal, swapping, swaps, until_freed
from tests.runtime.store.samples import add

ROOMS = {"a": room(), "b": room(dict(reversed(SHAPES.items())), max_rank=8, max_adapters=3), "c": None,
         "narrow": room(max_rank=1), "part": room({Q: SHAPES[Q]})}
"""Of the engines: b has them elsewhere in its slots, c none at all."""


@pytest.fixture(scope="module")
def engines(mock_code: bytes, tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, dict[str, str]]:
    folder = tmp_path_factory.mktemp("swap_adapters")
    store, hashes = Store(folder / "store"), {}
    for number, (name, place) in enumerate(ROOMS.items()):
        head = list(HEADS.values())[number % 3] * (1 + number)
        path = write_engine(folder / f"{name}.engine", mock_code, head=head,
                            lora=None if place is None else place.to_json())
        hashes[name] = add(store, path, name)
    return store, hashes


@pytest.fixture
def server(engines: tuple[Store, dict[str, str]], tmp_path: Path) -> Iterator[Swapping]:
    for number in (1, 2):
        seeded_adapter(tmp_path / str(number), number)
    with swapping(*engines, settings=ServerSettings(lora_folder=str(tmp_path))) as running:
        yield running


def load(server: Swapping, name: str, path: str) -> pb.Adapter:
    return server._call("LoadAdapter", pb.LoadAdapterRequest(name=name, path=path), pb.Adapter)


def unload(server: Swapping, name: str) -> None:
    server._call("UnloadAdapter", pb.UnloadAdapterRequest(name=name), pb.Adapter)


def listed(server: Swapping) -> dict[str, str]:
    adapters = server._call("ListAdapters", pb.ListAdaptersRequest(), pb.AdapterList).adapters
    return {adapter.name: adapter.sha256 for adapter in adapters}


def test_adapters_move_along(server: Swapping) -> None:
    """Without their files, to where the other engine has them in its slots."""
    loaded = {name: load(server, name, path).sha256 for name, path in (("one", "1"), ("two", "2"))}
    before = {each.name: each for each in server.context.adapters.all()}
    server.load("b")
    assert listed(server) == loaded
    for each in server.context.adapters.all():
        assert each.image.size == ROOMS["b"].bytes_per_adapter  # type: ignore[union-attr]
        assert (each.image == before[each.name].adapter.image(ROOMS["b"])).all()  # type: ignore[arg-type]
        assert each.number != before[each.name].number
    until_freed(server)
    unload(server, "one")
    server.rollback()
    assert listed(server) == {"two": loaded["two"]}


@pytest.mark.parametrize(("engine", "words"), [
    ("c", "has no room for LoRA adapters"), ("narrow", "has rank 2; this engine has room for 1"),
    ("part", "v_proj"),
])
def test_an_engine_without_room_for_them_is_refused(server: Swapping, engine: str, words: str) -> None:
    load(server, "one", "1")
    code, details = refusal(lambda: server.load(engine))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and words in details
    assert "cannot take over adapter 'one'" in details and "Unload the adapter first" in details
    assert swaps(server) == {"refused": 1} and server.info().hash == server.hashes["a"]
    unload(server, "one")
    server.load(engine)
    assert server.info().hash == server.hashes[engine]


def test_an_engine_that_comes_back_has_what_there_is_now(server: Swapping) -> None:
    """It still finishes a request, and has the adapters of the time when it was replaced."""
    first = load(server, "one", "1").sha256
    load(server, "two", "2")
    with server.held():
        running = server.start(count=10)
        next(iter(running))
        server.load("b")
        unload(server, "one")
        unload(server, "two")
        second = load(server, "one", "2").sha256
        assert server.load("a").trial == pb.LoadEngineResponse.TRIAL_RETURNED
        assert listed(server) == {"one": second} and second != first
    assert finished(running)[0] == server.hashes["a"]


def test_an_adapter_that_comes_while_an_engine_loads(server: Swapping) -> None:
    """It is checked before, and there again when the other takes over."""
    swapper, context = server.swapper, server.context
    load_engine = swapper._load

    def slow(*arguments: object) -> object:
        loaded = load_engine(*arguments)  # type: ignore[arg-type]
        server.run(context.adapters.load("late", AdapterSource("1")))
        return loaded

    swapper._load = slow  # type: ignore[assignment]
    server.load("b")
    assert list(listed(server)) == ["late"]
    unload(server, "late")
    code, details = refusal(lambda: server.load("narrow"))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "has rank 2" in details
    assert server.info().hash == server.hashes["b"]
    until_freed(server)
