"""Linear and attention kernels in the tiles that engines choose, as compiled code: the tests of plugins take small
ones, which hold neither the widest products of wgmma nor the scaled ones of tcgen05, nor warps that only copy."""
from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ingot.compiler.gpu.triton_compile import PtxCompiler, PtxKernel
from ingot.plugins.attention.tactics import Tile as AttentionTile
from ingot.plugins.gpu.kernel import GpuKernel
from ingot.plugins.linear.tactics import Problem, Tile
from tests.plugins.gpu import test_attention, test_linear
from tools import ptx_check
from tools.ptx.instruction import PtxError
from tools.ptx.machine import Options
from tools.ptx.runner import PtxRunner
from tools.ptx_tiles import linear_problem, own_input_problem, tile_cases

FEW, MANY = (8, 5), (200, 150)
"""Rows of the bucket, and of the step."""

# What a kernel must have executed.
LINEAR = [
    ("sm_90a", "bf16", "bf16", FEW, Tile(64, 16, 64, 2, 4, 5), "wgmma.mma_async.sync.aligned.m64n16k16"),
    ("sm_90a", "fp8", "fp8", MANY, Tile(128, 256, 128, 1, 8, 4, tma=True),
     "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3"),
    ("sm_90a", "int4_g32m", "fp8", MANY, Tile(128, 128, 64, 1, 8, 4, tma=True), "wgmma.mma_async.sync.aligned"),
    ("sm_90a", "int8", "int8", MANY, Tile(128, 128, 128, 2, 8, 4, tma=True), "wgmma.mma_async.sync.aligned"),
    ("sm_90a", "fp8_block", "fp8", MANY, Tile(128, 128, 128, 1, 8, 4, tma=True), "wgmma.mma_async.sync.aligned"),
    ("sm_100a", "nvfp4", "nvfp4", FEW, Tile(128, 16, 256, 4, 4, 4), "tcgen05.mma.cta_group::1.kind::mxf4nvf4"),
    ("sm_100a", "nvfp4", "nvfp4", MANY, Tile(128, 128, 256, 1, 8, 3, tma=True),
     "tcgen05.mma.cta_group::1.kind::mxf4nvf4"),
    ("sm_100a", "bf16", "bf16", MANY, Tile(128, 256, 64, 1, 8, 4, tma=True), "tcgen05.mma.cta_group::1.kind::f16"),
    ("sm_100a", "fp8", "fp8", MANY, Tile(128, 128, 128, 1, 8, 4, tma=True),
     "tcgen05.mma.cta_group::1.kind::f8f6f4"),
    ("sm_100a", "int8", "int8", MANY, Tile(128, 128, 128, 1, 8, 4, tma=True, specialize=True), "setmaxnreg"),
    ("sm_120a", "bf16", "bf16", MANY, Tile(128, 128, 64, 1, 8, 2, tma=True, specialize=True), "setmaxnreg"),
    ("sm_120a", "nvfp4", "nvfp4", FEW, Tile(32, 16, 128, 1, 4, 5),
     "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4"),
    ("sm_120a", "fp8", "fp8", MANY, Tile(128, 64, 128, 1, 4, 3, tma=True), "mma.sync.aligned.m16n8k32"),
]
ATTENTION = [
    ("sm_90a", "bf16", AttentionTile(16, 64, 1, 4, 3), "wgmma.mma_async.sync.aligned.m64n64k16"),
    ("sm_90a", "fp8", AttentionTile(32, 64, 2, 8, 3), "wgmma.mma_async.sync.aligned.m64n64k16"),
    ("sm_100a", "bf16", AttentionTile(32, 64, 1, 8, 3), "tcgen05.mma.cta_group::1.kind::f16"),
]
QUICK = {("sm_90a", "fp8"), ("sm_100a", "nvfp4"), ("sm_90a", "bf16")}


def marked(rows: list[tuple[Any, ...]]) -> list[Any]:
    """One tile of each sort in every run, the others with --slow."""
    return [pytest.param(*row, id="-".join(map(str, row[:2])),
                         marks=[] if row[:2] in QUICK else pytest.mark.slow) for row in rows]


