"""Row kernels in the interpreter: norms with sums and quantization, gates, embeddings."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ingot.compiler.gpu.interpret import Interpreter
from ingot.plugins.embedding.tactics import Problem as Embedding
from ingot.plugins.embedding.tactics import candidates as embedding_candidates
from ingot.plugins.gpu.floats import E4M3_MAX, from_e2m1, from_e4m3, to_e4m3
from ingot.plugins.gpu.kernel import Candidates
from ingot.plugins.linear.gpu_formats import nvfp4_blocks, unpack_nibbles
from ingot.plugins.linear.gpu_reference import activate, group_sums, quantize_groups, quantize_tokens
from ingot.plugins.norm.reference import layer_norm, rms_norm
from ingot.plugins.norm.tactics import Problem as Norm
from ingot.plugins.norm.tactics import candidates as norm_candidates
from ingot.plugins.quantize.tactics import Problem as Quantize
from ingot.plugins.quantize.tactics import candidates as quantize_candidates
from ingot.plugins.quantize.tactics import split_form

from .support import assert_close, compiled, device, load, store, unwritten

B200 = device("sm_100a")
T, D = 5, 72


def run(interpreter: Interpreter, found: Candidates, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    one = found.legal[0].launches[0]
    needed = {name for name, _ in one.kernel.parameters}
    return interpreter.run([(one, {})], {name: array for name, array in arrays.items() if name in needed})


def outputs(y_type: str, m: int, d: int) -> dict[str, np.ndarray]:
    y_type, group = split_form(y_type)
    if y_type in ("fp8", "int8"):
        sums = np.full((m, -(-d // group) if group else 1), np.nan, np.float16)
        return {"y": np.full((m, d), 0x55, np.uint8), "y_scale": np.full(m, np.nan, np.float32), "y_sum": sums}
    if y_type == "nvfp4":
        return {"y": np.full((m, d // 2), 0x55, np.uint8), "y_scale": np.full((m, d // 16), 0x55, np.uint8)}
    return {"y": unwritten((m, d), y_type)}


STATIC = 0.031


def check_output(out: dict[str, np.ndarray], wanted: np.ndarray, y_type: str, static: bool, rows: int) -> None:
    """wanted float64 [rows, D]: what is quantized."""
    y_type, group = split_form(y_type)
    if y_type in ("bf16", "fp16", "fp32"):
        assert_close(load(out["y"][:rows], y_type), wanted, y_type)
        assert np.isnan(load(out["y"][rows:], y_type)).all()
        return
    assert (out["y"][rows:] == 0x55).all()
    exact = wanted.astype(np.float32)
    if y_type == "nvfp4":
        packed, scale = nvfp4_blocks(exact, STATIC)
        assert (out["y_scale"][:rows] == scale).mean() > 0.97
        same = np.repeat(out["y_scale"][:rows] == scale, 16, axis=1)
        got, codes = unpack_nibbles(out["y"][:rows]), unpack_nibbles(packed)
        assert (from_e2m1(got) == from_e2m1(codes))[same].mean() > 0.98, "all but values that lie next to a tie"
        return
    if static:
        scaled = exact / np.float32(STATIC)
        bits = to_e4m3(scaled) if y_type == "fp8" else np.rint(scaled).clip(-127, 127).astype(np.int8)
    else:
        bits, scale = quantize_tokens(exact, y_type)
        assert np.allclose(out["y_scale"][:rows], scale, rtol=1e-5)
    got = out["y"][:rows] if y_type == "fp8" else out["y"][:rows].view(np.int8)
    values = from_e4m3 if y_type == "fp8" else (lambda b: b.astype(np.float32))
    if group:
        assert np.array_equal(out["y_sum"][:rows], group_sums(values(got), group)), "of what is stored"
        assert np.isnan(out["y_sum"][rows:]).all()
    assert (values(got) == values(bits)).mean() > 0.98, "all but values that lie next to a tie"
    assert np.abs(values(got) - values(bits)).max() <= (E4M3_MAX / 14 if y_type == "fp8" else 1)


@pytest.mark.parametrize(("y_type", "static"), [("bf16", False), ("fp32", False), ("fp8", False), ("fp8", True),
                                                ("int8", False), ("int8", True), ("nvfp4", True), ("fp8_sum32", False),
                                                ("int8_sum64", False), ("int8_sum128", False)])
@pytest.mark.parametrize("gated", ["", "silu", "gelu_tanh"])
def test_quantize(interpreter: Interpreter, y_type: str, static: bool, gated: str) -> None:
    d = 80 if y_type == "nvfp4" else D
    rng = np.random.default_rng(0)
    width = d * (2 if gated else 1)
    x = store(rng.standard_normal((T + 2, width + 8)) * 3, "fp16")
    p = Quantize(T + 2, d, "fp16", y_type, static=static, gated=gated, x_stride=width + 8)
    out = run(interpreter, quantize_candidates(p, B200), {
        "x": x, "sizes": np.array([T, 1, 1], np.int32), "static_scale": np.array([STATIC], np.float32),
        **outputs(y_type, T + 2, d)})
    wide = load(x[:T], "fp16")
    wanted = activate(wide[:, :d], gated) * wide[:, d:2 * d] if gated else wide[:, :d]
    check_output(out, wanted, y_type, static, T)


def test_a_scale_for_each_group(interpreter: Interpreter) -> None:
    x = np.random.default_rng(6).standard_normal((T, 384)).astype(np.float32)
    out = run(interpreter, quantize_candidates(Quantize(T, 384, "fp32", "fp8_block"), B200), {
        "x": x, "sizes": np.array([T, 1, 1], np.int32), "y": np.full((T, 384), 0x55, np.uint8),
        "y_scale": np.full((T, 3), np.nan, np.float32)})
    bits, scale = quantize_groups(x)
    assert np.allclose(out["y_scale"], scale, rtol=1e-6)
    assert (from_e4m3(out["y"]) == from_e4m3(bits)).mean() > 0.98
    assert "multiple of 128" in quantize_candidates(Quantize(T, 200, "fp32", "fp8_block"), B200).refused[0].reason


def test_rows_of_zeros(interpreter: Interpreter) -> None:
    for y_type in ("fp8", "int8", "nvfp4"):
        p = Quantize(1, 64, "fp32", y_type, static=y_type == "nvfp4")
        out = run(interpreter, quantize_candidates(p, B200), {
            "x": np.zeros((1, 64), np.float32), "sizes": np.ones(3, np.int32), "static_scale": np.ones(1, np.float32),
            **outputs(y_type, 1, 64)})
        assert not out["y"].any() and not out["y_scale"].any(), y_type


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize(("y_type", "static"), [("bf16", False), ("fp8", False), ("int8", True), ("nvfp4", True),
                                                ("fp8_sum128", False), ("int8_sum32", False)])
@pytest.mark.parametrize("residual", [False, True])
def test_norms(interpreter: Interpreter, kind: str, y_type: str, static: bool, residual: bool) -> None:
    d = 80 if y_type == "nvfp4" else D
    rng = np.random.default_rng(1)
    x, r = (store(rng.standard_normal((T + 1, d)) + 0.3, "bf16") for _ in range(2))
    weight, bias = rng.uniform(0.5, 1.5, d).astype(np.float32), rng.standard_normal(d).astype(np.float32)
    layer = kind == "layer_norm"
    p = Norm(T + 1, d, 1e-5, "bf16", y_type, kind, bias=layer, residual=residual, static=static)
    out = run(interpreter, norm_candidates(p, B200), {
        "x": x, "residual": r, "total": unwritten((T + 1, d), "bf16"), "weight": weight, "bias": bias,
        "sizes": np.array([T, 1, 1], np.int32), "static_scale": np.array([STATIC], np.float32),
        **outputs(y_type, T + 1, d)})
    total = load(x[:T], "bf16")
    if residual:
        total = total + load(r[:T], "bf16")
        assert_close(load(out["total"][:T], "bf16"), total, "bf16")
        assert np.isnan(load(out["total"][T:], "bf16")).all()
        total = load(out["total"][:T], "bf16")
    wanted = layer_norm(total, weight, bias, eps=1e-5) if layer else rms_norm(total, weight, eps=1e-5)
    check_output(out, wanted, y_type, static, T)


def test_norm_of_the_block_before_the_sum(interpreter: Interpreter) -> None:
    """Models with a norm on both sides of a block: total = residual + norm(x), which replaces the residual in place."""
    rng = np.random.default_rng(2)
    x, r = (store(rng.standard_normal((T, D)), "fp32") for _ in range(2))
    weight, inner = (rng.uniform(0.5, 1.5, D).astype(np.float32) for _ in range(2))
    one = norm_candidates(Norm(T, D, 1e-6, "fp32", "fp32", residual=True, x_weight=True), B200).legal[0].launches[0]
    out = interpreter.run([(one, {"total": "residual"})], {
        "x": x, "residual": r, "weight": weight, "x_weight": inner, "sizes": np.array([T, 1, 1], np.int32),
        "y": unwritten((T, D), "fp32")})
    total = rms_norm(x, inner, eps=1e-6) + r
    assert_close(out["residual"].astype(np.float64), total, "fp32")
    assert_close(out["y"].astype(np.float64), rms_norm(total, weight, eps=1e-6), "fp32")


@pytest.mark.parametrize("weights", ["bf16", "fp8", "int8"])
def test_embedding(interpreter: Interpreter, weights: str) -> None:
    rng = np.random.default_rng(3)
    table, scale = rng.standard_normal((11, D)).astype(np.float32), rng.uniform(0.5, 2, 11).astype(np.float32)
    w = {"bf16": store(table, "bf16"), "fp8": to_e4m3(table), "int8": np.rint(table * 20).astype(np.int8)}[weights]
    values = {"bf16": lambda: load(w, "bf16"), "fp8": lambda: from_e4m3(w) * scale[:, None],
              "int8": lambda: w * scale[:, None].astype(np.float64)}[weights]()
    ids = np.array([3, 0, 10, 3, 99999], np.int32)
    out = run(interpreter, embedding_candidates(Embedding(5, D, weights, "bf16", factor=8.5), B200), {
        "ids": ids, "w": w, "w_scale": scale, "y": unwritten((5, D), "bf16"), "sizes": np.array([4, 1, 1], np.int32)})
    assert_close(load(out["y"][:4], "bf16"), values[ids[:4]] * 8.5, "bf16")
    assert np.isnan(load(out["y"][4], "bf16")).all()


@pytest.mark.parametrize(("form", "normed"), [("", True), ("fp8_sum32", False), ("int8", True)])
def test_embedding_with_the_norm_behind_it(interpreter: Interpreter, form: str, normed: bool) -> None:
    """What launches of the norm alone would make of the rows that are stored, to the bit."""
    rng = np.random.default_rng(4)
    table, weight = rng.standard_normal((11, D)).astype(np.float32), rng.uniform(0.5, 2, D).astype(np.float32)
    sizes = np.array([4, 1, 1], np.int32)

    def outputs(kind: str, prefix: str) -> dict[str, np.ndarray]:
        found = {"": np.full((5, D), 77, np.int8 if kind == "int8" else np.uint8), "_scale": unwritten((5,), "fp32")}
        return {f"{prefix}{part}": array for part, array in found.items()} | (
            {f"{prefix}_sum": unwritten((5, -(-D // 32)), "fp16")} if "sum" in kind else {})

    problem = Embedding(5, D, "bf16", "bf16", norm_eps=1e-6, normed=normed, normed_form=form)
    out = run(interpreter, embedding_candidates(problem, B200), {
        "ids": np.array([3, 0, 10, 3, 99999], np.int32), "w": store(table, "bf16"), "y": unwritten((5, D), "bf16"),
        "norm_weight": weight, "normed": unwritten((5, D), "bf16"), **(outputs(form, "q") if form else {}),
        "sizes": sizes})
    assert np.array_equal(out["y"][:4], store(table, "bf16")[[3, 0, 10, 3]])
    wanted = {"normed": ("bf16", "y")} if normed else {}
    wanted |= {name: (form, f"y{name[1:]}") for name in (outputs(form, "q") if form else {})}
    for name, (kind, alone) in wanted.items():
        apart = run(interpreter, norm_candidates(Norm(5, D, 1e-6, "bf16", kind), B200), {
            "x": out["y"], "weight": weight, "sizes": sizes,
            **({"y": unwritten((5, D), "bf16")} if kind == "bf16" else outputs(kind, "y"))})
        assert np.array_equal(out[name].view(np.uint8), apart[alone].view(np.uint8)), name


def test_refusals() -> None:
    a100 = device("sm_80")
    p = Quantize(4, 64, "bf16", "fp8")
    assert quantize_candidates(p, a100).refused[0].reason == "fp8 needs sm_89 or newer, this is sm_80"
    assert quantize_candidates(replace(p, y_type="int8"), a100).legal
    assert "nvfp4" in quantize_candidates(replace(p, y_type="nvfp4"), device("sm_90a")).refused[0].reason
    assert "multiple of 16" in quantize_candidates(replace(p, y_type="nvfp4", d=72), B200).refused[0].reason
    assert "up to 32768" in norm_candidates(Norm(4, 40000, 1e-6, "bf16", "bf16"), B200).refused[0].reason
    assert not embedding_candidates(Embedding(4, 64, "fp8", "bf16"), a100).legal


ROWS = [norm_candidates(Norm(8, 4096, 1e-6, "bf16", y_type, residual=True), device("sm_120a"))
        for y_type in ("bf16", "fp8", "int8")]
ROWS += [quantize_candidates(Quantize(8, 14336, "bf16", y_type, gated="silu"), device("sm_120a"))
         for y_type in ("fp8", "int8")]


@pytest.mark.parametrize("arch", ["sm_90a", *(pytest.param(arch, marks=pytest.mark.slow) for arch in (
    "sm_89", "sm_100a", "sm_120a"))])
def test_rows_stay_in_registers(arch: str) -> None:
    for kernel, code in compiled([found.legal[0].launches[0].kernel for found in ROWS], arch).items():
        assert code.spill_stores == 0 and not code.matrix, kernel.symbol


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a", "sm_120a"])
def test_nvfp4_rows_compile(arch: str) -> None:
    found = norm_candidates(Norm(8, 4096, 1e-6, "bf16", "nvfp4", residual=True, static=True), device(arch))
    kernel = found.legal[0].launches[0].kernel
    assert compiled([kernel], arch)[kernel].spill_stores == 0
