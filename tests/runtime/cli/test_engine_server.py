"""`ingot engines … --server`, and servers that follow a lock file: processes, on mock engines."""

from __future__ import annotations

import json
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ingot.runtime.cli import main
from ingot.runtime.store.lock_file import LockFile, move_of
from ingot.runtime.store.store import Store
from tests.runtime.cli.test_cli import run, run_json
from tests.runtime.cli.test_serve import Serve, serve
from tests.runtime.servers.swap_server import PROMPT, answer_of, fill_store

Capture = pytest.CaptureFixture[str]
WAIT_S = 30


@pytest.fixture(scope="module")
def filled(mock_code: bytes, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("filled")
    store = Store(folder / "store")
    return store.folder, fill_store(store, folder, mock_code)


@pytest.fixture
def store(filled: tuple[Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store of its own, whose name prod has meant b and now means a."""
    shutil.copytree(filled[0], tmp_path / "engines")
    monkeypatch.setenv("INGOT_STORE", str(tmp_path / "engines"))
    store = Store()
    for name, action in (("b", "add"), ("a", "pin")):
        hash = filled[1][name]
        store.lock.move("prod", move_of(store.manifest(hash), hash, action, ""))
    return store


@pytest.fixture
def hashes(filled: tuple[Path, dict[str, str]]) -> dict[str, str]:
    return filled[1]


@pytest.fixture
def server(store: Store) -> Iterator[Serve]:
    with serve(Path("prod"), "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0") as running:
        yield running


def answered_by(server: Serve) -> tuple[str, list[int]]:
    body = {"prompt": PROMPT, "max_tokens": 10, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    with server.post("/v1/completions", body) as response:
        return response.headers["ingot-engine-hash"], json.load(response)["choices"][0]["token_ids"]


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def told(server: Serve, word: str) -> str:
    """What the server has said on standard error up to this word."""
    lines = ""
    while word not in lines:
        lines += server.lines.get(timeout=WAIT_S)
    return lines


def test_rollback_moves_the_name_and_the_server(capsys: Capture, server: Serve, store: Store,
                                                hashes: dict[str, str]) -> None:
    assert answered_by(server) == (hashes["a"], answer_of("a"))
    address = server.start["grpc"]
    result = run_json(capsys, "engines", "rollback", "prod", "--server", address, "--json", "-m", "answers in French")
    assert (result["hash"], result["before"]) == (hashes["b"], hashes["a"])
    (done,) = result["servers"]
    assert (done["server"], done["before"], done["hash"], done["trial"]) == (
        address, hashes["a"], hashes["b"], "recorded")
    assert store.lock.now()["prod"].hash == hashes["b"] and store.lock.now()["prod"].why == "answers in French"
    assert answered_by(server) == (hashes["b"], answer_of("b"))
    status, out, _ = run(capsys, "engines", "pin", "prod", hashes["c"][:8], "--server", address,
                         "--kv-cache-tokens", "48")
    assert status == 0 and f"{hashes['c'][:12]} has taken over from {hashes['b'][:12]}" in out
    assert f"prod: {hashes['c']}\nbefore: {hashes['b']}" in out
    assert answered_by(server) == (hashes["c"], answer_of("c"))
    status, out, _ = run(capsys, "engines", "swap", "prod", "--server", address)
    assert status == 0 and f"serves {hashes['c'][:12]} already" in out
    (shown,) = run_json(capsys, "engines", "status", "--server", address, "--json")
    assert shown["history"] == [hashes["a"], hashes["b"], hashes["c"]]
    assert shown["results"] == {"done": 2, "unchanged": 1}
    assert [engine["kv_cache_tokens"] for engine in shown["engines"]][:1] == [48]
    status, out, _ = run(capsys, "engines", "status", "--server", address)
    assert status == 0 and hashes["c"][:12] in out and "new requests" in out and "2 done" in out


def test_what_a_server_refuses_moves_no_name(capsys: Capture, server: Serve, store: Store,
                                             hashes: dict[str, str]) -> None:
    address = server.start["grpc"]
    status, _, err = run(capsys, "engines", "pin", "prod", hashes["broken"], "--server", address)
    assert status == 1 and address in err and "other logits than were recorded" in err
    assert store.lock.now()["prod"].hash == hashes["a"] and answered_by(server)[0] == hashes["a"]
    assert "SelfTestFailed" in told(server, "stays")
    status, _, err = run(capsys, "engines", "swap", "other", "--server", address)
    assert status == 1 and "--allow-other-tokenizer" in err
    assert run(capsys, "engines", "swap", "other", "--server", address, "--allow-other-tokenizer")[0] == 0
    status, _, err = run(capsys, "engines", "swap", "nobody", "--server", address)
    assert status == 2 and "nobody" in err
    status, _, err = run(capsys, "engines", "swap", "a", "--server", address, "--kv-cache-tokens", "0")
    assert status == 2 and "--kv-cache-tokens is 0" in err


def test_servers_one_after_the_other(capsys: Capture, server: Serve, store: Store, hashes: dict[str, str]) -> None:
    """The first that cannot be reached ends it; the error tells which have changed."""
    address = server.start["grpc"]
    status, _, err = run(capsys, "engines", "rollback", "prod", "--server", address, "--server", "127.0.0.1:1",
                         "--timeout", "20")
    assert status == 1 and "127.0.0.1:1" in err and f"have changed: {address}" in err
    assert store.lock.now()["prod"].hash == hashes["a"] and answered_by(server)[0] == hashes["b"]


def test_a_server_with_a_token(capsys: Capture, store: Store, hashes: dict[str, str], tmp_path: Path) -> None:
    token, wrong = tmp_path / "token", tmp_path / "wrong"
    token.write_text("secret\n")
    wrong.write_text("else\n")
    with serve(Path("a"), "--grpc", "127.0.0.1:0", "--token-file", str(token)) as server:
        address = server.start["grpc"]
        for options in ((), ("--token-file", str(wrong))):
            status, _, err = run(capsys, "engines", "swap", "b", "--server", address, *options)
            assert status == 2 and "token" in err
        assert run(capsys, "engines", "swap", "b", "--server", address, "--token-file", token)[0] == 0


def test_options_that_contradict_each_other(capsys: Capture, store: Store, tmp_path: Path) -> None:
    for argv, message in ((["--tls-cert", "x"], "need --tls-ca"), (["--tls-ca", "/nowhere"], "cannot read /nowhere"),
                          (["--token-file", "/nowhere"], "cannot read /nowhere")):
        status, _, err = run(capsys, "engines", "swap", "a", "--server", "127.0.0.1:1", *argv)
        assert status == 2 and message in err
    status, _, err = run(capsys, "engines", "status", "--server", "127.0.0.1")
    assert status == 2 and "127.0.0.1: expected host:port" in err
    for argv, message in ((["prod", "--pull", "x"], "--pull goes with --follow"),
                          (["./x.engine", "--follow"], "is no name"),
                          (["nobody", "--follow"], "no engine named nobody"),
                          (["prod", "--lock", "/nowhere/engines.lock"], "no engine named prod"),
                          (["prod", "--swap-min-kv", "0"], "--swap-min-kv is 0")):
        status, _, err = run(capsys, "serve", *argv)
        assert status == 2 and message in err, err


def test_a_server_that_follows_a_lock_file(store: Store, hashes: dict[str, str], tmp_path: Path) -> None:
    lock = LockFile(tmp_path / "checkout" / "engines.lock")
    lock.path.parent.mkdir()

    def mean(name: str, action: str = "pin") -> None:
        lock.move("prod", move_of(store.manifest(hashes[name]), hashes[name], action, ""))

    def metrics() -> dict[str, float]:
        with urllib.request.urlopen(f"http://{following.start['http']}/metrics", timeout=20) as page:
            lines = [line.rpartition(" ") for line in page.read().decode().splitlines() if "swaps_total{" in line]
        return {name.partition('"')[2].rstrip('"}'): float(value) for name, _, value in lines}

    mean("a", "add")
    with serve(Path("prod"), "--http", "127.0.0.1:0", "--lock", str(lock.path), "--follow") as following:
        assert following.start["engine"] == hashes["a"]
        mean("b")
        until(lambda: answered_by(following)[0] == hashes["b"])
        assert answered_by(following) == (hashes["b"], answer_of("b"))
        # A bad engine, a file that is none, and one that lacks the name: the engine stays.
        mean("broken")
        assert "other logits than were recorded" in told(following, "goes on")
        good = lock.path.read_bytes()
        lock.path.write_bytes(b"<<<<<<< ours\n" + good)
        assert "not TOML" in told(following, "goes on")
        lock.path.write_bytes(b"")
        assert "no engine named prod" in told(following, "goes on")
        lock.path.unlink()
        time.sleep(1.2)
        assert answered_by(following)[0] == hashes["b"]
        assert metrics() | {"unchanged": 0.0} == {"done": 1, "unchanged": 0, "refused": 0, "no_room": 0,
                                                  "self_test_failed": 1, "failed": 0, "bad_lock": 2}
        # And goes on following.
        lock.path.write_bytes(good)
        mean("c")
        until(lambda: answered_by(following)[0] == hashes["c"])


def test_a_follower_gets_what_its_store_lacks(capsys: Capture, store: Store, hashes: dict[str, str],
                                              tmp_path: Path) -> None:
    """An engine that the lock file names is pulled; without --pull it is waited for."""
    remote = str(tmp_path / "remote")
    assert main(["engines", "push", remote, "a", "b", "c"]) == 0
    lock = LockFile(tmp_path / "checkout" / "engines.lock")
    lock.path.parent.mkdir()

    def mean(name: str, action: str = "pin") -> None:
        lock.move("prod", move_of(store.manifest(hashes[name]), hashes[name], action, ""))

    mean("a", "add")
    own = Store(tmp_path / "own")
    with serve(Path("prod"), "--http", "127.0.0.1:0", "--lock", str(lock.path), "--follow", "--pull", remote,
               "--store", str(own.folder)) as server:
        assert own.engines() == [hashes["a"]] == [server.start["engine"]]
        mean("b")
        until(lambda: answered_by(server) == (hashes["b"], answer_of("b")))
        assert own.has(hashes["b"])
        mean("broken")  # not at the remote
        assert hashes["broken"] in told(server, "goes on")
