"""Mixtures of experts in the interpreter: choice, sorting, grouped matrices, and the sum over a token's choices."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ingot.compiler.gpu.disassemble import operand_bits
from ingot.compiler.gpu.interpret import Interpreter
from ingot.compiler.ir.registry import OPS
from ingot.plugins.expert_linear.tactics import Routing, Sorting, Sum, routing, sorting, summing
from ingot.plugins.linear import gpu_reference
from ingot.plugins.linear.gpu_formats import FORMATS, Packed, pack
from ingot.plugins.linear.gpu_reference import quantize_tokens
from ingot.plugins.linear.tactics import Problem, Tile, candidates, launch

from .support import assert_close, compiled, device, load, scratch, store, unwritten

H200 = device("sm_90a")


CASES: list[dict[str, Any]] = [
    {}, {"normalise": True}, {"scores": "softmax_of_chosen"}, {"scores": "sigmoid", "bias": True, "normalise": True},
    {"scores": "sigmoid"}, {"bias": True, "normalise": True, "eps": 0.25}, {"factor": 2.5},
    {"scores": "sigmoid", "bias": True, "groups": 4, "kept_groups": 2, "normalise": True, "eps": 1e-20},
    {"groups": 4, "kept_groups": 3, "group_best": 1}, {"groups": 12, "kept_groups": 5, "factor": 0.5},
    {"bias": True, "groups": 3, "kept_groups": 1, "group_best": 4}]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("experts", "choices"), [(12, 3), (60, 4)])
def test_routing(interpreter: Interpreter, case: dict[str, Any], experts: int, choices: int) -> None:
    """As the IR's operator."""
    rng = np.random.default_rng(0)
    tokens = 6
    logits = rng.standard_normal((tokens + 1, experts)).astype(np.float32)
    logits[0, :] = 0  # equals: the smaller number first
    logits[tokens] = np.nan
    bias = rng.standard_normal(experts).astype(np.float32)
    bias[:experts // 3] = 0.5
    p = Routing(tokens + 1, experts, choices, **case)
    one, = routing(p, H200).legal[0].launches
    arrays = {"logits": logits, "ids": np.full((tokens + 1, choices), -7, np.int32),
              "sizes": np.array([tokens, 1, 1], np.int32),
              "weights": np.full((tokens + 1, choices), np.nan, np.float32)}
    if p.bias:
        arrays["bias"] = bias
    out = interpreter.run([(one, {})], arrays)
    attrs = {name: value for name, value in case.items() if name != "bias"}
    ids, weights = OPS["route"].reference(logits[:tokens], bias if p.bias else None, choices=choices, **attrs)
    assert np.array_equal(out["ids"][:tokens], ids) and (out["ids"][tokens] == -7).all()
    assert np.allclose(out["weights"][:tokens], weights, rtol=1e-5) and np.isnan(out["weights"][tokens]).all()


@pytest.mark.parametrize(("tokens", "more", "block"), [(6, 1, None), (190, 10, 32)])
def test_sorting(interpreter: Interpreter, tokens: int, more: int, block: int | None) -> None:
    """Also of more rows than a block looks at at a time; some experts get none."""
    one, = sorting(Sorting(tokens + more, 5, 2), H200).legal[0].launches
    if block:
        one = replace(one, kernel=replace(one.kernel, constants=tuple(
            (name, block if name == "BLOCK" else value) for name, value in one.kernel.constants)))
    ids = np.random.default_rng(1).choice([0, 1, 3], (tokens + more, 2)).astype(np.int32)
    out = interpreter.run([(one, {})], {"ids": ids, "order": np.full((tokens + more) * 2, -7, np.int32),
                                        "starts": np.zeros(6, np.int32), "sizes": np.array([tokens, 1, 1], np.int32)})
    flat = ids[:tokens].reshape(-1)
    assert np.array_equal(out["order"][:2 * tokens], np.argsort(flat, kind="stable"))
    assert np.array_equal(out["starts"], np.searchsorted(np.sort(flat), np.arange(6)))
    assert (out["order"][2 * tokens:] == -7).all()


@pytest.mark.parametrize(("form", "activation"), [("bf16", "bf16"), ("fp8", "fp8"), ("int4", "bf16"), ("int4", "int8")])
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
    rows = (tokens + 1) * (1 if shared else choices)
    wide = rng.standard_normal((rows, k)).astype(np.float32)
    if p.token_scales:
        x, x_scale = quantize_tokens(wide, activation)
    else:
        x, x_scale = store(wide, activation), np.ones(rows, np.float32)
    bias = rng.standard_normal((experts, height)).astype(np.float32)
    flat = ids.reshape(-1)
    arrays = {"x": x, "x_scale": x_scale, "w": np.concatenate([one.w for one in packs]), "bias": bias,
              "order": np.concatenate([np.argsort(flat, kind="stable"), [2**30] * choices]).astype(np.int32),
              "starts": np.searchsorted(np.sort(flat), np.arange(experts + 1)).astype(np.int32),
              "y": unwritten(((tokens + 1) * choices, n), "fp32")}
    if packs[0].w_scale is not None:
        arrays["w_scale"] = np.concatenate([one.w_scale for one in packs if one.w_scale is not None])
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


@pytest.mark.parametrize("arch", ["sm_90a", *(pytest.param(arch, marks=pytest.mark.slow)
                                              for arch in ("sm_80", "sm_89", "sm_100a", "sm_120a"))])
def test_compiles_natively(arch: str) -> None:
    """The matrices of 128 experts, 8 for each token, in the architecture's 8-bit instruction; and the rest."""
    eight = "fp8" if device(arch).has_fp8 else "int8"
    kernels = []
    for m in (8, 2048):
        p = Problem(m, 1536, 2048, eight, eight, token_scales=True, gated="silu", experts=128, choices=8)
        legal = candidates(p, device(arch)).legal
        kernels += [legal[0].launches[0].kernel, legal[-1].launches[0].kernel]
    for kernel, code in compiled(kernels, arch).items():
        assert {operand_bits(name) for name in code.matrix} == {8} and code.spill_stores == 0, kernel.symbol
    rest = [routing(problem, device(arch)).legal[0].launches[0].kernel for problem in (
        Routing(8, 128, 8, normalise=True),
        Routing(8, 256, 8, "sigmoid", bias=True, normalise=True, groups=8, kept_groups=4))]
    rest.append(sorting(Sorting(8, 128, 8), device(arch)).legal[0].launches[0].kernel)
    rest.append(summing(Sum(8, 2048, 8, "bf16", "bf16"), device(arch)).legal[0].launches[0].kernel)
    assert all(code.spill_stores == 0 for code in compiled(rest, arch).values())
