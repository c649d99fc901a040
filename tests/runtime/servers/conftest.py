import gc
from collections.abc import Iterator

import pytest

from ingot.runtime.store.store import Store
from tests.runtime.servers.scripted_engine import ScriptedRunner, http
from tests.runtime.servers.swap_server import fill_store


@pytest.fixture(autouse=True)
def engines_alone_are_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A swap looks through what was frozen too, and here that is all that thousands of tests have imported. What was
    there before the first test stays frozen; engines are younger."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner()


@pytest.fixture
def address(tmp_path_factory: pytest.TempPathFactory, runner: ScriptedRunner) -> Iterator[str]:
    """An HTTP server around `runner`."""
    with http(tmp_path_factory.getbasetemp(), runner) as bound:
        yield bound


@pytest.fixture(scope="module")
def filled(mock_code: bytes, tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, dict[str, str]]:
    """A store with the engines of swap_server.py, and their hashes."""
    folder = tmp_path_factory.mktemp("swap")
    store = Store(folder / "store")
    return store, fill_store(store, folder, mock_code)
