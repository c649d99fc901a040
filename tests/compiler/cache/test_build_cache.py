"""The build cache as a folder: whole entries or none, whoever is killed; the least recently used go first."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ingot.compiler.cache.build_cache import BuildCache, limit_from_environment
from ingot.runtime.errors import RequestError

A, B, C = "a" * 64, "b" * 64, "c" * 64
ENTRY_BYTES = 46 + 100


@pytest.fixture
def cache(tmp_path: Path) -> BuildCache:
    return BuildCache(tmp_path / "cache", 10_000)


def test_what_was_put_is_found(cache: BuildCache) -> None:
    assert cache.get("graph", A) is None
    cache.put("graph", A, b"data")
    assert cache.get("graph", A) == b"data" and cache.get("graph", B) is None and cache.get("weights", A) is None
    assert (cache.uses["graph"].found, cache.uses["graph"].made) == (1, 2)


@pytest.mark.parametrize("spoil", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b"",
                                   lambda data: data[:60] + b"?" + data[61:], lambda data: b"?" + data[1:]])
def test_a_damaged_entry_is_none(cache: BuildCache, spoil: object) -> None:
    cache.put("graph", A, b"d" * 100)
    path = cache.entries()[0].path
    path.write_bytes(spoil(path.read_bytes()))  # type: ignore[operator]
    assert cache.get("graph", A) is None and not path.exists()


def aged(cache: BuildCache, key: str, used: float) -> None:
    cache.put("weights", key, b"d" * 100)
    os.utime(cache.folder / "weights" / key[:2] / key, (used, used))


def test_the_longest_unused_goes_first(cache: BuildCache) -> None:
    for number, key in enumerate((A, B, C)):
        aged(cache, key, 1000.0 + number)
    assert cache.get("weights", A) is not None  # and so was used last
    assert cache.trim(2 * ENTRY_BYTES) == ENTRY_BYTES
    assert [entry.path.name for entry in cache.entries()] == [C, A]


def test_it_trims_itself_while_it_is_filled(tmp_path: Path) -> None:
    cache = BuildCache(tmp_path, 8 * ENTRY_BYTES)
    for number in range(40):
        cache.put("object", f"{number:064}", bytes(100))
    assert sum(entry.size_bytes for entry in cache.entries()) <= 10 * ENTRY_BYTES


def test_what_is_too_large_is_left_out(cache: BuildCache) -> None:
    cache.put("weights", A, bytes(5000))
    assert cache.entries() == []


def test_what_killed_builds_left_is_removed_in_time(cache: BuildCache) -> None:
    cache.put("graph", A, b"data")
    folder = cache.entries()[0].path.parent
    old, young = folder / f".{A}.1-ab", folder / f".{A}.2-cd"
    old.write_bytes(b"half")
    young.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    cache.trim()
    assert not old.exists() and young.exists() and cache.get("graph", A) == b"data"


def test_clear(cache: BuildCache) -> None:
    cache.put("graph", A, b"d" * 100)
    cache.put("weights", A, b"d" * 100)
    assert cache.clear("graph") == ENTRY_BYTES and [entry.kind for entry in cache.entries()] == ["weights"]
    assert cache.clear() == ENTRY_BYTES and cache.entries() == []


def test_gpu_kernels_are_folders_and_count(cache: BuildCache) -> None:
    folder = cache.folder / "kernels" / A[:2] / A
    folder.mkdir(parents=True)
    (folder / "kernel.cubin").write_bytes(bytes(30))
    assert [(entry.kind, entry.size_bytes) for entry in cache.entries()] == [("kernels", 30)]
    assert cache.trim(0) == 30 and not folder.exists()


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = BuildCache(tmp_path / "file", 1000)
    cache.put("graph", A, b"data")
    assert cache.get("graph", A) is None and cache.entries() == [] and cache.trim() == 0


def test_many_writers_and_readers_of_one_entry(cache: BuildCache) -> None:
    data, seen = bytes(range(250)) * 4, []

    def work() -> None:
        for _ in range(50):
            cache.put("weights", A, data)
            seen.append(cache.get("weights", A))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) == {data}
    assert [path.name for path in (cache.folder / "weights" / A[:2]).iterdir()] == [A]


WRITER = """
import sys
from pathlib import Path
from ingot.compiler.cache.build_cache import BuildCache
cache = BuildCache(Path(sys.argv[1]), 1 << 40)
print("ready", flush=True)
number = 0
while True:
    cache.put("weights", f"{number % 7:064}", bytes([number % 7]) * 3_000_000)
    number += 1
"""


def test_killed_writers_leave_whole_entries(tmp_path: Path) -> None:
    for delay in (0.0, 0.01, 0.03, 0.05):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        for entry in (cache := BuildCache(tmp_path, 1 << 40)).entries():
            assert cache.get("weights", entry.path.name) == bytes([int(entry.path.name)]) * 3_000_000


@pytest.mark.parametrize(("text", "expected"), [("", 20_000_000_000), ("500MB", 500_000_000), ("1.5 GB", 1_500_000_000),
                                                ("0", 0), ("7k", 7000)])
def test_the_limit(monkeypatch: pytest.MonkeyPatch, text: str, expected: int) -> None:
    monkeypatch.setenv("INGOT_CACHE_LIMIT", text)
    assert limit_from_environment() == expected


def test_a_malformed_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_CACHE_LIMIT", "much")
    with pytest.raises(RequestError, match=r"INGOT_CACHE_LIMIT is 'much'; expected a size such as 500MB"):
        BuildCache()
