"""push and pull by a folder of this machine and by what fsspec reaches."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from ingot.runtime.errors import RequestError, WorkFailed
from ingot.runtime.store.blobs import BlobMismatch
from ingot.runtime.store.remotes import open_remote
from ingot.runtime.store.store import Store
from ingot.runtime.store.transfer import NameTaken, pull, push
from tests.runtime.store.samples import SHARED, add, engine, sha256


@pytest.fixture(params=["folder", "fsspec"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "remote")
    pytest.importorskip("fsspec")
    return f"memory://{uuid.uuid4()}/engines"


def test_there_and_back(url: str, tmp_path: Path) -> None:
    store, target = Store(tmp_path / "store"), Store(tmp_path / "target")
    first, second = (add(store, engine(tmp_path / f"{own}.engine", own.encode() * 5000)) for own in "ab")
    store.add_attestations(first, [b'{"a":1}'])
    with open_remote(url) as remote:
        assert remote.resolve("prod") is None and remote.resolve(first) is None
        assert push(store, remote, first, "prod").num_sent == 6
        assert push(store, remote, second).sent_bytes == 5000
        with pytest.raises(NameTaken):
            push(store, remote, second, "prod")
        assert pull(target, remote, "prod").hash == first
        assert pull(target, remote, second).sent_bytes == 5000
    assert target.engines() == sorted([first, second]) and target.verify().good
    assert target.attestations(first) == [b'{"a":1}'] and target.attestations(second) == []


def test_what_is_not_there(url: str, tmp_path: Path) -> None:
    store, target = Store(tmp_path / "store"), Store(tmp_path / "target")
    hash = add(store, engine(tmp_path / "a.engine"))
    with open_remote(url) as remote:
        for reference in ("prod", hash):
            with pytest.raises(RequestError, match="has no engine of the name"):
                pull(target, remote, reference)
        with pytest.raises(RequestError, match="is no name"):
            pull(target, remote, "../../etc/passwd")


def test_a_folder_in_which_something_is_wrong(tmp_path: Path) -> None:
    url, store, target = str(tmp_path / "remote"), Store(tmp_path / "store"), Store(tmp_path / "target")
    hash = add(store, engine(tmp_path / "a.engine"))
    with open_remote(url) as remote:
        push(store, remote, hash)
        blob = tmp_path / "remote" / "blobs" / "sha256" / sha256(SHARED)[:2] / sha256(SHARED)
        blob.write_bytes(SHARED[:-1] + b"?")
        with pytest.raises(BlobMismatch, match=sha256(SHARED)):
            pull(target, remote, hash)
        blob.write_bytes(SHARED[:100])
        assert push(store, remote, hash).sent_bytes == len(SHARED), "a blob of another size is sent again"
        blob.unlink()
        with pytest.raises(WorkFailed, match=f"no blob {sha256(SHARED)}"):
            pull(target, remote, hash)
        (tmp_path / "remote" / "names").mkdir()
        (tmp_path / "remote" / "names" / "prod").write_text("latest\n")
        with pytest.raises(WorkFailed, match="'latest', which is no hash"):
            pull(target, remote, "prod")
    assert target.engines() == []


def test_a_word_is_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of the store, where a URL is meant, does not become a folder with copies of all engines."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match=r"'prod' is no place for engines.*\./prod"), open_remote("prod"):
        pass
    (tmp_path / "prod").mkdir()
    with open_remote("prod"), open_remote("./other"):
        pass


def test_an_unknown_protocol() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(RequestError, match="nowhere://x"), open_remote("nowhere://x"):
        pass
