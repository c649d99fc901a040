"""Every operator and view that loops take: interpreted unfused and fused, and compiled for each instruction set."""
from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from ingot.compiler.cpu.isa import ISAS
from ingot.compiler.cpu.toolchain import assembly
from ingot.compiler.fusion.c_emit import emit
from ingot.compiler.ir.interpret import run
from ingot.compiler.ir.types import DType
from ingot.compiler.weights.expr import literal
from ingot.plugins.kernel import INCLUDE_DIR, translation_unit
from tests.compiler.fusion.loop_runner import Program, compiled, expect_same, run_native
from tests.compiler.graphs import Builder, Weights, compare
from tests.plugins.native import HOST_ISAS, Library

TOKENS = (1, 3, 17)
WORKERS = (1, 2, 3)


def rotate_half(b: Builder) -> str:
    x, cos, sin = b.x("x", "T", 3, 8), b.x("cos", "T", 1, 8), b.x("sin", "T", 1, 8)
    turned = b.op("cat", b.op("neg", b.slice(x, 2, 4, 8)), b.slice(x, 2, 0, 4), dim=2)
    return b.op("add", b.op("mul", x, cos), b.op("mul", turned, sin))


def interleaved_rope(b: Builder) -> str:
    x, cos, sin = b.x("x", "T", 3, 8), b.x("cos", "T", 1, 4), b.x("sin", "T", 1, 4)
    even, odd = b.slice(x, 2, 0, 8, 2), b.slice(x, 2, 1, 8, 2)
    first = b.op("sub", b.op("mul", even, cos), b.op("mul", odd, sin))
    second = b.op("add", b.op("mul", odd, cos), b.op("mul", even, sin))
    pair = [b.op("reshape", half, shape=("T", 3, 4, 1)) for half in (first, second)]
    return b.op("reshape", b.op("cat", *pair, dim=3), shape=("T", 3, 8))


def partial_rope(b: Builder) -> str:
    """Of the last part of each head, after a part without positions: multi-head latent attention."""
    latent, shared = b.x("latent", "T", 4, 28), b.x("shared", "T", 1, 6)
    cos, sin = b.x("cos", "T", 1, 6), b.x("sin", "T", 1, 6)
    turned = b.op("cat", b.op("neg", b.slice(shared, 2, 3, 6)), b.slice(shared, 2, 0, 3), dim=2)
    rope = b.op("add", b.op("mul", shared, cos), b.op("mul", turned, sin))
    return b.op("cat", b.slice(latent, 2, 0, 16), b.op("expand", rope, shape=("T", 4, 6)), dim=2)


def gelu_spelled_out(b: Builder) -> str:
    """Each step reads the input again: one loop all the same."""
    x = b.op("add", b.x("x", "T", 24), b.x("bias", 24))
    inner = b.op("mul", b.op("add", x, b.op("mul", b.op("pow", x, 3), 0.044715)), 0.7978845608)
    return b.op("mul", b.op("mul", x, 0.5), b.op("add", b.op("tanh", inner), 1.0))


def repeat_interleave(b: Builder) -> str:
    x = b.op("reshape", b.x("x", "T", 2, 8), shape=("T", 2, 1, 8))
    return b.op("reshape", b.op("expand", x, shape=("T", 2, 3, 8)), shape=("T", 6, 8))


def repeated_tokens(b: Builder) -> str:
    """A dimension of 3*T."""
    x = b.op("reshape", b.x("x", "T", 5), shape=("T", 1, 5))
    wide = b.op("reshape", b.op("expand", x, shape=("T", 3, 5)), shape=("3*T", 5))
    return b.op("mul", wide, 2.0)


def every_second(b: Builder) -> str:
    x = b.x("x", "T", 18)
    return b.op("cat", b.slice(x, 1, 0, 18, 2), b.slice(x, 1, 1, 18, 3), b.slice(x, 1, 17, 18), dim=1)


def regrouped(b: Builder) -> str:
    """A reshape that splits and merges: [6, 4] -> [3, 8]; then a permute."""
    x = b.op("reshape", b.x("x", "T", 6, 4), shape=("T", 3, 8))
    return b.op("permute", b.op("exp", b.op("permute", x, dims=(0, 2, 1))), dims=(0, 2, 1))


