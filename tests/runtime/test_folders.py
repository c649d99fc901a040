from pathlib import Path

import pytest

from ingot.runtime.folders import cache_folder


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("INGOT_CACHE", raising=False)
    assert cache_folder() == Path("/home/someone/.cache/ingot")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/ingot")
    monkeypatch.setenv("INGOT_CACHE", "/ingot")
    assert cache_folder() == Path("/ingot")
