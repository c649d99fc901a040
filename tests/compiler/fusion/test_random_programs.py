"""Random chains of operators: unfused, fused and compiled give the same."""
from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from ingot.compiler.errors import CannotCompile
from tests.compiler.fusion.loop_runner import Program, compiled, expect_same
from tests.compiler.fusion.random_programs import Step, build_from
from tests.plugins.native import HOST_ISAS

NUMBER = st.integers(0, 209)
STEPS = st.lists(st.tuples(NUMBER, NUMBER, NUMBER), min_size=1, max_size=9)
EXTENTS = st.lists(st.integers(1, 6), min_size=1, max_size=3)
TOLERANCE = 2e-4
"""Sums, products and means of numbers that nearly cancel, in another order."""


@settings(max_examples=250, deadline=None)
@given(EXTENTS, STEPS, st.integers(1, 5))
def test_fused_is_unfused(extents: list[int], steps: list[Step], tokens: int) -> None:
    try:
        program = Program("random", build_from(extents, steps))
    except CannotCompile:
        reject()
    expect_same(program, None, tokens, tolerance=TOLERANCE)


@pytest.mark.parametrize("isa", HOST_ISAS)
def test_compiled_is_unfused(isa: str) -> None:
    """Many programs at a time, because a compiler takes longer to start than to compile one of them."""
    @settings(max_examples=2, deadline=None, database=None)
    @given(st.lists(st.tuples(EXTENTS, STEPS), min_size=30, max_size=30))
    def check(sources: list[tuple[list[int], list[Step]]]) -> None:
        programs = []
        for extents, steps in sources:
            try:
                programs.append(Program(f"{extents} {steps}", build_from(extents, steps)))
            except CannotCompile:
                continue
        with tempfile.TemporaryDirectory() as folder:
            library = compiled(programs, isa, Path(folder))
        for number, program in enumerate(programs):
            expect_same(program, library, 1 + number % 4, (1, 2, 3), tolerance=TOLERANCE)

    check()
