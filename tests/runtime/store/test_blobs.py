"""The folder of blobs: whole or not there, continued after a break, checked, shared by several processes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ingot.runtime.store.blobs import BlobFolder, BlobMismatch, StoreBusy
from tests.runtime.store.samples import sha256

DATA = bytes(range(256)) * 100
NAME = sha256(DATA)


@pytest.fixture
def blobs(tmp_path: Path) -> BlobFolder:
    return BlobFolder(tmp_path / "blobs")


def put(blobs: BlobFolder, data: bytes = DATA, name: str = NAME, size: int = len(DATA)) -> None:
    with blobs.receive(name, size) as file:
        assert file is not None
        file.write(data)


def test_a_blob_is_read_only_and_found_by_its_hash(blobs: BlobFolder) -> None:
    assert blobs.find(NAME) is None and list(blobs) == []
    put(blobs)
    path = blobs.find(NAME)
    assert path is not None and path.read_bytes() == DATA
    assert path.stat().st_mode & 0o777 == 0o444
    assert list(blobs) == [NAME] and blobs.partial() == []
    with blobs.receive(NAME, len(DATA)) as file:
        assert file is None


def test_what_arrived_before_a_break_is_continued(blobs: BlobFolder) -> None:
    with pytest.raises(ConnectionError), blobs.receive(NAME, len(DATA)) as file:
        assert file is not None
        file.write(DATA[:1000])
        raise ConnectionError
    assert blobs.find(NAME) is None and len(blobs.partial()) == 1
    with blobs.receive(NAME, len(DATA)) as file:
        assert file is not None and file.tell() == 1000
        file.write(DATA[1000:])
    assert blobs.holds(NAME, len(DATA)) and blobs.partial() == []


def test_a_blob_from_memory(blobs: BlobFolder) -> None:
    blobs.put(NAME, memoryview(DATA))
    blobs.put(NAME, memoryview(DATA))
    assert blobs.path(NAME).read_bytes() == DATA
    with pytest.raises(BlobMismatch):
        blobs.put("0" * 64, memoryview(DATA))


@pytest.mark.parametrize("data", [DATA[:-1], DATA[:-1] + b"\0", DATA + b"\0"])
def test_other_data_are_refused_and_forgotten(blobs: BlobFolder, data: bytes) -> None:
    with pytest.raises(BlobMismatch, match=NAME):
        put(blobs, data)
    assert blobs.find(NAME) is None and blobs.partial() == []


def test_a_blob_of_the_wrong_size_is_replaced(blobs: BlobFolder) -> None:
    put(blobs)
    os.chmod(blobs.path(NAME), 0o644)
    blobs.path(NAME).write_bytes(DATA[:10])
    assert not blobs.holds(NAME, len(DATA))
    put(blobs)
    assert blobs.path(NAME).read_bytes() == DATA


def test_two_that_receive_the_same_blob(blobs: BlobFolder) -> None:
    """The second waits for the first, and finds the blob."""
    found = []

    def second() -> None:
        with blobs.receive(NAME, len(DATA)) as file:
            found.append(file is None)

    with blobs.receive(NAME, len(DATA)) as file:
        assert file is not None
        thread = threading.Thread(target=second)
        thread.start()
        file.write(DATA)
    thread.join(10)
    assert found == [True] and blobs.path(NAME).read_bytes() == DATA and blobs.partial() == []


def test_nothing_is_removed_while_others_add(blobs: BlobFolder) -> None:
    with blobs.adding(), blobs.adding(), pytest.raises(StoreBusy, match="adding"), blobs.removing():
        pass
    with blobs.removing():
        pass
