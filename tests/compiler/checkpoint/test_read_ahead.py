from __future__ import annotations

import os
from pathlib import Path

import pytest

from ingot.compiler.checkpoint import read_ahead as module
from ingot.compiler.checkpoint.read_ahead import read_ahead


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(begin, bytes) of what the system is asked for."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, begin, size, advice: found.append((begin, size)))
    return found


def test_all_of_every_file_is_asked_for(tmp_path: Path, asked: list[tuple[int, int]]) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (tmp_path / name).write_bytes(bytes(600 << 10))
    (tmp_path / "training.bin").write_bytes(b"no tensors of ours")
    thread = read_ahead(str(tmp_path))
    assert thread is not None
    thread.join(20)
    step = module._STEP_BYTES
    assert asked == [(0, step), (step, step), (2 * step, step)] * 2
    asked.clear()
    (tmp_path / "x.gguf").write_bytes(b"1")
    thread = read_ahead(str(tmp_path / "x.gguf"))
    assert thread is not None
    thread.join(20)
    assert asked == [(0, step)]


def test_nothing_is_asked_for_where_it_would_be_gone_again(tmp_path: Path, asked: list[tuple[int, int]],
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    monkeypatch.setattr(module, "available_memory_bytes", lambda: 3999)
    assert read_ahead(str(tmp_path)) is None
    monkeypatch.setattr(module, "available_memory_bytes", lambda: 4000)
    thread = read_ahead(str(tmp_path))
    assert thread is not None
    thread.join(20)


@pytest.mark.parametrize("model", ["nowhere", "organisation/model", "nowhere.gguf"])
def test_what_is_not_there_is_told_by_others(model: str, asked: list[tuple[int, int]]) -> None:
    assert read_ahead(model) is None and not asked
