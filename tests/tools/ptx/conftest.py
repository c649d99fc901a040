"""What the tests of compiled kernels share."""
from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ingot.compiler.gpu.triton_compile import PtxCompiler
from ingot.compiler.targets import architectures


@pytest.fixture(scope="module")
def compilers() -> Iterator[Callable[[str], PtxCompiler]]:
    """One compiling process an architecture; what it has compiled stays in the user's cache."""
    held: dict[str, PtxCompiler] = {}

    def compiler(arch: str) -> PtxCompiler:
        return held.setdefault(arch, PtxCompiler(architectures()[arch]))
    yield compiler
    for one in held.values():
        one.__exit__()