def crossed(b: Builder) -> str:
    """Neither extent divides the other: [4, 6] transposed, as [8, 3]."""
    x = b.op("permute", b.x("x", "T", 6, 4), dims=(0, 2, 1))
    return b.op("neg", b.op("reshape", x, shape=("T", 8, 3)))


def masks(b: Builder) -> str:
    x, at = b.x("x", "T", 12), b.op("reshape", b.x("at", "T", dtype=DType.I32), shape=("T", 1))
    column = b.op("arange", start=0, step=1, length=12, dtype=DType.I32)
    seen = b.op("logical_and", b.op("le", column, at), b.op("gt", column, b.op("sub", at, 4)))
    return b.op("where", seen, b.op("mul", x, 2), float("-inf"))


def gathered(b: Builder) -> str:
    x, index = b.x("x", "T", 6), b.x("index_below6", "T", 3, dtype=DType.I32)
    return b.op("mul", b.op("gather", x, index, dim=1), b.op("cast", index, dtype=DType.F32))


def taken(b: Builder) -> str:
    """From an activation, with an index that is computed, of a reshaped table."""
    table = b.op("reshape", b.op("neg", b.x("x", "T", 3, 2, 4)), shape=("T", 6, 4))
    index = b.op("mod", b.x("picks", 5, dtype=DType.I32), 6)
    return b.op("take", table, index, dim=1)


def taken_tokens(b: Builder) -> str:
    return b.op("take", b.x("table", 9, 4), b.op("floor_div", b.x("index_below9", "T", 2, dtype=DType.I32), 2), dim=0)


def for_each_expert(b: Builder) -> list[str]:
    """All tokens, once for each expert, in one dimension E*T and back."""
    x = b.op("reshape", b.x("x", "T", 5), shape=(1, "T", 5))
    flat = b.op("reshape", b.op("expand", x, shape=(3, "T", 5)), shape=("3*T", 5))
    scores = b.op("reshape", b.op("permute", b.x("scores", "T", 3), dims=(1, 0)), shape=("3*T", 1))
    y = b.op("mul", flat, scores)
    return [b.op("reshape", y, shape=(3, "T", 5)), b.op("exp", y)]


def from_the_end(b: Builder) -> list[str]:
    """Negative indices count from there."""
    x = b.x("x", "T", 6, 2)
    last = b.constant(literal(np.array([-1], np.int32)), "last")
    some = b.constant(literal(np.array([0, -2, 3, -6], np.int32)), "some")
    index = b.op("sub", b.x("index_below6", "T", 3, 2, dtype=DType.I32), 6)
    return [b.op("take", x, last, dim=1), b.op("take", x, some, dim=1), b.op("gather", x, index, dim=1)]


def chosen_rows(b: Builder) -> str:
    rows = b.op("full", shape=(2,), value=0, dtype=DType.I32)
    return b.op("gather_rows", b.op("exp", b.x("x", "T", 5)), rows, dim=0)


def normalised(b: Builder) -> str:
    """A norm that no pass has raised: two reductions, and a loop over their results."""
    x = b.x("x", "T", 40)
    centered = b.op("sub", x, b.op("reduce_mean", x, dims=(1,), keepdim=True))
    variance = b.op("reduce_mean", b.op("mul", centered, centered), dims=(1,), keepdim=True)
    return b.op("mul", centered, b.op("rsqrt", b.op("add", variance, 1e-5)))


def softcap(b: Builder) -> str:
    return b.op("mul", b.op("tanh", b.op("div", b.x("x", "T", 33), 30.0)), 30.0)


def odd_broadcasts(b: Builder) -> str:
    a, c = b.x("a", "T", 1, 3, 1), b.x("c", 5, 1, 7)
    return b.op("sub", b.op("mul", a, c), b.op("maximum", b.x("d", 3, 1), 0.25))


def integers(b: Builder) -> list[str]:
    """Of negative numbers too."""
    a, c = b.x("a", "T", 9, dtype=DType.I32), b.x("c", "T", 9, dtype=DType.I32)
    safe = b.op("where", b.op("eq", c, 0), 3, c)
    return [b.op(op, a, other) for op in ("floor_div", "mod") for other in (safe, 4, -4)] + [
        b.op("pow", a, 3), b.op("abs", a), b.op("sign", a), b.op("minimum", a, c), b.op("maximum", a, -2),
        b.op("neg", a), b.op("cast", b.op("mul", a, 0.75), dtype=DType.I32), b.op("div", a, safe), b.op("round", a)]


