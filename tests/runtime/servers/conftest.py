from collections.abc import Iterator

import pytest

from tests.runtime.servers.scripted_engine import ScriptedRunner, http


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner()


@pytest.fixture
def address(tmp_path_factory: pytest.TempPathFactory, runner: ScriptedRunner) -> Iterator[str]:
    """An HTTP server around `runner`."""
    with http(tmp_path_factory.getbasetemp(), runner) as bound:
        yield bound
