"""Mixtures of experts in the interpreter: choice, sorting, grouped matrices, and the sum over a token's choices."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ingot.compiler.gpu.disassemble import operand_bits
from ingot.compiler.gpu.interpret import Interpreter
from ingot.compiler.gpu.native import NATIVE_BITS
from ingot.compiler.ir.registry import OPS
from ingot.compiler.targets import architectures
from ingot.plugins.expert_linear.tactics import Routing, Sorting, Sum, routing, sorting, summing
from ingot.plugins.linear import gpu_reference
from ingot.plugins.linear.gpu_formats import FORMATS, Packed, pack
from ingot.plugins.linear.gpu_reference import group_sums, quantize_tokens
from ingot.plugins.linear.tactics import Problem, Tile, candidates, launch
from ingot.plugins.norm.reference import rms_norm
from ingot.plugins.norm.tactics import Problem as Norm
from ingot.plugins.norm.tactics import candidates as norm_candidates
from ingot.plugins.quantize.tactics import split_form

from .support import ARCHITECTURES, assert_close, chosen, compiled, device, load, scratch, store, unwritten

H200 = device("sm_90a")


CASES: list[dict[str, Any]] = [
    {}, {"normalise": True}, {"scores": "softmax_of_chosen"}, {"scores": "sigmoid", "bias": True, "normalise": True},
    {"scores": "sigmoid"}, {"bias": True, "normalise": True, "eps": 0.25}, {"factor": 2.5},
    {"scores": "sigmoid", "bias": True, "groups": 4, "kept_groups": 2, "normalise": True, "eps": 1e-20},
    {"groups": 4, "kept_groups": 3, "group_best": 1}, {"groups": 12, "kept_groups": 5, "factor": 0.5},
    {"bias": True, "groups": 3, "kept_groups": 1, "group_best": 4},
    {"shared": 1, "scores": "sigmoid", "bias": True, "normalise": True, "factor": 2.5, "groups": 4, "kept_groups": 2},
    {"shared": 6, "shared_gate": True}, {"shared": 4, "shared_gate": True, "normalise": True, "factor": 0.5}]


def made(p: Routing) -> dict[str, np.ndarray]:
    """Arrays that a route of one row less than it may have writes, with what must stay as it is."""
    return {"ids": np.full((p.m, p.pairs), -7, np.int32), "weights": np.full((p.m, p.pairs), np.nan, np.float32),
            "order": np.full(p.all_experts * p.m, -7, np.int32), "starts": np.full(p.all_experts + 1, -7, np.int32),
            "sizes": np.array([p.m - 1, 1, 1], np.int32)}


def assert_listed(out: dict[str, np.ndarray], ids: np.ndarray, experts: int) -> None:
    """Each expert's list holds its rows, each once."""
    flat, tokens = ids.reshape(-1), len(ids)
    assert np.array_equal(out["starts"], np.searchsorted(np.sort(flat), np.arange(experts + 1)))
    for expert in range(experts):
        rows = np.flatnonzero(flat == expert)
        listed = out["order"][expert * tokens:][:tokens]
        assert np.array_equal(np.sort(listed[:len(rows)]), rows) and (listed[len(rows):] == -7).all()
    assert (out["order"][experts * tokens:] == -7).all()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("experts", "choices", "tokens"), [(12, 3, 6), (60, 4, 37)])
