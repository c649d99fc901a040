"""Linear kernels in the interpreter against their reference: every format, epilogue and shape of kernel."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ingot.compiler.gpu.interpret import Interpreter
from ingot.plugins.gpu.floats import from_e4m3, to_e4m3
from ingot.plugins.linear import gpu_reference
from ingot.plugins.linear.gpu_formats import FORMATS, int4_format, nvfp4_blocks, nvfp4_factor, pack, unpack
from ingot.plugins.linear.gpu_reference import group_sums, quantize_groups, quantize_tokens, values
from ingot.plugins.linear.tactics import Problem, Tile, candidates, launch

from .support import assert_close, device, load, scratch, store, unwritten

H200, A100 = device("sm_90a"), device("sm_80")
SPLIT = Tile(32, 16, 64, splits=2)
SPLIT4 = Tile(32, 16, 128, splits=2)
TILED = Tile(64, 64, 64)
TILED4 = Tile(64, 64, 128)
FORMS = [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp8", "fp8"), ("int8", "int8"), ("int4", "bf16"),
         ("int4", "fp16"), ("int4", "fp8"), ("int4", "int8"), ("nvfp4", "nvfp4")]
INT4 = [name for name, form in FORMATS.items() if form.is_int4]


def fitting(tile: Tile, form: str) -> Tile:
    """The tile with the channels that int4 takes at a time."""
    return replace(tile, channels=FORMATS[form].step) if FORMATS[form].is_int4 else tile


def check(interpreter: Interpreter, p: Problem, tile: Tile, rows: int, seed: int = 0) -> None:
    """Run the tile on random arrays, of `rows` rows of the bucket, and compare with the reference."""
    rng = np.random.default_rng(seed)
    form = FORMATS[p.format]
    packed = pack((rng.standard_normal((p.n * (2 if p.gated else 1), p.k)) + 0.3).astype(np.float32), form)
    wide = (rng.standard_normal((p.m, p.k)) * rng.uniform(0.5, 2, (p.m, 1))).astype(np.float32)
    arrays: dict[str, np.ndarray] = {"w": packed.w, "sizes": np.array([rows, 1, rows], np.int32)}
    given: dict[str, np.ndarray | float] = {}
    if p.x_type == "nvfp4":
        factor = nvfp4_factor(wide)
        x, arrays["x_scale"] = nvfp4_blocks(wide, factor)
        given["x_scale"], given["scale"] = arrays["x_scale"][:rows], factor * packed.factor
    elif p.x_type in ("fp8", "int8"):
        x, token_scale = quantize_groups(wide) if form.name == "fp8_block" else quantize_tokens(wide, p.x_type)
        if p.token_scales:
            arrays["x_scale"] = token_scale
            given["x_scale"] = token_scale[:rows]
        if p.sum_group:
            arrays["x_sum"] = group_sums(values(x, p.x_type), p.sum_group)
        given["scale"] = 0.37 if p.scale else 1.0
    else:
        x = store(wide, p.x_type)
        given["scale"] = packed.factor if p.activation == "nvfp4" else 0.37 if p.scale else 1.0
    arrays["x"] = x
    if packed.w_scale is not None:
        arrays["w_scale"] = packed.w_scale
    if packed.w_minimum is not None:
        arrays["w_minimum"] = packed.w_minimum
    arrays["scale"] = np.array([given["scale"]], np.float32)
    if p.bias:
        arrays["bias"] = given["bias"] = rng.standard_normal(len(packed.w)).astype(np.float32)
    if p.residual:
        arrays["residual"] = store(rng.standard_normal((p.m, p.n)), p.float_type)
        given["residual"] = arrays["residual"][:rows]
    if p.norm_eps is not None:
        arrays["norm_weight"] = given["norm_weight"] = rng.uniform(0.5, 1.5, p.k).astype(np.float32)
    if p.y_type:
        given["y_scale"] = 0.05
        arrays["y_scale"] = np.array([0.05], np.float32)
        arrays["y"] = np.full((p.m, p.n), 0x55, np.uint8)
    else:
        arrays["y"] = unwritten((p.m, p.n), p.float_type)
    one = launch(p, tile)
    needed = {name for name, _ in one.kernel.parameters}
    arrays = {name: array for name, array in (arrays | scratch(one)).items() if name in needed}
    out = interpreter.run([(one, {})], arrays)
    wanted = gpu_reference.linear(p, x[:rows], packed, **given)  # type: ignore[arg-type]
    if p.y_type:
        got = out["y"][:rows]
        bits = to_e4m3(wanted.astype(np.float32)) if p.y_type == "fp8" else \
            np.rint(wanted).clip(-127, 127).astype(np.int8).view(np.uint8)
        assert (got == bits).mean() > 0.98, "all but values that lie next to a tie"
        worth = from_e4m3 if p.y_type == "fp8" else (lambda b: b.view(np.int8).astype(np.float32))
        assert np.abs(worth(got) - worth(bits)).max() <= (32 if p.y_type == "fp8" else 1)
        assert (out["y"][rows:] == 0x55).all()
    else:
        assert_close(load(out["y"][:rows], p.float_type), wanted, p.float_type,
                     3e-3 if p.activation in ("bf16", "fp16") and p.norm_eps is not None else 2e-5)
        assert np.isnan(load(out["y"][rows:], p.float_type)).all(), "rows beyond the step's are not written"
    if "arrived" in out:
        assert not out["arrived"].any(), "ready for the next launch"


@pytest.mark.parametrize(("form", "activation"), FORMS)
@pytest.mark.parametrize("tiled", [False, True], ids=["split", "tiled"])
def test_formats(interpreter: Interpreter, form: str, activation: str, tiled: bool) -> None:
    """Sharp: results in fp32, so that an error of one weight or scale would show. Odd numbers of features and rows."""
    tile = (TILED4 if tiled else SPLIT4) if FORMATS[form].bits == 4 else TILED if tiled else SPLIT
    eight = activation in ("fp8", "int8")
    p = Problem(70 if tiled else 16, 72, 256, form, activation, "fp32", token_scales=eight, scale=not eight)
    check(interpreter, p, tile, 66 if tiled else 5)


@pytest.mark.parametrize(("form", "activation"), [("bf16", "bf16"), ("fp8", "fp8"), ("int4", "bf16"), ("int4", "fp8"),
                                                  ("nvfp4", "nvfp4")])
def test_descriptors(interpreter: Interpreter, form: str, activation: str) -> None:
    p = Problem(70, 80, 256, form, activation, token_scales=activation == "fp8", scale=form == "nvfp4")
    check(interpreter, p, replace(TILED4 if FORMATS[form].bits == 4 else TILED, tma=True), 70)


@pytest.mark.parametrize("form", ["bf16", *INT4])
def test_channels_that_fill_no_whole_step(interpreter: Interpreter, form: str) -> None:
    p = Problem(16, 40, 208, form, "bf16", "bf16")
    check(interpreter, p, fitting(Tile(32, 16, 128), form), 3)
    if form != "bf16":
        check(interpreter, Problem(16, 40, 208, form, "int8", "fp32", token_scales=True),
              fitting(Tile(32, 16, 128), form), 3)


@pytest.mark.parametrize("kind", ["split", "tiled", "tma"])
@pytest.mark.parametrize("activation", ["bf16", "fp16", "fp8", "int8"])
@pytest.mark.parametrize("form", INT4)
def test_groups_and_minimums(interpreter: Interpreter, form: str, activation: str, kind: str) -> None:
    """Results in fp32. Odd numbers of features and rows, and of groups: the sums of the last ones are none."""
    tile = {"split": SPLIT4, "tiled": TILED4, "tma": replace(TILED4, tma=True)}[kind]
    rows = 66 if tile.tokens > 16 else 5
    p = Problem(rows + 4, 72, 5 * 128 if tile.splits == 1 else 6 * 128, form, activation, "fp32",
                token_scales=activation in ("fp8", "int8"), bias=True)
    check(interpreter, p, fitting(tile, form), rows)


@pytest.mark.parametrize("activation", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("form", [form for form in INT4 if form != "int4"])
def test_groups_behind_a_norm_and_before_a_gate(interpreter: Interpreter, form: str, activation: str) -> None:
    """The input is quantized inside: sums are made there too."""
    eight = activation != "bf16"
    p = Problem(16, 40, 256, form, activation, "fp32" if eight else "bf16", quantizes=eight, norm_eps=1e-6,
                gated="silu")
    check(interpreter, p, fitting(SPLIT4, form), 6)
    p = Problem(70, 40, 256, form, activation, token_scales=eight, gated="silu", residual=True)
    check(interpreter, p, fitting(TILED4, form), 69)


@pytest.mark.parametrize("tile", [SPLIT4, TILED4, replace(TILED4, tma=True)], ids=["split", "tiled", "tma"])
def test_scales_of_blocks(interpreter: Interpreter, tile: Tile) -> None:
    """128 x 128 weights share a scale, and 128 channels of a token."""
    rows = 70 if tile.tokens > 16 else 9
    plain = Problem(rows + 2, 200, 256, "fp8_block", "fp8", "fp32", token_scales=True, bias=True)
    check(interpreter, plain, tile, rows)
    gated = Problem(rows + 2, 128, 256, "fp8_block", "fp8", "fp32", token_scales=True, gated="silu")
    check(interpreter, gated, tile, rows)
    if tile is SPLIT4:
        for norm in (None, 1e-6):
            p = Problem(16, 128, 256, "fp8_block", "fp8", "fp32", quantizes=True, norm_eps=norm, residual=True)
            check(interpreter, p, tile, 6)


@pytest.mark.parametrize("gated", ["silu", "gelu", "gelu_tanh", "relu"])
def test_gates(interpreter: Interpreter, gated: str) -> None:
    check(interpreter, Problem(16, 40, 128, "fp16", "fp16", gated=gated, float_type="fp16"), SPLIT, 4)
    check(interpreter, Problem(70, 40, 128, "int8", "int8", gated=gated, token_scales=True, bias=True), TILED, 70)


@pytest.mark.parametrize(("form", "activation"), [("bf16", "bf16"), ("int4", "bf16")])
@pytest.mark.parametrize("tile", [SPLIT4, Tile(32, 16, 128)], ids=["split", "whole"])
def test_norm_inside(interpreter: Interpreter, form: str, activation: str, tile: Tile) -> None:
    p = Problem(16, 40, 512, form, activation, norm_eps=1e-5, bias=True, gated="silu")
    check(interpreter, p, tile, 7)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("form", "activation"), [("bf16", "bf16"), ("fp8", "fp8"), ("int8", "int8"), ("int4", "bf16"),
                                                  ("int4_g32m", "fp16"), ("nvfp4", "nvfp4")])
def test_both_factors_of_a_gate_in_one_product(interpreter: Interpreter, form: str, activation: str,
                                               splits: int) -> None:
    """As for tcgen05: the input is made inside. Odd numbers of features, so that rows of both factors are repeated."""
    quantizes = activation in ("fp8", "int8", "nvfp4")
    p = Problem(16, 40, 512, form, activation, "fp32" if quantizes else activation, quantizes=quantizes,
                norm_eps=1e-5, bias=True, gated="silu", scale=True)
    channels = 128 if quantizes else 64
    check(interpreter, p, fitting(Tile(64, 16, channels, splits, one_product=True), form), 7)


@pytest.mark.parametrize(("form", "activation"), [("fp8", "fp8"), ("int8", "int8"), ("int4", "fp8"), ("int4", "int8")])
@pytest.mark.parametrize("norm", [None, 1e-6])
def test_quantization_inside(interpreter: Interpreter, form: str, activation: str, norm: float | None) -> None:
    p = Problem(16, 40, 256, form, activation, "fp32", quantizes=True, norm_eps=norm, residual=True)
    check(interpreter, p, SPLIT4, 6)


@pytest.mark.parametrize("y_type", ["fp8", "int8"])
def test_results_quantized_by_a_static_scale(interpreter: Interpreter, y_type: str) -> None:
    check(interpreter, Problem(16, 64, 128, "fp8", "fp8", y_type=y_type, scale=True, residual=True), SPLIT, 9)


def test_residual_and_rows_of_logits(interpreter: Interpreter) -> None:
    check(interpreter, Problem(16, 40, 128, "bf16", "bf16", residual=True, bias=True, rows="L"), SPLIT, 3)


def test_quantization_loses_little() -> None:
    w = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    for name, most in (("fp8", 0.028), ("fp8_block", 0.03), ("int8", 0.01), ("int4", 0.12), ("nvfp4", 0.11),
                       ("bf16", 0.002)):
        packed = pack(w, FORMATS[name])
        error = np.sqrt(np.mean((unpack(packed) - w) ** 2))
        assert most / 3 < error < most, name
    assert np.array_equal(unpack(pack(np.zeros((4, 128), np.float32), FORMATS["int4"])), np.zeros((4, 128)))
    shifted = w + 4
    for group in (128, 64, 32):
        plain, asymmetric = (unpack(pack(shifted, FORMATS[int4_format(group, minimum)])) for minimum in (False, True))
        assert np.abs(asymmetric - shifted).mean() < 0.6 * np.abs(plain - shifted).mean()


@pytest.mark.parametrize("k", [256, 208, 48])
@pytest.mark.parametrize("name", INT4)
def test_packing_int4(name: str, k: int) -> None:
    """What lies on a grid comes back to the bit, also where groups do not reach their outermost levels; a last group of
    fewer channels is one as well."""
    form, rng = FORMATS[name], np.random.default_rng(0)
    groups = -(-k // form.channels_per_scale)
    span = rng.integers(1, 9, (groups, 24, 1))  # of 8 levels on one side
    codes = np.minimum(rng.integers(-8, 8, (groups, 24, form.channels_per_scale)), span - 1).clip(-span)
    scale = rng.uniform(-1, 1, (groups, 24, 1)).astype(np.float16)
    w = codes * scale.astype(np.float32)
    if form.minimum:
        minimum = rng.uniform(-1, 1, (groups, 24, 1)).astype(np.float16)
        w = (codes + 8) * scale.astype(np.float32) + minimum.astype(np.float32)
    w = w.transpose(1, 0, 2).reshape(24, -1)[:, :k].astype(np.float32)
    packed = pack(w, form)
    assert packed.w.shape == (24, form.stored_row(k)) and packed.w_scale is not None
    assert packed.w_scale.shape == (form.num_scales(k), 24) and (packed.w_minimum is not None) == form.minimum
    sizes = [array.nbytes for array in (packed.w, packed.w_scale, packed.w_minimum) if array is not None]
    assert form.weight_bytes(24, k) == sum(sizes)
    np.testing.assert_array_equal(unpack(packed), w)


def test_refusals_say_why() -> None:
    def reason(p: Problem, where: object = H200) -> str:
        found = candidates(p, where)  # type: ignore[arg-type]
        assert not found.legal
        return found.refused[0].reason
    p = Problem(16, 64, 256, "fp8", "fp8", token_scales=True)
    assert candidates(p, H200).legal
    assert reason(p, A100) == "fp8 needs sm_89 or newer, this is sm_80"
    assert reason(replace(p, format="int4"), A100) == "fp8 needs sm_89 or newer, this is sm_80"
    assert candidates(replace(p, format="int4", activation="int8"), A100).legal
    nvfp4 = Problem(16, 64, 256, "nvfp4", "nvfp4", scale=True)
    assert "nvfp4 needs sm_100a" in reason(nvfp4) and candidates(nvfp4, device("sm_120a")).legal
    assert "16 bytes" in reason(replace(nvfp4, k=272), device("sm_100a"))
    assert "16 bytes" in reason(replace(p, k=250))
    assert "multiple of 128 channels, got 192" in reason(replace(p, format="fp8_block", k=192))
    assert "multiple of 128 rows, got 64" in reason(replace(p, format="fp8_block", gated="silu"))
    assert "fp8 needs sm_89" in reason(replace(p, format="fp8_block"), A100)
    assert "up to 16 rows, this bucket has 64" in reason(Problem(64, 64, 256, "bf16", "bf16", norm_eps=1e-6))
    assert "no int8" in reason(Problem(16, 64, 256, "int8", "int8", token_scales=True), device("sm_103a"))


def test_candidates_of_both_phases() -> None:
    few = candidates(Problem(8, 4096, 4096, "fp8", "fp8", token_scales=True), H200)
    blocks = [c.launches[0].grid[0] * c.launches[0].grid[1] for c in few.legal]
    assert max(blocks) >= 132, "some candidate keeps every multiprocessor reading"
    assert all(c.cost.num_bytes >= 4096 * 4096 for c in few.legal)
    many = candidates(Problem(4096, 4096, 4096, "fp8", "fp8", token_scales=True), H200)
    assert {"tma" in c.name for c in many.legal} == {True, False}
    assert all(c.cost.flops == 2 * 4096**3 for c in many.legal)
    assert not any("tma" in c.name for c in candidates(Problem(4096, 4096, 4096, "bf16", "bf16"), A100).legal)
    prepared = candidates(Problem(8, 4096, 4096, "fp8", "fp8", quantizes=True), H200)
    for plain, own in zip(few.legal, prepared.legal, strict=False):
        assert own.cost.cache_bytes > plain.cost.cache_bytes, "the input is read once more"
    assert len({c.launches[0].kernel.symbol for c in few.legal + many.legal}) == len(few.legal + many.legal)
