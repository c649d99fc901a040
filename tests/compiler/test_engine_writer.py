"""The writer: right bytes, and nothing left behind whatever goes wrong."""

import errno
import fcntl
import hashlib
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.compiler import engine_writer
from ingot.compiler.engine_writer import DiskFull, EngineWriter, check_output
from ingot.runtime.engine_file import EngineFile, verify
from ingot.runtime.engine_format import EngineFormatError
from ingot.runtime.errors import RequestError, WorkFailed
from tests.runtime.engine_sample import MANIFEST_FIELDS, SMALL, WEIGHTS, assemble


def fill(writer: EngineWriter) -> str:
    for weight in WEIGHTS:
        writer.add_weight(weight)
    for name, data in SMALL.items():
        writer.add(name, data)
    return writer.finish(MANIFEST_FIELDS)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_bytes_are_those_of_the_format(tmp_path: Path) -> None:
    with EngineWriter(tmp_path / "x.engine") as writer:
        engine_hash = fill(writer)
    assert (tmp_path / "x.engine").read_bytes() == assemble()
    with EngineFile.open(tmp_path / "x.engine") as engine:
        assert engine.hash == engine_hash
    assert names(tmp_path) == ["x.engine"]


def test_a_preview_is_the_engine_and_leaves_no_trace(tmp_path: Path) -> None:
    with EngineWriter(tmp_path / "x.engine") as writer:
        for weight in WEIGHTS:
            writer.add_weight(weight)
        for name, data in SMALL.items():
            writer.add(name, data)
        with writer.preview(MANIFEST_FIELDS | {"quality": None}) as path:
            with EngineFile.open(path) as engine:
                assert engine.manifest["quality"] is None
            verify(path)
            assert names(tmp_path) == [path.name]
        writer.finish(MANIFEST_FIELDS)
    assert (tmp_path / "x.engine").read_bytes() == assemble()


def test_order_of_add_does_not_matter(tmp_path: Path) -> None:
    with EngineWriter(tmp_path / "x.engine") as writer:
        for name in reversed(SMALL):
            writer.add(name, SMALL[name])
        for weight in [*WEIGHTS, *reversed(WEIGHTS)]:  # equal ones are written once
            writer.add_weight(weight)
        writer.finish({key: MANIFEST_FIELDS[key] for key in reversed(MANIFEST_FIELDS)})
    assert (tmp_path / "x.engine").read_bytes() == assemble()


@pytest.mark.parametrize(
    "weight",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4).T,
        np.arange(6, dtype=np.float16)[::2],
        np.float64(3.5) * np.ones(()),
        np.zeros((0, 4), np.int8),
        np.zeros(3, [("a", "u1"), ("b", "<f4")]),
        bytearray(b"abc"),
        np.arange(5, dtype=np.int16).data,
    ],
    ids=lambda weight: type(weight).__name__,
)
def test_weights_of_any_kind(tmp_path: Path, weight: Any) -> None:
    data = weight.tobytes() if isinstance(weight, (np.ndarray, memoryview)) else bytes(weight)
    with EngineWriter(tmp_path / "x.engine") as writer:
        name = writer.add_weight(weight)
        assert name == f"weights/{hashlib.sha256(data).hexdigest()}.bin"
        assert writer.add_weight(data) == name
        fill(writer)
    with EngineFile.open(tmp_path / "x.engine") as engine:
        assert engine.read(name) == data


def test_weights_are_not_kept(tmp_path: Path) -> None:
    """What a weight needs in memory goes with it: 40 of 4 MB pass through a few MB."""
    weight = np.zeros(4 << 20, np.uint8)
    with EngineWriter(tmp_path / "x.engine") as writer:
        tracemalloc.start()
        try:
            for index in range(40):
                weight[0] = index
                writer.add_weight(weight)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        with EngineWriter(tmp_path / "x.engine") as writer:
            fill(writer)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "x.engine").stat().st_mode) == 0o640


def test_file_is_synced_before_it_gets_its_name_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "x.engine", os.fsync
    synced: list[tuple[bool, bool]] = []

    def fsync(fd: int) -> None:
        synced.append((stat.S_ISDIR(os.fstat(fd).st_mode), path.exists()))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with EngineWriter(path) as writer:
        fill(writer)
    assert synced == [(False, False), (True, True)]


# What is refused


def test_never_overwrites_silently(tmp_path: Path) -> None:
    path = tmp_path / "x.engine"
    path.write_text("mine")
    with pytest.raises(RequestError, match=r"x\.engine exists; pass --force"):
        EngineWriter(path)
    assert path.read_text() == "mine"
    with EngineWriter(path, overwrite=True) as writer:
        assert path.read_text() == "mine"
        fill(writer)
    assert path.read_bytes() == assemble()


