"""`ingot engines`, and the names it gives wherever an engine is asked for."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ingot.runtime.cli import main
from ingot.runtime.store.store import Store
from tests.runtime.cli.test_cli import run, run_json
from tests.runtime.cli.test_serve import Serve
from tests.runtime.mock_engine import reference_greedy
from tests.runtime.store.registry import Registry, serve
from tests.runtime.store.samples import engine, hash_of, sha256
from tests.runtime.store.test_signatures import write_key

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store that commands use, in a working folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("INGOT_STORE", raising=False)
    monkeypatch.setenv("INGOT_USER", "ada")
    return Store(tmp_path / "engines")


@pytest.fixture
def two(tmp_path: Path, capsys: Capture) -> tuple[str, str]:
    """Hashes of two engines in the store; prod has moved from the first to the second."""
    first, second = (engine(tmp_path / f"{own}.engine", own.encode() * 5000) for own in "ab")
    assert main(["engines", "add", str(first), "prod", "--why", "the first"]) == 0
    assert main(["engines", "add", str(second)]) == 0
    assert main(["engines", "pin", "prod", hash_of(second)[:8], "-m", "better"]) == 0
    capsys.readouterr()
    return hash_of(first), hash_of(second)


def test_add_list_pin_log(capsys: Capture, two: tuple[str, str]) -> None:
    first, second = two
    (row,) = run_json(capsys, "engines", "list", "--json")["engines"]
    assert (row["name"], row["hash"], row["target"], row["precision"], row["by"], row["action"], row["in_store"]) \
        == ("prod", second, "cpu:x86-64-v3", "fp32", "ada", "pin", True)
    assert [row["hash"] for row in run_json(capsys, "--json", "engines", "list", "--all")["engines"]] == [second, first]
    log = run_json(capsys, "engines", "log", "prod", "--json")
    assert [(move["action"], move["hash"], move["why"]) for move in log] == [
        ("pin", second, "better"), ("add", first, "the first")]
    for argv, words in ((["list"], ["prod", second[:12]]), (["log"], ["better", "ada"]), (["list", "--all"], ["-  "])):
        status, out, _ = run(capsys, "engines", *argv)
        assert status == 0 and all(word in out for word in words), out


def test_a_name_does_not_move_by_add(capsys: Capture, two: tuple[str, str], tmp_path: Path) -> None:
    status, _, err = run(capsys, "engines", "add", tmp_path / "a.engine", "prod")
    assert status == 2 and f"ingot engines pin prod {two[0][:12]}" in err
    assert run(capsys, "engines", "add", tmp_path / "b.engine", "prod")[0] == 0, "it means that engine already"
    assert len(run_json(capsys, "engines", "log", "prod", "--json")) == 2


def test_a_store_that_cannot_be_written(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = engine(tmp_path / "a.engine")
    status, _, err = run(capsys, "engines", "add", path, "--store", path / "store")
    assert status == 1 and "Not a directory" in err and "Traceback" not in err and "[Errno" not in err
    with monkeypatch.context() as patch:
        def full(*arguments: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        patch.setattr(os, "copy_file_range", full)
        status, _, err = run(capsys, "engines", "add", path, "prod")
    assert status == 1 and "No space left" in err
    assert run(capsys, "engines", "add", path, "prod")[0] == 0 and run(capsys, "engines", "verify")[0] == 0


def test_rollback(capsys: Capture, two: tuple[str, str], store: Store) -> None:
    begin = time.perf_counter()
    moved = run_json(capsys, "engines", "rollback", "prod", "-m", "too slow", "--json")
    elapsed_s = time.perf_counter() - begin
    assert moved == {"name": "prod", "hash": two[0], "before": two[1], "in_store": True}
    assert elapsed_s < 1, "milliseconds on a machine at rest"
    assert store.lock.now()["prod"].why == "too slow"
    status, _, err = run(capsys, "engines", "rollback", "prod", "-n", "5")
    assert status == 2 and "the name's engine has changed 2 times" in err


def test_rollback_in_a_checkout_of_the_lock_file(capsys: Capture, two: tuple[str, str], tmp_path: Path,
                                                 store: Store) -> None:
    """CI has no blobs; what a move tells of the engine stands in its history."""
    bare = Store(tmp_path / "checkout")
    bare.folder.mkdir()
    bare.lock.path.write_bytes(store.lock.path.read_bytes())
    status, out, _ = run(capsys, "engines", "rollback", "prod", "--store", bare.folder, "-m", "in French")
    assert status == 0 and f"prod: {two[0]}" in out and f"ingot engines pull URL {two[0]}" in out
    move, first = bare.lock.now()["prod"], bare.lock.history("prod")[0]
    assert (move.hash, move.action, move.why, move.model) == (two[0], "rollback", "in French", first.model)


def test_add_with_move(capsys: Capture, two: tuple[str, str], tmp_path: Path, store: Store) -> None:
    """For CI: whatever the name means, the engine that was just built is what it means now; the same engine again is
    no move."""
    for _ in range(2):
        assert run(capsys, "engines", "add", tmp_path / "a.engine", "prod", "--move", "-m", "built again")[0] == 0
    assert run(capsys, "engines", "add", tmp_path / "a.engine", "new", "--move")[0] == 0
    assert [(move.action, move.hash) for move in store.lock.history("prod")][2:] == [("pin", two[0])]
    assert [move.action for move in store.lock.history("new")] == ["add"]


def test_rm_and_gc(capsys: Capture, two: tuple[str, str], tmp_path: Path, store: Store) -> None:
    engine(tmp_path / "c.engine", b"c" * 5000)
    run(capsys, "engines", "add", tmp_path / "c.engine")
    before = store.lock.now()["prod"].hash
    assert run(capsys, "engines", "rm", "prod", "-m", "retired") == (
        0, f"prod: means nothing any more\nbefore: {before}\n", "")
    assert run_json(capsys, "engines", "list", "--json")["engines"] == []
    told = run_json(capsys, "engines", "gc", "--json")
    assert told["engines"] == [hash_of(tmp_path / "c.engine")] and told["deleted"] is False
    status, out, _ = run(capsys, "engines", "gc")
    assert status == 0 and "would remove 1 engines, 1 blobs" in out and "--delete" in out
    assert len(store.engines()) == 3
    assert "removed 1 engines" in run(capsys, "engines", "gc", "--delete")[1] and store.engines() == sorted(two)
    run(capsys, "engines", "gc", "--delete", "--keep-history", 0)
    assert store.engines() == []
    assert run(capsys, "engines", "gc", "--keep-history", -1)[0] == 2


def test_verify_names_what_is_damaged(capsys: Capture, two: tuple[str, str], store: Store) -> None:
    assert "2 engines, 7 blobs" in run(capsys, "engines", "verify")[1]
    path = store.blobs.path(sha256(b"b" * 5000))
    path.chmod(0o644)
    path.write_bytes(b"c" * 5000)
    status, _, err = run(capsys, "engines", "verify")
    assert status == 1 and str(path.relative_to(store.folder.parent)) in err and f"in engine {two[1]}, prod" in err
    assert run(capsys, "engines", "verify", two[0])[0] == 0
    assert main(["engines", "verify", "prod", "--json"]) == 1
    assert list(json.loads(capsys.readouterr().out)["damaged"]) == [sha256(b"b" * 5000)]


def test_export(capsys: Capture, two: tuple[str, str], tmp_path: Path) -> None:
    path, (private, public) = tmp_path / "out.engine", write_key(tmp_path, "ours")
    run(capsys, "engines", "sign", "prod", "--key", private)
    told = run_json(capsys, "engines", "export", "prod", "-o", path, "--json")
    assert told == {"hash": two[1], "path": str(path), "size_bytes": path.stat().st_size}
    assert path.stat().st_size == (tmp_path / "b.engine").stat().st_size
    assert run_json(capsys, "verify", path, "--json")["hash"] == two[1]
    assert run(capsys, "engines", "verify", path, "--key", public)[0] == 0
    status, _, err = run(capsys, "engines", "export", "prod", "-o", path)
    assert status == 2 and "--force" in err
    assert run(capsys, "engines", "export", two[0][:8], "-o", path, "--force")[0] == 0 and hash_of(path) == two[0]
    assert run(capsys, "engines", "export", "prod", "-o", tmp_path / "no" / "x.engine")[0] == 1


def test_a_damaged_engine_is_not_exported(capsys: Capture, two: tuple[str, str], store: Store, tmp_path: Path) -> None:
    path = store.blobs.path(sha256(b"b" * 5000))
    path.chmod(0o644)
    path.write_bytes(b"c" * 5000)
    status, _, err = run(capsys, "engines", "export", "prod", "-o", tmp_path / "out.engine")
    assert status == 2 and sha256(b"b" * 5000) in err
    assert not list(tmp_path.glob("*out.engine*"))


def test_pull_from_no_folder(capsys: Capture, two: tuple[str, str], tmp_path: Path) -> None:
    status, _, err = run(capsys, "engines", "pull", str(tmp_path / "nowhere"), "prod")
    assert status == 2 and f"{tmp_path / 'nowhere'}: no folder" in err


def test_push_and_pull(capsys: Capture, two: tuple[str, str], tmp_path: Path) -> None:
    with serve(Registry()) as registry:
        (sent,) = run_json(capsys, "engines", "push", registry.url, "--json")
        assert (sent["engine"], sent["hash"], sent["num_sent"]) == ("prod", two[1], 6)
        (got,) = run_json(capsys, "engines", "pull", registry.url, "prod", "--store", tmp_path / "there", "--json")
        assert got["hash"] == two[1]
        there = Store(tmp_path / "there")
        assert there.lock.now()["prod"].hash == two[1] and there.verify().good

        run(capsys, "engines", "rollback", "prod")
        status, _, err = run(capsys, "engines", "push", registry.url)
        assert status == 2 and "--move" in err
        assert run(capsys, "engines", "push", registry.url, "--move")[0] == 0
        status, out, _ = run(capsys, "engines", "pull", registry.url, "--store", tmp_path / "there")
        assert status == 0 and two[1] in out, "a name of the lock file is pulled by the hash that the file says"
        assert there.lock.now()["prod"].hash == two[1]
        assert run(capsys, "engines", "pull", registry.url, two[0], "--store", tmp_path / "there")[0] == 0
        assert there.engines() == sorted(two)


def test_pull_what_a_lock_file_from_git_names(capsys: Capture, two: tuple[str, str], tmp_path: Path,
                                              store: Store) -> None:
    run(capsys, "engines", "push", tmp_path / "remote")
    there = Store(tmp_path / "there")
    there.folder.mkdir()
    there.lock.path.write_bytes(store.lock.path.read_bytes())
    status, _, err = run(capsys, "inspect", "prod", "--store", there.folder)
    assert status == 2 and f"ingot engines pull URL {two[1]}" in err
    assert run(capsys, "engines", "pull", tmp_path / "remote", "--store", there.folder)[0] == 0
    assert there.engines() == [two[1]] and there.lock.path.read_bytes() == store.lock.path.read_bytes()


def test_sign_and_verify(capsys: Capture, two: tuple[str, str], tmp_path: Path) -> None:
    private, public = write_key(tmp_path, "ours")
    other = write_key(tmp_path, "other")[1]
    assert run_json(capsys, "engines", "sign", "prod", "--key", private, "--json")["num_new"] == 2
    assert run_json(capsys, "engines", "sign", "prod", "--key", private, "--json")["num_new"] == 0
    assert run(capsys, "engines", "verify", "prod", "--key", public)[0] == 0
    status, _, err = run(capsys, "engines", "verify", "--key", public)
    assert status == 1 and f"engine {two[0]} is not signed" in err
    assert run(capsys, "engines", "verify", "prod", "--key", other)[0] == 1

    file = tmp_path / "a.engine"
    run(capsys, "engines", "sign", file, "--key", private)
    assert run(capsys, "engines", "verify", file, "--key", public)[0] == 0
    store = tmp_path / "with_signature"
    run(capsys, "engines", "add", file, "signed", "--store", store)
    assert run(capsys, "engines", "verify", "signed", "--key", public, "--store", store)[0] == 0


def test_every_verb_takes_a_name_or_a_hash(capsys: Capture, mock_path: Path, store: Store) -> None:
    run(capsys, "engines", "add", mock_path, "mock")
    hash = store.lock.now()["mock"].hash
    expected = run_json(capsys, "generate", mock_path, "--raw", "A", "--max-tokens", 5, "--json")
    for reference in ("mock", hash, hash[:7]):
        answer = run_json(capsys, "generate", reference, "--raw", "A", "--max-tokens", 5, "--json")
        assert (answer["engine"], answer["token_ids"]) == (hash, expected["token_ids"])
        assert run_json(capsys, "inspect", reference, "--json")["hash"] == hash
        assert run_json(capsys, "verify", reference, "--json")["hash"] == hash
    assert run(capsys, "diff", "mock", mock_path)[1] == f"the same engine: hash {hash}\n"
    status, _, err = run(capsys, "generate", "mok", "A")
    assert status == 2 and "neither a name nor the start of a hash" in err and "Names: mock" in err


def test_a_name_comes_before_a_file_and_a_file_before_nothing(capsys: Capture, mock_path: Path, tmp_path: Path) -> None:
    run(capsys, "engines", "add", mock_path, "mock")
    other = engine(tmp_path / "mock", b"other")
    (tmp_path / "plain").write_bytes(other.read_bytes())
    assert run_json(capsys, "verify", "mock", "--json")["hash"] == hash_of(mock_path)
    assert run_json(capsys, "verify", "./mock", "--json")["hash"] == hash_of(other)
    assert run_json(capsys, "verify", "plain", "--json")["hash"] == hash_of(other)


def test_serve_from_the_store(capsys: Capture, mock_path: Path, store: Store, tmp_path: Path) -> None:
    run(capsys, "engines", "add", mock_path, "mock")
    private, public = write_key(tmp_path, "ours")
    run(capsys, "engines", "sign", "mock", "--key", private)
    hash = store.lock.now()["mock"].hash
    server = Serve(Path("mock"), "--http", "127.0.0.1:0", "--require-hash", hash, "--require-signature", public)
    assert server.start["engine"] == hash
    with server.post("/v1/completions", {"model": server.start["model"], "prompt": [65, 66], "max_tokens": 4,
                                         "temperature": 0, "ignore_eos": True}) as answer:
        text: dict[str, Any] = json.loads(answer.read())
    assert text["usage"]["completion_tokens"] == len(reference_greedy([65, 66], 4))
    server.signal(15)
    assert server.end()[0] == 0


@pytest.mark.parametrize(("options", "message"), [
    (["--require-signature", "other.pub"], "none of the 2 signed statements is a provenance"),
    (["--require-hash", "0" * 64], "required is 0000"),
    (["--require-hash", "abc"], "expected all 64 hexadecimal digits"),
    (["--require-signature", "ours.pem"], "cannot read a public key"),
])  # fmt: skip
def test_serve_refuses(capsys: Capture, mock_path: Path, tmp_path: Path, options: list[str], message: str) -> None:
    run(capsys, "engines", "add", mock_path, "mock")
    private, _ = write_key(tmp_path, "ours")
    write_key(tmp_path, "other")
    run(capsys, "engines", "sign", "mock", "--key", private)
    status, out, err = run(capsys, "serve", "mock", "--http", "127.0.0.1:0", *options)
    assert (status, out) == (2, "") and message in err, err


def test_an_unsigned_engine_is_not_served(capsys: Capture, mock_path: Path, tmp_path: Path) -> None:
    _, public = write_key(tmp_path, "ours")
    status, _, err = run(capsys, "serve", mock_path, "--require-signature", public)
    assert status == 2 and "is not signed" in err and "ingot engines sign" in err
