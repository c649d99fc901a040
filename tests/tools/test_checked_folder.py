"""A folder of the cache appears whole and checked, or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ingot.runtime.errors import RequestError, WorkFailed
from tools import checked_folder
from tools.checked_folder import DigestMismatch, disk_errors, is_ready, lock, new_folder, verify

CONTENT = b"weights"
PINNED = {"a.bin": hashlib.sha256(CONTENT).hexdigest()}


def make(final: Path, content: bytes = CONTENT) -> None:
    with new_folder(final, PINNED, {"made_with": "test"}, "Do this.") as folder:
        (folder / "a.bin").write_bytes(content)
        (folder / "config.json").write_text("{}")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_folder_holds_the_files_and_a_stamp(tmp_path: Path) -> None:
    final = tmp_path / "model"
    assert not is_ready(final, PINNED)
    make(final)
    assert names(tmp_path) == ["model"]
    assert names(final) == ["a.bin", "config.json", "stamp.json"]
    assert is_ready(final, PINNED)
    assert verify(final) == len(CONTENT) + 2


def test_files_are_readable_by_others_whatever_their_writer_left(tmp_path: Path) -> None:
    with new_folder(tmp_path / "model", {}, {}, "") as folder:
        (folder / "a.bin").touch(mode=0o600)
    assert (tmp_path / "model").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "model" / "a.bin").stat().st_mode & 0o777 == 0o644


def test_wrong_content_leaves_nothing_and_names_both_digests(tmp_path: Path) -> None:
    with pytest.raises(DigestMismatch) as caught:
        make(tmp_path / "model", b"other")
    assert names(tmp_path) == []
    for part in (str(tmp_path / "model" / "a.bin"), PINNED["a.bin"], hashlib.sha256(b"other").hexdigest(), "Do this."):
        assert part in str(caught.value)


def test_a_missing_pinned_file_is_a_mismatch(tmp_path: Path) -> None:
    with pytest.raises(DigestMismatch, match="no such file"), new_folder(tmp_path / "model", PINNED, {}, ""):
        pass
    assert names(tmp_path) == []


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, OSError])
def test_an_interruption_leaves_nothing(tmp_path: Path, interruption: type[BaseException]) -> None:
    with pytest.raises(interruption), new_folder(tmp_path / "model", PINNED, {}, "") as folder:
        (folder / "a.bin").write_bytes(CONTENT)
        raise interruption
    assert names(tmp_path) == []


def test_a_killed_maker_leaves_no_model_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tools.checked_folder import new_folder, lock\n"
        "with lock(Path('lock'), print), new_folder(Path('model').absolute(), {}, {}, '') as folder:\n"
        "    (folder / 'a.bin').write_bytes(b'half'); print('half', flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(checked_folder.__file__).parents[1])}
    command = [sys.executable, "-c", script]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdin=pipe, stdout=pipe, env=environment) as maker:
        assert maker.stdout is not None and maker.stdout.readline() == b"half\n"
        maker.kill()
    assert [name for name in names(tmp_path) if name.startswith(".model-making-")], "nothing to clean up"
    assert not is_ready(tmp_path / "model", {})
    said: list[str] = []
    with lock(tmp_path / "lock", said.append):
        make(tmp_path / "model")
    assert said == [], "the lock outlived its owner"
    assert names(tmp_path) == ["lock", "model"]


def test_a_folder_of_another_origin_is_respected(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").touch()
    with pytest.raises(WorkFailed, match="in the way"):
        make(tmp_path / "model")
    assert names(tmp_path / "model") == ["mine"]


@pytest.mark.parametrize("damage", ["truncated", "removed", "grown"])
def test_damage_that_sizes_show_is_seen_and_the_folder_replaced(tmp_path: Path, damage: str) -> None:
    make(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    if damage == "removed":
        file.unlink()
    else:
        file.write_text({"truncated": "{", "grown": "{}\n"}[damage])
    assert not is_ready(tmp_path / "model", PINNED)
    make(tmp_path / "model")
    assert is_ready(tmp_path / "model", PINNED)
    assert names(tmp_path) == ["model"]


def test_another_pin_makes_the_folder_stale(tmp_path: Path) -> None:
    make(tmp_path / "model")
    assert not is_ready(tmp_path / "model", {"a.bin": "0" * 64})
    assert not is_ready(tmp_path / "model", {**PINNED, "b.bin": "0" * 64})


@pytest.mark.parametrize("stamp", ["", "[]", "{}", '{"files": 3', "null"])
def test_a_broken_stamp_is_no_stamp(tmp_path: Path, stamp: str) -> None:
    make(tmp_path / "model")
    (tmp_path / "model" / "stamp.json").write_text(stamp)
    assert not is_ready(tmp_path / "model", {})


def test_verify_sees_a_flipped_byte(tmp_path: Path) -> None:
    make(tmp_path / "model")
    (tmp_path / "model" / "a.bin").write_bytes(b"Weights")
    assert is_ready(tmp_path / "model", PINNED), "sizes alone cannot see it"
    with pytest.raises(DigestMismatch, match=r"a\.bin.*\n.*\n.*\n  Delete .*model and run again"):
        verify(tmp_path / "model")


def test_the_lock_lets_one_in_and_tells_the_other(tmp_path: Path) -> None:
    events: list[str] = []
    waiting = threading.Event()

    def say(line: str) -> None:
        events.append(line)
        waiting.set()

    def second() -> None:
        with lock(tmp_path / "lock", say):
            events.append("second")

    with lock(tmp_path / "lock", say):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(10)
        events.append("first ends")
    thread.join(10)
    assert events[0].startswith("another process is at work")
    assert events[1:] == ["first ends", "second"]


class WriterError(Exception):
    """Stands for safetensors' error, which is no OSError."""


NO_SPACE = os.strerror(errno.ENOSPC)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, NO_SPACE), PermissionError(errno.EACCES, "denied"), WriterError(f"Io({NO_SPACE})")]
)
def test_disk_errors_become_messages(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(WorkFailed) as caught, disk_errors(tmp_path):
        raise error
    assert str(tmp_path) in str(caught.value) and str(error) in str(caught.value)


@pytest.mark.parametrize("error", [ValueError("a fault of our own"), RequestError("told already")])
def test_other_errors_pass(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as caught, disk_errors(tmp_path):
        raise error
    assert caught.value is error
