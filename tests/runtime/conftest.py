"""The mock engine, compiled and written once a session."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.runtime.engine import Engine
from tests.runtime.mock_engine import compile_code, write_engine


@pytest.fixture(scope="session")
def mock_code(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return compile_code(tmp_path_factory.mktemp("mock_code"))


@pytest.fixture(scope="session")
def mock_path(mock_code: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_engine(tmp_path_factory.mktemp("mock_engine") / "mock.engine", mock_code)


@pytest.fixture
def mock(mock_path: Path) -> Iterator[Engine]:
    with Engine.load(mock_path, kv_cache_tokens=256, num_workers=2) as engine:
        yield engine
