from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot.compiler.cache.build_cache import BuildCache
from ingot.runtime.cli import main


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildCache:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    cache = BuildCache()
    cache.put("graph", "a" * 64, bytes(54))
    cache.put("weights", "b" * 64, bytes(154))
    return cache


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main(["cache", *words, "--json"]) == 0
    answer: dict[str, object] = json.loads(capsys.readouterr().out)
    return answer


def test_list(cache: BuildCache, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "list"]) == 0
    out = capsys.readouterr().out
    assert "300 B of at most 20.00 GB" in out and "imported graphs" in out and "0 min ago" in out
    assert told(capsys, "list")["kinds"] == {"graph": {"entries": 1, "size_bytes": 100},
                                             "weights": {"entries": 1, "size_bytes": 200}}


def test_clear(cache: BuildCache, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "clear", "--kind", "graph")["removed_bytes"] == 100
    assert [entry.kind for entry in cache.entries()] == ["weights"]
    assert main(["cache", "clear"]) == 0
    assert "removed 1 entries, 200 B" in capsys.readouterr().out and cache.entries() == []
    assert main(["cache", "list"]) == 0 and "0 B of at most" in capsys.readouterr().out


def test_wrong_words(cache: BuildCache, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "clear", "--kind", "graphs"]) == 2
    assert "'graph', 'object'" in capsys.readouterr().err.replace("'digests', ", "")