def floats_divided(b: Builder) -> list[str]:
    a, c = b.x("a", "T", 9), b.x("c", "T", 9)
    return [b.op(op, b.op("mul", a, 10.0), other) for op in ("floor_div", "mod") for other in (c, 0.1, -3.0)]


def booleans(b: Builder) -> list[str]:
    p, q, x = b.x("p", "T", 7, dtype=DType.BOOL), b.x("q", "T", 7, dtype=DType.BOOL), b.x("x", "T", 7)
    return [b.op(op, p, q) for op in ("logical_and", "logical_or", "eq", "ne", "add", "mul", "maximum", "minimum")] + [
        b.op("logical_not", p), b.op("cast", b.op("floor", x), dtype=DType.BOOL), b.op("where", p, q, b.op("gt", x, 0)),
        b.op("add", b.op("add", p, 1), q), b.op("logical_or", x, 0.0), b.op("cast", p, dtype=DType.F32)]


UNARY = ("neg", "abs", "exp", "expm1", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tanh", "sigmoid", "erf", "floor",
         "ceil", "round", "trunc", "sign", "silu", "softplus", "log", "log1p")


def unary(b: Builder) -> list[str]:
    x, positive = b.x("x", "T", 21), b.op("exp", b.x("y", "T", 21))
    domain = {"sqrt": positive, "rsqrt": positive, "log": positive, "log1p": positive}
    return [b.op(op, domain.get(op, b.op("mul", x, 3.0))) for op in UNARY] + [
        b.op("gelu", x, approximate=kind) for kind in ("none", "tanh")]


def binary(b: Builder) -> list[str]:
    x, y, i = b.x("x", "T", 11), b.x("y", "T", 11), b.x("i", "T", 11, dtype=DType.I32)
    positive = b.op("exp", x)
    return [b.op(op, x, other) for op in ("add", "sub", "mul", "div", "maximum", "minimum") for other in (y, 2.5)] + [
        b.op("pow", positive, y), *(b.op("pow", positive, n) for n in (2, 3, 0.5, -0.5, -1.0, 1.7)),
        *(b.op(op, x, i) for op in ("add", "mul", "maximum", "lt", "ge", "gt", "le", "ne")), b.op("sub", 1.0, x)]


def reductions(b: Builder) -> list[str]:
    x, i = b.x("x", "T", 3, 4, 37), b.x("i", "T", 3, 4, 5, dtype=DType.I32)
    p = b.x("p", "T", 6, dtype=DType.BOOL)
    kinds = ("sum", "mean", "max", "min", "prod")
    found = [b.op(f"reduce_{kind}", x, dims=dims, keepdim=keepdim) for kind in kinds
             for dims, keepdim in (((3,), False), ((1,), True), ((1, 3), False), ((2, 3), True), ((1, 2, 3), False))]
    found += [b.op(f"reduce_{kind}", i, dims=dims, keepdim=False) for kind in kinds for dims in ((3,), (1,), (2, 3))]
    return found + [b.op(f"reduce_{kind}", p, dims=(1,), keepdim=False) for kind in kinds]


def reduced_expression(b: Builder) -> str:
    """The sum over experts, each by its weight, which is looked up."""
    parts, scores = b.x("parts", "T", 4, 9), b.x("scores", "T", 6)
    ids = b.x("ids_below6", "T", 4, dtype=DType.I32)
    weight = b.op("reshape", b.op("gather", scores, ids, dim=1), shape=("T", 4, 1))
    return b.op("reduce_sum", b.op("mul", parts, weight), dims=(1,), keepdim=False)


def from_nothing(b: Builder) -> list[str]:
    i = b.op("arange", start=3, step=-2, length=6, dtype=DType.I32)
    f = b.op("arange", start=0.5, step=0.25, length=6, dtype=DType.F32)
    return [b.op("add", b.x("x", "T"), 0.5), i, f, b.op("full", shape=("T", 2), value=True, dtype=DType.BOOL),
            b.op("mul", b.op("full", shape=("T", 1), value=1.5, dtype=DType.F32), f),
            b.op("full", shape=(), value=-2.0, dtype=DType.F32)]


