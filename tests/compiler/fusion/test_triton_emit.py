"""Loops as Triton kernels: every operator and view that loops take, in the interpreter and compiled."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.compiler.errors import CannotCompile
from ingot.compiler.gpu.interpret import Interpreter
from ingot.compiler.ir.interpret import run
from ingot.compiler.ir.types import DType
from ingot.plugins.gpu.floats import from_bf16, to_bf16
from tests.compiler.fusion.loop_runner import Program
from tests.compiler.fusion.random_programs import build_from
from tests.compiler.fusion.test_c_emit import CASES, LONG, SPECIAL, VECTORISED
from tests.compiler.fusion.test_random_programs import EXTENTS, STEPS, TOLERANCE
from tests.compiler.fusion.triton_runner import launches, run_interpreted
from tests.compiler.graphs import Builder, Weights, compare, random_inputs
from tests.plugins.gpu.support import ARCHITECTURES, QUICK, compiled


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


def rounded(x: np.ndarray, float_type: str) -> np.ndarray:
    if x.dtype != np.float32 or float_type == "fp32":
        return x
    return from_bf16(to_bf16(x)) if float_type == "bf16" else x.astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("float_type", ["bf16", "fp16"])
@pytest.mark.parametrize("program", [case for case in CASES if case.loops == 1], ids=lambda program: program.name)
def test_values_are_stored_rounded(program: Program, float_type: str, interpreter: Interpreter) -> None:
    """Every element but those whose float32 value lies next to a tie is the nearest one of the type."""
    inputs = {name: rounded(x, float_type) for name, x in random_inputs(program.graph, 17).items()}
    got = run_interpreted(program, interpreter, inputs, 17, float_type)
    for name, x in run(program.graph, inputs, Weights()).items():
        want = rounded(x, float_type)
        step = {"bf16": 2.0**-7, "fp16": 2.0**-10}[float_type]
        assert np.allclose(got[name], want, rtol=1.01 * step, atol=1e-6) and (got[name] == want).mean() > 0.98


def test_nan_and_infinity_are_those_of_numpy(interpreter: Interpreter) -> None:
    nan, inf = np.nan, np.inf
    inputs = {"x": np.array([[nan, 1, -0.0, inf, 2], [1, 2, -inf, 3, nan], [0, -1, -inf, 5, 1]], np.float32),
              "y": np.array([[1, nan, 0.0, 1, -inf], [nan, 1, inf, 3, nan], [0, -2, 4, 5, 1]], np.float32)}
    compare(run_interpreted(SPECIAL, interpreter, inputs, 3), run(SPECIAL.graph, inputs, Weights()), 0.0, "kernels")


def test_a_nan_in_any_lane_of_a_long_reduction(interpreter: Interpreter) -> None:
    for place in (0, 17, 4992, 5002):
        x = np.ones((1, 5003), np.float32)
        x[0, place] = np.nan
        for values in run_interpreted(LONG, interpreter, {"x": x}, 1).values():
            assert np.isnan(values).all(), place


def special_functions(b: Builder) -> list[str]:
    x = b.x("x", "T", 8)
    return [b.op(op, x) for op in ("exp", "expm1", "log", "log1p", "tanh", "sigmoid", "silu", "softplus", "trunc",
                                   "round", "rsqrt", "erf")] + [
        b.op("pow", x, b.x("y", 8)), b.op("gelu", x, approximate="none"), b.op("gelu", x, approximate="tanh")]


def test_functions_far_from_one(interpreter: Interpreter) -> None:
    """Small arguments, whose results lose digits where a function is spelled naively, and those that overflow."""
    x = np.array([[1e-6, -1e-6, 1e-3, -0.4, 0.6, 80.0, -80.0, 0.0], [3e-7, 2.5, -2.5, 1e6, -0.999, 30.0, 5e6, 1.0]],
                 np.float32)
    y = np.array([0.5, 3, 2, 3, -2, 10, 2, 0], np.float32)
    program = Program("special_functions", special_functions)
    got = run_interpreted(program, interpreter, {"x": x, "y": y}, 2)
    for name, want in run(program.graph, {"x": x, "y": y}, Weights()).items():
        assert np.allclose(got[name], want, rtol=3e-6, atol=1e-30, equal_nan=True), (name, got[name], want)


@settings(max_examples=25, deadline=None, database=None)
@given(st.data())
def test_random_programs(interpreter: Interpreter, data: st.DataObject) -> None:
    extents, steps, tokens = data.draw(EXTENTS), data.draw(STEPS), data.draw(st.integers(1, 5))
    try:
        program = Program(f"{extents} {steps}", build_from(extents, steps))
    except CannotCompile:
        return
    inputs = random_inputs(program.graph, tokens)
    compare(run_interpreted(program, interpreter, inputs, tokens), run(program.graph, inputs, Weights()), TOLERANCE,
            program.name)


def test_equal_loops_are_one_kernel() -> None:
    def scaled(factor: float, width: int = 8) -> Program:
        return Program("scaled", lambda b: b.op("mul", b.x("x", "T", width), factor))

    (one,), (same,) = launches(scaled(2.0)), launches(scaled(2.0), bindings={"T": 4096, "L": 1})
    assert one.kernel == same.kernel and one.grid != same.grid, "buckets share a kernel"
    assert len({found.kernel.symbol for factor in (2.0, 3.0, 2, 0.0, -0.0)
                for found in launches(scaled(factor))}) == 5
    assert len({launches(scaled(2.0), kind)[0].kernel.symbol for kind in ("bf16", "fp16", "fp32")}) == 3


def test_elements_beyond_two_billion() -> None:
    program = Program("huge", lambda b: b.op("mul", b.x("x", "T", 4096), 2.0))
    text = launches(program, bindings={"T": 1 << 20, "L": 1})[0].kernel.source
    assert text.count("to(tl.int64)") == 2 and "int64" not in launches(program)[0].kernel.source


def angles(b: Builder) -> str:
    """cos of position x frequency, as rotary embeddings begin."""
    at = b.op("reshape", b.op("cast", b.x("positions", "T", dtype=DType.I32), dtype=DType.F32), shape=("T", 1))
    product = b.op("mul", at, b.x("frequencies", 1, 64))
    return b.op("cos", b.op("cat", product, product, dim=1))


def powers(b: Builder) -> list[str]:
    i = b.x("i", "T", 64, dtype=DType.I32)
    return [b.op("pow", b.x("x", "T", 64), b.x("y", "T", 64)), b.op("pow", i, b.op("abs", i))]


COMPILED = [*VECTORISED, Program("angles", angles), Program("powers", powers), LONG,
            *(case for case in CASES if case.name in ("partial_rope", "normalised", "gathered"))]


@pytest.mark.parametrize("arch", [pytest.param(arch, marks=[] if arch in QUICK else pytest.mark.slow)
                                  for arch in ARCHITECTURES])
def test_compiles_without_spills(arch: str) -> None:
    kernels = [one.kernel for program in COMPILED for one in launches(program, "bf16", {"T": 2048, "L": 64})]
    for kernel, code in compiled(kernels, arch).items():
        assert code.spill_stores == 0, kernel.symbol
        assert code.registers <= (255 if "power(" in kernel.source else 128), (kernel.symbol, code.registers)