def test_routing(interpreter: Interpreter, case: dict[str, Any], experts: int, choices: int, tokens: int) -> None:
    """As the IR's operator, of logits that are there."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((tokens + 1, experts + case.get("shared_gate", False))).astype(np.float32)
    logits[0, :] = 0  # equals: the smaller number first
    logits[tokens] = np.nan
    bias = rng.standard_normal(experts).astype(np.float32)
    bias[:experts // 3] = 0.5
    p = Routing(tokens + 1, experts, choices, **case)
    one, = routing(p, H200).legal[0].launches
    arrays = {"x": logits, **made(p), "arrived": np.zeros(one.zeroed_bytes // 4, np.int32)}
    if p.bias:
        arrays["bias"] = bias
    out = interpreter.run([(one, {})], arrays)
    attrs = {name: value for name, value in case.items() if name != "bias"}
    ids, weights = OPS["route"].reference(logits[:tokens], bias if p.bias else None, choices=choices, **attrs)
    assert np.array_equal(out["ids"][:tokens], ids) and (out["ids"][tokens] == -7).all()
    assert np.allclose(out["weights"][:tokens], weights, rtol=1e-5) and np.isnan(out["weights"][tokens]).all()
    assert_listed(out, ids, p.all_experts)
    assert not out["arrived"].any(), "ready for the next launch"


def test_logits_that_are_no_numbers(interpreter: Interpreter) -> None:
    """Nothing is written where it does not belong, and no expert is chosen twice."""
    p = Routing(4, 12, 3, normalise=True)
    one, = routing(p, H200).legal[0].launches
    logits = np.full((4, 12), np.nan, np.float32)
    logits[1] = -np.inf
    out = interpreter.run([(one, {})], {"x": logits, **made(p), "arrived": np.zeros(one.zeroed_bytes // 4, np.int32)})
    assert np.array_equal(out["ids"][:3], [[0, 1, 2]] * 3)
    assert_listed(out, out["ids"][:3], 12)


ROUTERS: list[dict[str, Any]] = [
    {"m": 6}, {"m": 6, "norm_eps": 1e-5, "w_bias": True}, {"m": 6, "norm_eps": 1e-5, "splits": 4},
    {"m": 40, "norm_eps": 1e-5, "y": True, "splits": 2}, {"m": 70, "norm_eps": 1e-5, "y": True, "tokens": 32},
    {"m": 40, "norm_eps": 1e-5, "y_form": "fp8", "splits": 2}, {"m": 40, "norm_eps": 1e-5, "y_form": "int8"},
    {"m": 40, "norm_eps": 1e-5, "y_form": "int8_sum32", "splits": 2},
    {"m": 20, "norm_eps": 1e-5, "y_form": "fp8_sum128"},
    {"m": 20, "norm_eps": 1e-5, "y": True, "y_form": "fp8_block"},
    {"m": 20, "norm_eps": 1e-5, "y_form": "nvfp4", "splits": 2}, {"m": 6, "norm_eps": 1e-5, "x_type": "fp32"},
    {"m": 20, "norm_eps": 1e-5, "y": True, "k": 192, "experts": 9},
    {"m": 6, "shared": 2, "shared_gate": True}, {"m": 6, "norm_eps": 1e-5, "x_type": "fp32", "shared": 3},
    {"m": 6, "norm_eps": 1e-5, "shared": 14, "shared_gate": True, "splits": 4},
    {"m": 70, "norm_eps": 1e-5, "y": True, "y_form": "fp8", "shared": 1, "shared_gate": True, "splits": 2}]


@pytest.mark.parametrize("case", ROUTERS, ids=str)
def test_routers(interpreter: Interpreter, case: dict[str, Any]) -> None:
    """Norm, matrix and choice in one launch; what others read of the norm is that of the norm's own launch."""
    rng = np.random.default_rng(1)
    wanted: dict[str, Any] = {"experts": 20, "choices": 3, "k": 512, "scores": "softmax", "normalise": True} | case
    splits, block = wanted.pop("splits", 1), wanted.pop("tokens", 16)
    p = Routing(**wanted)
    where = device("sm_100a")
    one, = next(c for c in routing(p, where).legal if c.launches[0].grid == (-(-p.m // block), splits, 1)).launches
    tokens = p.m - 1
    x = store(rng.standard_normal((p.m, p.k)) * rng.uniform(0.5, 2, (p.m, 1)), p.x_type)
    x[tokens:] = store(np.full(1, np.nan), p.x_type)
    w = store(rng.standard_normal((p.experts + p.shared_gate, p.k)) / np.sqrt(p.k), p.x_type)
    norm_weight, w_bias = rng.uniform(0.5, 1.5, p.k).astype(np.float32), rng.standard_normal(p.experts)
    arrays = {"x": x, "w": w, **made(p), **scratch(one), "norm_weight": norm_weight,
              "w_bias": w_bias.astype(np.float32), "y": unwritten((p.m, p.k), p.x_type)}
    own: dict[str, np.ndarray] = {}
    if p.y_form:
        own = {"y": np.full((p.m, p.k // 2 if p.y_form == "nvfp4" else p.k), 0x55, np.uint8)}
        per_row = {"nvfp4": p.k // 16, "fp8_block": p.k // 128}.get(p.y_form, 1)
        own["y_scale"] = np.zeros((p.m, per_row), np.uint8 if p.y_form == "nvfp4" else np.float32)
        if p.y_form == "nvfp4":
            own["y_factor"] = np.zeros(p.m, np.float32)
        if group := split_form(p.y_form)[1]:
            own["y_sum"] = np.zeros((p.m, -(-p.k // group)), np.float16)
        arrays |= {f"q{name[1:]}": array for name, array in own.items()}
    needed = {name for name, _ in one.kernel.parameters}
    out = interpreter.run([(one, {})], {name: array for name, array in arrays.items() if name in needed})
    rows = load(x[:tokens], p.x_type)
    if p.norm_eps is not None:
        rows = rms_norm(rows, norm_weight, eps=p.norm_eps)
    logits = (rows @ load(w, p.x_type).T + (w_bias if p.w_bias else 0)).astype(np.float32)
    clear = np.sort(logits[:, :p.experts], axis=1)[:, -p.choices - 1:]
    sure = np.diff(clear, axis=1).min(axis=1) > (1e-4 if p.x_type == "fp32" else 0.02)
    assert sure.mean() > 0.5
    ids, weights = OPS["route"].reference(logits, choices=p.choices, normalise=True, shared=p.shared,
                                          shared_gate=p.shared_gate)
    assert np.array_equal(out["ids"][:tokens][sure], ids[sure])
    assert np.allclose(out["weights"][:tokens][sure], weights[sure], atol=1e-5 if p.x_type == "fp32" else 0.01)
    assert_listed(out, out["ids"][:tokens], p.all_experts)
    assert not out["arrived"].any()
    if p.y:
        assert_close(load(out["y"][:tokens], p.x_type), rows, p.x_type)
        assert np.isnan(load(out["y"][tokens:], p.x_type)).all()
    if p.y_form:
        alone, = norm_candidates(Norm(p.m, p.k, p.norm_eps or 0.0, p.x_type, p.y_form), where).legal[0].launches
        plain = interpreter.run([(alone, {})], {"x": x, "weight": norm_weight, "sizes": arrays["sizes"], **own})
        for name in own:
            got, separate = out[f"q{name[1:]}"], plain[name]
            assert np.array_equal(got[tokens:], separate[tokens:]), "rows beyond the step's are not written"
            same = np.isclose(got, separate, rtol=1e-5) if got.dtype == np.float32 else got == separate
            assert same.mean() > 0.98, f"{name}: all but what lies next to a tie"


@pytest.mark.parametrize(("tokens", "more", "block"), [(6, 1, None), (190, 10, 32)])
def test_sorting(interpreter: Interpreter, tokens: int, more: int, block: int | None) -> None:
    """Also of more rows than a block looks at at a time; some experts get none."""
    one, = sorting(Sorting(tokens + more, 5, 2), H200).legal[0].launches
    if block:
        one = replace(one, kernel=replace(one.kernel, constants=tuple(
            (name, block if name == "BLOCK" else value) for name, value in one.kernel.constants)))
    rng = np.random.default_rng(1)
    ids = np.stack([rng.permutation([0, 1, 3])[:2] for _ in range(tokens + more)]).astype(np.int32)
    out = interpreter.run([(one, {})], {"ids": ids, "order": np.full((tokens + more) * 5, -7, np.int32),
                                        "starts": np.zeros(6, np.int32), "sizes": np.array([tokens, 1, 1], np.int32)})
    assert_listed(out, ids[:tokens], 5)


def lists(ids: np.ndarray, experts: int, m: int) -> dict[str, np.ndarray]:
    """What a grouped matrix is told of the choice: the rows of each expert, in an order of chance."""
    flat, tokens = ids.reshape(-1), len(ids)
    order = np.full(experts * m, 2**30, np.int32)
    for expert in range(experts):
        rows = np.random.default_rng(expert).permutation(np.flatnonzero(flat == expert))
        order[expert * tokens:expert * tokens + len(rows)] = rows
    return {"order": order, "starts": np.searchsorted(np.sort(flat), np.arange(experts + 1)).astype(np.int32),
            "sizes": np.array([tokens, 1, 1], np.int32)}


def together(packs: list[Packed]) -> dict[str, np.ndarray]:
    """The matrices of experts, one below the other."""
    arrays = {name: [getattr(one, name) for one in packs] for name in ("w", "w_scale", "w_minimum")}
    return {name: np.concatenate(parts) for name, parts in arrays.items() if parts[0] is not None}


@pytest.mark.parametrize(("form", "activation"), [
    ("bf16", "bf16"), ("fp8", "fp8"), ("int4", "bf16"), ("int4", "int8"), ("int4_g64m", "fp8")])
@pytest.mark.parametrize("tile", [Tile(32, 16, 128, splits=2), Tile(32, 16, 128), Tile(32, 16, 128, tma=True)],
                         ids=["split", "whole", "tma"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize(("tokens", "experts"), [(23, 4), (3, 9)], ids=["many", "few"])
def test_grouped_matrices(interpreter: Interpreter, form: str, activation: str, tile: Tile, shared: bool, tokens: int,
                          experts: int) -> None:
    """Of few tokens there are fewer rows than experts, most of which get none."""
    rng = np.random.default_rng(2)
    choices, n, k = 2, 48, 256
    gated = "silu" if shared else ""
    height = n * (2 if gated else 1)
    packs = [pack(rng.standard_normal((height, k)).astype(np.float32), FORMATS[form]) for _ in range(experts)]
    used = [0, 2, experts - 1]
    ids = np.stack([rng.permutation(used)[:choices] for _ in range(tokens)]).astype(np.int32)
    p = Problem(tokens + 1, n, k, form, activation, "fp32", token_scales=activation in ("fp8", "int8"), gated=gated,
                bias=True, experts=experts, choices=choices, shared=shared)
    tile = replace(tile, channels=min(tile.channels, p.weights.step)) if p.weights.is_int4 else tile
    rows = (tokens + 1) * (1 if shared else choices)
    wide = rng.standard_normal((rows, k)).astype(np.float32)
    if p.token_scales:
        x, x_scale = quantize_tokens(wide, activation)
        if p.sum_group:
            sums = group_sums(gpu_reference.values(x, activation), p.sum_group)
    else:
        x, x_scale = store(wide, activation), np.ones(rows, np.float32)
    bias = rng.standard_normal((experts, height)).astype(np.float32)
    flat = ids.reshape(-1)
    arrays = {"x": x, "x_scale": x_scale, **together(packs), "bias": bias,
              **lists(ids, experts, tokens + 1), "y": unwritten(((tokens + 1) * choices, n), "fp32")}
    if p.sum_group:
        arrays["x_sum"] = sums
    one = launch(p, tile)
    needed = {name for name, _ in one.kernel.parameters}
    out = interpreter.run([(one, {})], {name: a for name, a in (arrays | scratch(one)).items() if name in needed})
    wanted = np.empty((tokens * choices, n))
    for row, expert in enumerate(flat):
        source = slice(row // choices, row // choices + 1) if shared else slice(row, row + 1)
        packed: Packed = packs[expert]
        wanted[row] = gpu_reference.linear(p, x[source], packed, bias=bias[expert],
                                           x_scale=x_scale[source] if p.token_scales else None)[0]
    assert_close(load(out["y"][:tokens * choices], "fp32"), wanted, "fp32", 2e-5)
    assert np.isnan(out["y"][tokens * choices:]).all()


@pytest.mark.parametrize(("form", "activation"), [
    ("bf16", "bf16"), ("fp8", "fp8"), ("int8", "int8"), ("int4", "bf16"), ("int4", "fp8"), ("fp8_block", "fp8"),
    ("nvfp4", "nvfp4"), ("int4_g32m", "int8"), ("int4_g64", "bf16")])
@pytest.mark.parametrize(("tokens", "experts", "splits"), [(6, 4, 2), (2, 9, 1)], ids=["many", "few"])
def test_sums_inside(interpreter: Interpreter, form: str, activation: str, tokens: int, experts: int,
                     splits: int) -> None:
    """The matrix of the chosen experts, quantizing its inputs, with the weighted sum over a token's choices and the
    residual: against the same launch for each choice, and its sum."""
    rng = np.random.default_rng(4)
    choices, n, k = 3, 128 if form == "fp8_block" else 48, 512
    packs = [pack(rng.standard_normal((n, k)).astype(np.float32), FORMATS[form]) for _ in range(experts)]
    ids = np.stack([rng.permutation(experts)[:choices] for _ in range(tokens)]).astype(np.int32)
    quantizes = activation in ("fp8", "int8", "nvfp4")
    base = Problem(tokens + 1, n, k, form, activation, "bf16" if activation == "bf16" else "fp32", quantizes=quantizes,
                   scale=form == "nvfp4", bias=True, experts=experts, choices=choices, shared=False)
    wide = store(rng.standard_normal(((tokens + 1) * choices, k)), base.float_type)
    arrays = {"x": wide, **together(packs), **lists(ids, experts, tokens + 1),
              "bias": rng.standard_normal((experts, n)).astype(np.float32),
              "weights": rng.uniform(0, 1, (tokens + 1, choices)).astype(np.float32),
              "residual": store(rng.standard_normal((tokens + 1, n)), base.float_type),
              "scale": np.array([one.factor for one in packs], np.float32)}
    found = {}
    for p, rows in ((base, choices), (replace(base, sum_choices=True, residual=True), 1)):
        one = launch(p, Tile(32, 16, p.weights.step if p.weights.is_int4 else 128, splits=splits))
        needed = {name for name, _ in one.kernel.parameters}
        given = arrays | scratch(one) | {"y": unwritten(((tokens + 1) * rows, n), p.float_type)}
        out = interpreter.run([(one, {})], {name: array for name, array in given.items() if name in needed})
        assert not p.sum_choices or not out["arrived"].any()
        assert np.isnan(load(out["y"][tokens * rows:], p.float_type)).all()
        found[p.sum_choices] = load(out["y"][:tokens * rows], p.float_type)
    each = found[False].reshape(tokens, choices, n) * arrays["weights"][:tokens, :, None]
    wanted = each.sum(axis=1) + load(arrays["residual"][:tokens], base.float_type)
    assert_close(found[True], wanted, base.float_type, 1e-2 if base.float_type == "bf16" else 1e-5)


@pytest.mark.parametrize(("form", "activation", "one_product"), [
    ("bf16", "bf16", False), ("bf16", "bf16", True), ("fp8", "fp8", True), ("int4", "int8", False)])
def test_norms_of_experts(interpreter: Interpreter, form: str, activation: str, one_product: bool) -> None:
    """Gate and up of the chosen experts, with the norm, the quantization and the gate."""
    rng = np.random.default_rng(5)
    tokens, experts, choices, n, k = 5, 6, 2, 40, 256
    packs = [pack(rng.standard_normal((2 * n, k)).astype(np.float32), FORMATS[form]) for _ in range(experts)]
    ids = np.stack([rng.permutation(experts)[:choices] for _ in range(tokens)]).astype(np.int32)
    p = Problem(8, n, k, form, activation, "bf16", quantizes=activation != "bf16", norm_eps=1e-5,
                gated="clamped_swiglu", bias=True, experts=experts, choices=choices)
    x, norm_weight = store(rng.standard_normal((8, k)) * 3, "bf16"), rng.uniform(0.5, 1.5, k).astype(np.float32)
    bias = rng.standard_normal((experts, 2 * n)).astype(np.float32)
    arrays = {"x": x, "norm_weight": norm_weight, **together(packs), "bias": bias,
              **lists(ids, experts, 8), "y": unwritten((8 * choices, n), "bf16")}
    one = launch(p, Tile(64 if one_product else 32, 16, 128, splits=2, one_product=one_product))
    needed = {name for name, _ in one.kernel.parameters}
    out = interpreter.run([(one, {})], {name: a for name, a in (arrays | scratch(one)).items() if name in needed})
    wanted = np.empty((tokens * choices, n))
    for row, expert in enumerate(ids.reshape(-1)):
        wanted[row] = gpu_reference.linear(p, x[row // choices][None], packs[expert], bias=bias[expert],
                                           norm_weight=norm_weight)[0]
    assert_close(load(out["y"][:tokens * choices], "bf16"), wanted, "bf16", 3e-3)


@pytest.mark.parametrize(("normed", "form"), [(True, ""), (False, "fp8"), (True, "int8"), (False, "int8_sum32")])
def test_the_norm_behind_a_sum(interpreter: Interpreter, normed: bool, form: str) -> None:
    rng = np.random.default_rng(6)
    x, r = store(rng.standard_normal((4, 3, 40)), "bf16"), store(rng.standard_normal((4, 40)), "bf16")
    weights = rng.uniform(0, 1, (4, 3)).astype(np.float32)
    norm_weight = rng.uniform(0.5, 1.5, 40).astype(np.float32)
    p = Sum(4, 40, 3, "bf16", "bf16", "bf16", norm_eps=1e-5, normed=normed, normed_form=form)
    one = summing(p, H200).legal[0].launches[0]
    needed = {name for name, _ in one.kernel.parameters}
    arrays = {"x": x, "weights": weights, "residual": r, "norm_weight": norm_weight, "y": unwritten((4, 40), "bf16"),
              "normed": unwritten((4, 40), "bf16"), "q": np.full((4, 40), 0x55, np.uint8),
              "q_scale": np.full(4, np.nan, np.float32), "q_sum": np.full((4, 2), np.nan, np.float16),
              "sizes": np.array([3, 1, 1], np.int32)}
    out = interpreter.run([(one, {})], {name: array for name, array in arrays.items() if name in needed})
    total = (load(x, "bf16") * weights[..., None]).sum(axis=1) + load(r, "bf16")
    assert_close(load(out["y"][:3], "bf16"), total[:3], "bf16")
    after = rms_norm(load(out["y"][:3], "bf16"), norm_weight, eps=1e-5)
    if normed:
        assert_close(load(out["normed"][:3], "bf16"), after, "bf16")
    if form:
        name, group = split_form(form)
        bits, scale = quantize_tokens(after.astype(np.float32), name)
        if group:
            assert np.array_equal(out["q_sum"][:3], group_sums(out["q"][:3].view(np.int8).astype(np.float32), group))
        assert (out["q"][:3] == bits.view(np.uint8)).mean() > 0.98 and (out["q"][3] == 0x55).all()
        np.testing.assert_allclose(out["q_scale"][:3], scale, rtol=1e-5)


@pytest.mark.parametrize("residual", [False, True])
def test_sum_over_choices(interpreter: Interpreter, residual: bool) -> None:
    rng = np.random.default_rng(3)
    x, r = store(rng.standard_normal((4, 3, 40)), "bf16"), store(rng.standard_normal((4, 40)), "bf16")
    weights = rng.uniform(0, 1, (4, 3)).astype(np.float32)
    one = summing(Sum(4, 40, 3, "bf16", "bf16", "bf16" if residual else ""), H200).legal[0].launches[0]
    needed = {name for name, _ in one.kernel.parameters}
    out = interpreter.run([(one, {})], {name: a for name, a in {
        "x": x, "weights": weights, "residual": r, "y": unwritten((4, 40), "bf16"),
        "sizes": np.array([3, 1, 1], np.int32)}.items() if name in needed})
    wanted = (load(x, "bf16") * weights[..., None]).sum(axis=1) + (load(r, "bf16") if residual else 0)
    assert_close(load(out["y"][:3], "bf16"), wanted[:3], "bf16")
    assert np.isnan(load(out["y"][3], "bf16")).all()


def test_refusals() -> None:
    assert "up to 32 of 1024" in routing(Routing(4, 2000, 8), H200).refused[0].reason


ARCHS = [pytest.param(arch, marks=[] if arch == "sm_90a" else pytest.mark.slow) for arch in ARCHITECTURES]


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles_natively(arch: str) -> None:
    """The matrices of 128 experts, 8 for each token, in the architecture's 8-bit instruction; and the rest."""
    where = device(arch)
    eight = "fp8" if where.has_fp8 else "int8"
    ways = []
    for m in (8, 2048):
        p = Problem(m, 1536, 2048, eight, eight, token_scales=True, gated="silu", experts=128, choices=8)
        legal = candidates(p, where).legal
        ways += [legal, legal[::-1]]
    for kernel, code in chosen(ways, arch).items():
        assert {operand_bits(name) for name in code.matrix} == {8}, kernel.symbol
    found = (routing(Routing(8, 128, 8, normalise=True), where),
             routing(Routing(8, 256, 8, "sigmoid", bias=True, normalise=True, groups=8, kept_groups=4), where),
             routing(Routing(8, 64, 8, shared=8, shared_gate=True), where),
             sorting(Sorting(8, 128, 8), where), summing(Sum(8, 2048, 8, "bf16", "bf16"), where),
             summing(Sum(2048, 2048, 8, "bf16", "bf16", "bf16", norm_eps=1e-6, normed_form=eight), where))
    rest = [one.legal[0].launches[0].kernel for one in found]
    assert all(code.spill_stores == 0 for code in compiled(rest, arch).values())


@pytest.mark.parametrize("arch", ARCHS)
def test_routers_compile_natively(arch: str) -> None:
    """Norm, router and choice in one launch: of mixtral, qwen3-moe, gpt-oss, deepseek-v3 and qwen2-moe, in both
    phases."""
    where = device(arch)
    deepseek: dict[str, Any] = {"scores": "sigmoid", "bias": True, "normalise": True, "factor": 2.5, "groups": 8,
                                "kept_groups": 4}
    ways = []
    for m in (8, 2048):
        many: dict[str, Any] = {"y_form": "fp8" if where.has_fp8 else "int8"} if m > 8 else {}
        for p in (Routing(m, 8, 2, normalise=True, k=4096, norm_eps=1e-5, y=m > 8),
                  Routing(m, 128, 8, normalise=True, k=2048, norm_eps=1e-6, **many),
                  Routing(m, 32, 4, "softmax_of_chosen", k=2880, w_bias=True, norm_eps=1e-5, **many),
                  Routing(m, 256, 8, k=7168, norm_eps=1e-6, y=m > 8, shared=1, **deepseek, **many),
                  Routing(m, 64, 8, k=3584, norm_eps=1e-6, shared=8, shared_gate=True, **many)):
            legal = routing(p, where).legal
            ways += [legal, legal[::-1]]
    for kernel, code in chosen(ways, arch).items():
        assert {operand_bits(name) for name in code.matrix} == {16}, kernel.symbol


@pytest.mark.parametrize(("arch", "precision"), [
    pytest.param(arch, precision, marks=[] if arch == "sm_90a" and precision in ("fp8", "bf16") else pytest.mark.slow)
    for arch in ARCHITECTURES for precision in architectures()[arch].precisions if precision != "fp32"])
def test_generation_compiles_natively(arch: str, precision: str) -> None:
    """Both launches of experts for eight tokens: norm, quantization and gate; quantization, sum and residual."""
    form, activation = precision, precision
    if precision in ("int4", "w4a8"):
        form, activation = "int4", ("fp8" if device(arch).has_fp8 else "int8") if precision == "w4a8" else "bf16"
    base = Problem(8, 2048, 2048, form, activation, quantizes=activation not in ("bf16", "fp16"),
                   scale=form == "nvfp4", float_type="fp16" if precision == "fp16" else "bf16", experts=128, choices=8)
    for p in (replace(base, norm_eps=1e-6, gated="silu"), replace(base, sum_choices=True, residual=True, shared=False)):
        legal = candidates(p, device(arch)).legal
        for kernel, code in chosen([legal, legal[::-1]], arch).items():
            assert {operand_bits(name) for name in code.matrix} == {NATIVE_BITS[precision]}, kernel.symbol