def wide(b: Builder) -> str:
    """Wide enough that one row is divided between workers."""
    x = b.x("x", "T", 2 * 1100)
    return b.op("mul", b.op("silu", b.slice(x, 1, 0, 1100)), b.slice(x, 1, 1100, 2200))


def wide_cat(b: Builder) -> str:
    x = b.x("x", "T", 700)
    return b.op("cat", b.op("neg", b.slice(x, 1, 650, 700)), x, b.slice(x, 1, 0, 3), dim=1)


def tokens_alone(b: Builder) -> str:
    return b.op("add", b.x("x", "T"), 1.0)


def nested_cats(b: Builder) -> str:
    x, y = b.x("x", "T", 6), b.x("y", "T", 4)
    inner = b.op("cat", y, b.slice(x, 1, 1, 3), dim=1)
    return b.op("cat", b.slice(inner, 1, 2, 6), b.op("cat", x, inner, dim=1), dim=1)


def logits(b: Builder) -> str:
    return b.op("mul", b.x("x", "T", 6), b.x("y", "T", 1))


CASES = [Program(build.__name__, build, loops) for build, loops in (
    (rotate_half, 1), (interleaved_rope, 1), (partial_rope, 1), (gelu_spelled_out, 1), (repeat_interleave, 1),
    (repeated_tokens, 1), (every_second, 1), (regrouped, 1), (crossed, 1), (masks, 1), (gathered, 1), (taken, 1),
    (taken_tokens, 1), (from_the_end, 3), (for_each_expert, 2), (chosen_rows, 1), (normalised, 3), (softcap, 1),
    (odd_broadcasts, 1), (integers, None), (floats_divided, None), (booleans, None), (unary, None), (binary, None),
    (reductions, None), (reduced_expression, 1), (from_nothing, 6), (wide, 1), (wide_cat, 1), (tokens_alone, 1),
    (nested_cats, 1), (logits, 1))]