def test_a_link_is_replaced_and_what_it_points_to_is_left(tmp_path: Path) -> None:
    (tmp_path / "old.engine").write_text("old")
    (tmp_path / "x.engine").symlink_to("old.engine")
    with EngineWriter(tmp_path / "x.engine", overwrite=True) as writer:
        fill(writer)
    assert (tmp_path / "old.engine").read_text() == "old"
    assert (tmp_path / "x.engine").read_bytes() == assemble()


@pytest.mark.parametrize("hard_links", [True, False])
def test_target_that_appears_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hard_links: bool) -> None:
    if not hard_links:
        monkeypatch.setattr(os, "link", refuse_link)
    with EngineWriter(tmp_path / "x.engine") as writer, pytest.raises(RequestError, match="exists; pass --force"):
        (tmp_path / "x.engine").write_text("theirs")
        fill(writer)
    assert (tmp_path / "x.engine").read_text() == "theirs"
    assert names(tmp_path) == ["x.engine"]


def refuse_link(*_: Any) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


def test_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refuse_link)
    with EngineWriter(tmp_path / "x.engine") as writer:
        fill(writer)
    assert (tmp_path / "x.engine").read_bytes() == assemble()
    assert names(tmp_path) == ["x.engine"]


def test_a_mapped_engine_survives_its_replacement(tmp_path: Path) -> None:
    path = tmp_path / "x.engine"
    with EngineWriter(path) as writer:
        fill(writer)
    with EngineFile.open(path) as engine:
        array = engine.map("code/engine.so")
        with EngineWriter(path, overwrite=True) as writer:
            writer.add("plan.json", b"{}")
            writer.finish(MANIFEST_FIELDS)
        assert array.tobytes() == SMALL["code/engine.so"]
        engine.verify()


def test_targets_that_cannot_be_files(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"the folder .*none does not exist"):
        EngineWriter(tmp_path / "none" / "x.engine")
    with pytest.raises(RequestError, match="exists and is not a file"):
        EngineWriter(tmp_path, overwrite=True)
    with pytest.raises(WorkFailed, match="cannot write the engine: File name too long"):
        EngineWriter(tmp_path / ("x" * 250))


def test_wrong_members(tmp_path: Path) -> None:
    with EngineWriter(tmp_path / "x.engine") as writer:
        with pytest.raises(EngineFormatError, match=r"'tokenizer/\.\./x' is not allowed"):
            writer.add("tokenizer/../x", b"")
        with pytest.raises(EngineFormatError, match=r"plan\.json: not canonical JSON"):
            writer.add("plan.json", b"{ }")
        with pytest.raises(ValueError, match="needs plan"):
            writer.finish(MANIFEST_FIELDS)
        writer.add("plan.json", b"{}")
        for name in ("plan.json", "manifest.json", "weights/x"):
            with pytest.raises(ValueError, match="already in the engine or not for"):
                writer.add(name, b"{}")
        with pytest.raises(EngineFormatError, match=r"manifest\.json: precision: expected a string, got 4"):
            writer.finish({**MANIFEST_FIELDS, "precision": 4})
    assert names(tmp_path) == []


# What goes wrong


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_nothing_is_left_after_an_exception(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), EngineWriter(tmp_path / "x.engine") as writer:
        writer.add_weight(WEIGHTS[0])
        (temporary,) = names(tmp_path)
        assert re.fullmatch(rf"\.x\.engine\.{os.getpid()}-[0-9a-f]{{8}}\.partial", temporary)
        raise error
    assert names(tmp_path) == []


def test_nothing_is_left_without_finish(tmp_path: Path) -> None:
    with EngineWriter(tmp_path / "x.engine") as writer:
        writer.add_weight(WEIGHTS[0])
    assert names(tmp_path) == []
    with pytest.raises(AssertionError, match="finished or discarded"):
        writer.add_weight(WEIGHTS[1])


@pytest.mark.parametrize("step", ["fsync", "link"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_failure_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int) -> None:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, step, fail)
    if step == "link":
        monkeypatch.setattr(os, "rename", fail)
    expected = DiskFull if number == errno.ENOSPC else WorkFailed
    with pytest.raises(expected, match=os.strerror(number)), EngineWriter(tmp_path / "x.engine") as writer:
        fill(writer)
    assert names(tmp_path) == []


def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, room = os.write, [9000]

    def write(fd: int, data: bytes) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(fd, data[: room[0]])  # a disk that fills up takes part of the last write
        room[0] -= written
        return written

    monkeypatch.setattr(engine_writer.os, "write", write)
    message = r"x\.engine: No space left on device: the engine needs at least 13,192 bytes, [\d,]+ are available"
    with pytest.raises(DiskFull, match=message), EngineWriter(tmp_path / "x.engine") as writer:
        fill(writer)
    assert names(tmp_path) == []


