"""runtime/devices/host_weights.py: the same bytes in large pages as mapped, and when they stay mapped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ingot.runtime.devices import host_weights, load_program
from ingot.runtime.devices.host_weights import LARGE_PAGE, weights_in_memory
from ingot.runtime.engine import Engine
from ingot.runtime.engine_file import EngineFile
from ingot.runtime.engine_format import EngineFormatError
from ingot.runtime.manifest import weight_name


@pytest.fixture
def path(speaking_engine: Callable[..., Path]) -> Path:
    return speaking_engine("cpu", "w4a8")


def entries(engine: EngineFile) -> dict[str, tuple[str, int]]:
    return {name: (entry["blob"], entry["size"]) for name, entry in engine.plan["weights"].items()}


def test_bytes_in_large_pages(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_weights, "_large_pages_pay", lambda size: True)
    with EngineFile.open(path) as engine:
        weights = entries(engine)
        name, (blob, size) = next(iter(weights.items()))
        weights["again"] = blob, size  # the same blob by another name: once in memory
        held = weights_in_memory(engine, weights)
        for each, (of, _) in weights.items():
            np.testing.assert_array_equal(held[each], engine.map(weight_name(of)))
            assert held[each].ctypes.data % 64 == 0
        assert held["again"].ctypes.data == held[name].ctypes.data
        assert min(array.ctypes.data for array in held.values()) % LARGE_PAGE == 0


def test_answers_do_not_depend_on_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, logits = [5, 7, 9, 11], []
    for pays in (False, True):
        monkeypatch.setattr(host_weights, "_large_pages_pay", lambda size, pays=pays: pays)
        with Engine.load(path, kv_cache_tokens=64) as engine:
            logits.append(engine.logits(ids))
    np.testing.assert_array_equal(logits[0], logits[1])


def test_a_weight_of_another_size(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_weights, "_large_pages_pay", lambda size: True)
    with EngineFile.open(path) as engine:
        next(iter(engine.plan["weights"].values()))["size"] += 64
        with pytest.raises(EngineFormatError, match=r"has \d+ bytes, expected \d+"):
            load_program(engine, 64)


@pytest.mark.parametrize(("enabled", "free_kib", "pays"), [
    ("always [madvise] never", 64 << 10, True), ("[always] madvise never", 64 << 10, True),
    ("always madvise [never]", 64 << 10, False), ("always [madvise] never", 31 << 10, False),
    (None, 64 << 10, False)])
def test_where_large_pages_pay(enabled: str | None, free_kib: int, pays: bool, tmp_path: Path) -> None:
    """Of weights of 8 MiB: the system has such pages, and four times as much memory is free."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {128 << 10} kB\nMemAvailable: {free_kib} kB\n")
    if enabled is not None:
        folder = tmp_path / "sys/kernel/mm/transparent_hugepage"
        folder.mkdir(parents=True)
        (folder / "enabled").write_text(enabled + "\n")
    assert host_weights._large_pages_pay(8 << 20, tmp_path) is pays
    assert not host_weights._large_pages_pay(LARGE_PAGE - 1, tmp_path)