@pytest.fixture(scope="module", params=HOST_ISAS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    return compiled([*CASES, SPECIAL, LONG], request.param, tmp_path_factory.mktemp("loops"))


@pytest.mark.parametrize("program", CASES, ids=lambda program: program.name)
def test_interpreted_fused_and_compiled_agree(program: Program, library: Library) -> None:
    # Powers and remainders of numbers near a multiple lose digits; so do sums in another order.
    tolerance = 1e-5 if program.name in ("reductions", "floats_divided") else 2e-6
    for tokens in TOKENS:
        expect_same(program, library, tokens, WORKERS, tolerance=tolerance)


@pytest.mark.parametrize("program", CASES, ids=lambda program: program.name)
def test_number_of_loops(program: Program) -> None:
    if program.loops is not None:
        assert sum(node.op == "loop" for node in program.fused.nodes) == program.loops
    assert {node.op for node in program.fused.nodes} <= {"loop", "reshape"}


def special_values(b: Builder) -> list[str]:
    x, y = b.x("x", "T", 5), b.x("y", "T", 5)
    return [b.op("maximum", x, y), b.op("minimum", x, y), b.op("maximum", x, 0.0), b.op("minimum", 1.0, x),
            b.op("sign", x), b.op("where", b.op("eq", x, x), x, 7.0), b.op("logical_or", x, False),
            *(b.op(f"reduce_{kind}", x, dims=(1,), keepdim=False) for kind in ("max", "min", "sum")),
            b.op("mul", b.op("full", shape=("T", 5), value=float("nan"), dtype=DType.F32), x)]


SPECIAL = Program("special_values", special_values)


def test_nan_and_infinity_are_those_of_numpy(library: Library) -> None:
    nan, inf = np.nan, np.inf
    inputs = {"x": np.array([[nan, 1, -0.0, inf, 2], [1, 2, -inf, 3, nan], [0, -1, -inf, 5, 1]], np.float32),
              "y": np.array([[1, nan, 0.0, 1, -inf], [nan, 1, inf, 3, nan], [0, -2, 4, 5, 1]], np.float32)}
    want = run(SPECIAL.graph, inputs, Weights())
    compare(run(SPECIAL.fused, inputs, Weights()), want, 0.0, "fused")
    compare(run_native(SPECIAL, library, inputs), want, 0.0, "C")


def long_row(b: Builder) -> list[str]:
    x = b.x("x", "T", 5003)
    return [b.op("reduce_max", x, dims=(1,), keepdim=True), b.op("reduce_sum", x, dims=(1,), keepdim=True)]


LONG = Program("long_row", long_row)


def test_a_nan_in_any_lane_of_a_long_reduction(library: Library) -> None:
    for place in (0, 17, 4992, 5002):
        x = np.ones((1, 5003), np.float32)
        x[0, place] = np.nan
        for values in run_native(LONG, library, {"x": x}).values():
            assert np.isnan(values).all(), place


def test_equal_loops_are_one_kernel_and_different_ones_are_not() -> None:
    def scaled(factor: float) -> Program:
        return Program("scaled", lambda b: b.op("mul", b.x("x", "T", 8), factor))

    assert scaled(2.0).kernels() == scaled(2.0).kernels()
    symbols = {kernel.symbol for factor in (2.0, 3.0, 2, 0.0, -0.0) for kernel in scaled(factor).kernels()}
    assert len(symbols) == 5


def test_the_comment_shows_the_loop_and_does_not_end_early() -> None:
    kernel, = Program("long", gelu_spelled_out).kernels()
    assert re.fullmatch(r"/\* f32\[T, 24\] = mul\([^*]*(\*(?!/)[^*]*)*\*/", kernel.prelude), kernel.prelude


def test_columns_of_a_concatenation_are_loops_of_their_own() -> None:
    """No choice inside of them, so that they vectorise."""
    kernel, = next(case for case in CASES if case.name == "rotate_half").kernels()
    assert "?" not in kernel.body and kernel.body.count("for (int i2") == 2


def test_emit_names_arguments_in_order(tmp_path: Path) -> None:
    program = Program("order", lambda b: b.op("sub", b.x("a", "T", 3), b.x("c", 3)))
    node, = program.fused.nodes
    kernel = emit(node, [program.fused.types[value] for value in node.values])
    assert node.values == ("a", "c")
    assert "in0 = args[0]" in kernel.body and "in1 = args[1]" in kernel.body and "out = args[2]" in kernel.body


def silu_mul(b: Builder) -> str:
    x = b.x("x", "T", 3072)
    return b.op("mul", b.op("silu", b.slice(x, 1, 0, 1536)), b.slice(x, 1, 1536, 3072))


def rope_of_heads(b: Builder) -> str:
    x, cos, sin = b.x("x", "T", 9, 64), b.x("cos", "T", 1, 64), b.x("sin", "T", 1, 64)
    turned = b.op("cat", b.op("neg", b.slice(x, 2, 32, 64)), b.slice(x, 2, 0, 32), dim=2)
    return b.op("add", b.op("mul", x, cos), b.op("mul", turned, sin))


def clamped(b: Builder) -> str:
    return b.op("minimum", b.op("maximum", b.x("x", "T", 512), -7.0), b.op("maximum", b.x("y", "T", 512), 7.0))


def sum_of_gelu(b: Builder) -> str:
    return b.op("reduce_sum", b.op("gelu", b.x("x", "T", 1024), approximate="none"), dims=(1,), keepdim=True)


def sum_of_experts(b: Builder) -> str:
    return b.op("reduce_sum", b.op("mul", b.x("x", "T", 8, 512), b.x("w", "T", 8, 1)), dims=(1,), keepdim=False)


VECTORISED = [Program(build.__name__, build, 1) for build in (
    silu_mul, rope_of_heads, clamped, sum_of_gelu, sum_of_experts)]


@pytest.mark.parametrize(("isa", "register"), [
    ("x86-64-v3", r"v(add|mul|fmadd|max|min)\w*ps\s.*%ymm"), ("x86-64-v4", r"v(add|mul|fmadd|max|min)\w*ps\s.*%zmm"),
    ("aarch64-dotprod", r"f(add|mul|mla|cmgt)\s+v\d+\.4s")], ids=["v3", "v4", "aarch64"])
def test_the_loops_of_language_models_vectorise(isa: str, register: str) -> None:
    kernels = [kernel for program in VECTORISED for kernel in program.kernels()]
    text = assembly(translation_unit(kernels), ISAS[isa], [INCLUDE_DIR])
    for program, kernel in zip(VECTORISED, kernels, strict=True):
        code = text.split(f"\n{kernel.symbol}:")[1].split(".size")[0]
        assert len(re.findall(register, code)) >= 4, f"{program.name}:\n{code}"
        assert "call" not in code, program.name
