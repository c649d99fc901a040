"""Loops as Triton kernels: every operator and view that loops take, in the interpreter and compiled."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ingot.compiler.gpu.interpret import Interpreter
from ingot.compiler.ir.interpret import run
from tests.compiler.fusion.loop_runner import Program
from tests.compiler.fusion.test_c_emit import CASES, LONG, SPECIAL
from tests.compiler.fusion.triton_runner import run_interpreted
from tests.compiler.graphs import Weights, compare, random_inputs


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter() as running:
        yield running


@pytest.mark.parametrize("program", CASES, ids=lambda program: program.name)
def test_kernels_agree_with_numpy(program: Program, interpreter: Interpreter) -> None:
    tolerance = 2e-5 if program.name in ("reductions", "floats_divided") else 4e-6
    for tokens in (1, 17):
        inputs = random_inputs(program.graph, tokens)
        want = run(program.graph, inputs, Weights())
        compare(run_interpreted(program, interpreter, inputs, tokens), want, tolerance, f"{program.name}, T = {tokens}")
