"""One interpreting process for all tests of GPU kernels."""
from __future__ import annotations

from collections.abc import Iterator

import pytest

from ingot.compiler.gpu.interpret import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter() as running:
        yield running