@pytest.fixture
def device_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine's sums may be off, as for a device: exponentials and divisions are approximate there."""
    for module in (test_linear, test_attention):
        original = module.assert_close

        def close(got: np.ndarray, wanted: np.ndarray, kind: str, sums: float = 1e-5, original: Any = original) -> None:
            original(got, wanted, kind, max(sums, 1e-4))
        monkeypatch.setattr(module, "assert_close", close)


@pytest.mark.parametrize(("arch", "form", "activation", "rows", "tile", "instruction"), marked(LINEAR))
def test_linear_in_tiles_of_engines(arch: str, form: str, activation: str, rows: tuple[int, int], tile: Tile,
                                    instruction: str, compilers: Callable[[str], PtxCompiler],
                                    device_sums: None) -> None:
    """144 features and 1024 channels; rows beyond the step's are not written."""
    runner = PtxRunner(compilers(arch), Options(seed=1))
    problem = linear_problem(rows[0], 144, 1024, form, activation)
    test_linear.check(runner, problem, tile, rows[1])  # type: ignore[arg-type]
    assert any(opcode.startswith(instruction) and count for opcode, count in runner.executed.items())


@pytest.mark.slow
@pytest.mark.parametrize("arch", ptx_check.ARCHES)
def test_all_tiles_of_engines(arch: str) -> None:
    result = ptx_check.check(arch, tile_cases(arch), Options())
    assert result.outcomes and not [outcome for outcome in result.outcomes if outcome.status == "failed"]


@pytest.mark.parametrize(("arch", "pattern"), [
    ("sm_90a", r"fence\.proxy\.async[^;]*;"), ("sm_100a", r"fence\.proxy\.async[^;]*;"),
    ("sm_90a", r"wgmma\.wait_group[^;]*;"), ("sm_100a", r"tcgen05\.commit[^;]*;")])
def test_what_is_left_out_of_a_kernel_shows(arch: str, pattern: str, compilers: Callable[[str], PtxCompiler],
                                            device_sums: None) -> None:
    """All such instructions, of a kernel whose threads copy what wgmma or tcgen05 reads."""
    def broken(kernel: GpuKernel) -> PtxKernel:
        compiled = compilers(arch)(kernel)
        text, count = re.subn(r"(?m)^.*" + pattern, "", compiled.ptx)
        assert count
        return replace(compiled, ptx=text)
    with pytest.raises((PtxError, AssertionError)):
        test_linear.check(PtxRunner(broken), Problem(200, 144, 256, "bf16", "bf16"),  # type: ignore[arg-type]
                          Tile(64, 64, 64), 150)


@pytest.mark.parametrize(("form", "activation", "tile"), [
    ("bf16", "bf16", Tile(64, 16, 64, 1, 4, 4)),
    pytest.param("fp8", "fp8", Tile(64, 16, 128, 1, 4, 4), marks=pytest.mark.slow)])
def test_an_input_that_two_products_read(form: str, activation: str, tile: Tile,
                                         compilers: Callable[[str], PtxCompiler], device_sums: None) -> None:
    """Made inside, for tcgen05. Triton waits for the first product alone before the next one is written: both factors
    of a gate are one product."""
    problem = own_input_problem(8, 144, 1024, form, activation, "silu")
    for seed in range(3):
        runner = PtxRunner(compilers("sm_100a"), Options(seed))
        test_linear.check(runner, problem, replace(tile, one_product=True), 5)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="got"):
        for seed in range(3):
            runner = PtxRunner(compilers("sm_100a"), Options(seed))
            test_linear.check(runner, problem, tile, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize(("arch", "kv_type", "tile", "instruction"), marked(ATTENTION))
def test_attention_in_tiles_of_engines(arch: str, kv_type: str, tile: AttentionTile, instruction: str,
                                       compilers: Callable[[str], PtxCompiler], device_sums: None) -> None:
    """Contexts and single tokens in one step, eight heads of 128 in two groups."""
    runner = PtxRunner(compilers(arch), Options(seed=1))
    test_attention.check(runner, tile, [9, 170, 70, 5], [9, 113, 1, 5], 8, 2, 128, 128, "bf16",  # type: ignore[arg-type]
                         kv_type, sums=4e-3)
    assert any(opcode.startswith(instruction) and count for opcode, count in runner.executed.items())