def test_a_disk_that_fails_beside_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system tells it to the thread that syncs, and not again at the end."""
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(engine_writer, "_SYNC_BYTES", 1)
    monkeypatch.setattr(engine_writer.os, "fdatasync", fail)
    with pytest.raises(WorkFailed, match="cannot write the engine: Input/output error"), \
            EngineWriter(tmp_path / "x.engine") as writer:
        fill(writer)
    assert names(tmp_path) == []


def test_what_is_synced_beside_is_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EngineWriter(tmp_path / "plain.engine") as writer:
        fill(writer)
    monkeypatch.setattr(engine_writer, "_SYNC_BYTES", 1)
    synced: list[int] = []
    monkeypatch.setattr(engine_writer.os, "fdatasync", synced.append)
    with EngineWriter(tmp_path / "x.engine") as writer:
        fill(writer)
    assert synced and (tmp_path / "x.engine").read_bytes() == (tmp_path / "plain.engine").read_bytes()


def test_hashes_that_the_caller_knows(tmp_path: Path) -> None:
    weight = WEIGHTS[0]
    data = np.ascontiguousarray(weight).tobytes() if isinstance(weight, np.ndarray) else bytes(weight)
    with EngineWriter(tmp_path / "x.engine") as writer:
        name = writer.add_weight(weight, hashlib.sha256(data).hexdigest(), zlib.crc32(data))
        for small, content in SMALL.items():
            writer.add(small, content)
        writer.finish(MANIFEST_FIELDS)
    with EngineFile.open(tmp_path / "x.engine") as file:
        assert file.read(name) == data and file.verify()


def test_a_folder_that_only_seems_to_take_files() -> None:
    """Before any work: an administrator may write to /proc, but no file can be made there."""
    with pytest.raises(RequestError, match=r"/proc/x\.engine: (no file can be made in )?the folder /proc"):
        check_output(Path("/proc/x.engine"), overwrite=False)


def test_disk_that_is_known_to_be_too_small(tmp_path: Path) -> None:
    with pytest.raises(DiskFull, match=r"needs at least 1,152,921,504,606,846,976 bytes, [\d,]+ are available"):
        EngineWriter(tmp_path / "x.engine", expected_bytes=1 << 60)
    assert names(tmp_path) == []


CHILD = """
import sys
from ingot.compiler.engine_writer import EngineWriter
from tests.compiler.test_engine_writer import fill
with EngineWriter(sys.argv[1]) as writer:
    writer.add_weight(bytes(range(256)) * 1000)
    print("writing", flush=True)
    sys.stdin.readline()
    fill(writer)
"""
ROOT = Path(__file__).parents[2]


def child(path: Path, before: Callable[[], None] | None = None) -> "subprocess.Popen[str]":
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", CHILD, path], text=True, cwd=ROOT, preexec_fn=before, **pipes)


def test_disk_full_told_by_the_kernel(tmp_path: Path) -> None:
    """A limit on the size of files makes real writes fail, in part and then in whole."""
    process = child(tmp_path / "x.engine", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)))
    _, errors = process.communicate()
    assert process.returncode == 1
    assert "DiskFull" in errors and "File too large: the engine needs at least 260,096 bytes" in errors
    assert names(tmp_path) == []


def test_killed_writer(tmp_path: Path) -> None:
    path = tmp_path / "x.engine"
    with child(path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        (leftover,) = names(tmp_path)
        with EngineWriter(path) as writer:  # the other lives: its file stays
            assert leftover in names(tmp_path) and len(names(tmp_path)) == 2
            writer.discard()
        process.send_signal(signal.SIGKILL)
    assert names(tmp_path) == [leftover]
    assert leftover.startswith(f".x.engine.{process.pid}-") and leftover.endswith(".partial")
    (tmp_path / ".y.engine.1-00000000.partial").touch()  # another target's
    with EngineWriter(path) as writer:
        assert leftover not in names(tmp_path)
        fill(writer)
    assert names(tmp_path) == [".y.engine.1-00000000.partial", "x.engine"]
    verify(path)


def test_two_writers_of_one_target(tmp_path: Path) -> None:
    path = tmp_path / "x.engine"
    with child(path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        with EngineWriter(path) as writer:
            fill(writer)
        _, errors = process.communicate("\n")
        assert process.returncode == 1 and "exists; pass --force" in errors
    assert path.read_bytes() == assemble()
    assert names(tmp_path) == ["x.engine"]


def test_two_that_may_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "x.engine"
    with EngineWriter(path, overwrite=True) as first, EngineWriter(path, overwrite=True) as second:
        fill(second)
        first.add("plan.json", b"{}")
        last = first.finish(MANIFEST_FIELDS)
    with EngineFile.open(path) as engine:
        assert engine.hash == last
    assert names(tmp_path) == ["x.engine"]


def test_temporary_file_taken_for_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another writer removes the file between its creation and its lock: a second one is made."""
    removed: list[Path] = []

    def lock(fd: int, how: int) -> None:
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].unlink()
        real(fd, how)

    real = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lock)
    with EngineWriter(tmp_path / "x.engine") as writer:
        assert len(names(tmp_path)) == 1 and names(tmp_path) != [removed[0].name]
        fill(writer)
    assert (tmp_path / "x.engine").read_bytes() == assemble()
