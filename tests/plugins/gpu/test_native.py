"""Nativeness by disassembly: every precision of every architecture reaches the matrix instruction that its target
names, in both phases, without spilling registers."""
from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from ingot.compiler.gpu.disassemble import operand_bits
from ingot.compiler.gpu.select import shortlist
from ingot.compiler.targets import architectures, list_targets
from ingot.plugins.gpu.kernel import GpuKernel
from ingot.plugins.linear.tactics import Problem, candidates

from .support import ARCHITECTURES, QUICK, compiled, device

BITS = {"bf16": 16, "fp16": 16, "int4": 16, "fp8": 8, "int8": 8, "w4a8": 8, "nvfp4": 4}


def problem(precision: str, arch: str, m: int, **changes: object) -> Problem:
    """The linear layer that an engine of this precision has, quantized by token where it is quantized."""
    name, _, groups = precision.partition("_")
    form, activation = name, name
    if name in ("int4", "w4a8"):
        eight = "fp8" if device(arch).has_fp8 else "int8"
        form, activation = f"int4_{groups}" if groups else "int4", eight if name == "w4a8" else "bf16"
    eight_bits = activation in ("fp8", "int8")
    return Problem(m, 4096, 4096, form, activation, token_scales=eight_bits, scale=name == "nvfp4", **changes)  # type: ignore[arg-type]


def sample(found: tuple[GpuKernel, ...]) -> list[GpuKernel]:
    """The smallest and the largest tile."""
    return list(dict.fromkeys((found[0], found[-1])))


CASES = [pytest.param(arch, precision, marks=[] if arch in QUICK else pytest.mark.slow)
         for arch in ARCHITECTURES for precision in architectures()[arch].precisions if precision != "fp32"]


@pytest.mark.parametrize(("arch", "precision"), CASES)
def test_linear(arch: str, precision: str) -> None:
    wanted = architectures()[arch].precisions[precision]
    kernels = []
    for m in (8, 2048):
        found = candidates(problem(precision, arch, m, residual=True), device(arch))
        kernels += sample(tuple(candidate.launches[0].kernel for candidate in found.legal))
    for kernel, code in compiled(kernels, arch).items():
        assert {name.partition(".")[0] for name in code.matrix} == {wanted}, (kernel.symbol, code.matrix)
        assert {operand_bits(name) for name in code.matrix} == {BITS[precision]}, (kernel.symbol, code.matrix)
        assert code.spill_stores == 0, f"{kernel.symbol} spills"


@pytest.mark.parametrize("arch", [pytest.param(arch, marks=[] if arch in QUICK else pytest.mark.slow)
                                  for arch in ARCHITECTURES])
def test_fp32_keeps_all_its_bits(arch: str) -> None:
    """The router's precision: TF32 would round operands to 10 bits of mantissa."""
    kernels = [candidate.launches[0].kernel for m in (8, 256)
               for candidate in islice(candidates(problem("fp32", arch, m), device(arch)).legal, 1)]
    assert all(not code.matrix for code in compiled(kernels, arch).values())


@pytest.mark.parametrize("arch", [pytest.param("sm_90a"), pytest.param("sm_89", marks=pytest.mark.slow),
                                  pytest.param("sm_100a", marks=pytest.mark.slow),
                                  pytest.param("sm_120a", marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", ["bf16", "fp8", "w4a8"])
def test_prologue_and_gate_of_generation(arch: str, precision: str) -> None:
    """A layer of eight tokens that normalises and quantizes its own input and applies the gate."""
    base = problem(precision, arch, 8)
    eight = base.activation == "fp8"
    p = Problem(8, 4096, 4096, base.format, base.activation, quantizes=eight, norm_eps=1e-6, gated="silu")
    kernel = candidates(p, device(arch)).legal[-1].launches[0].kernel
    code = compiled([kernel], arch)[kernel]
    assert {operand_bits(name) for name in code.matrix} == {BITS[precision]} and code.spill_stores == 0


GROUPED = [pytest.param(arch, precision,
                        marks=[] if precision.endswith("g32m") and arch in QUICK else pytest.mark.slow)
           for arch in ARCHITECTURES if arch != "sm_103a"
           for precision in ("int4_g32m", "w4a8_g32m", "w4a8_g128m", "w4a8_g32", "int4_g64m")]


@pytest.mark.parametrize(("arch", "precision"), GROUPED)
def test_groups(arch: str, precision: str) -> None:
    """What is chosen for each phase, of what does not spill. Only minimums are multiplied in 16 bits beside eight."""
    gpu = next(target.gpu for target in list_targets() if target.gpu is not None and target.gpu.arch.name == arch)
    name = precision.partition("_")[0]
    base = problem(precision, arch, 8)
    eight = base.activation in ("fp8", "int8")
    for p in (replace(base, residual=True), replace(base, m=2048, residual=True),
              replace(base, token_scales=False, quantizes=eight, norm_eps=1e-6, gated="silu")):
        legal = shortlist(candidates(p, gpu.device).legal, gpu, name)
        kernels = [candidate.launches[0].kernel for candidate in legal]
        code = next(found for kernel in kernels if not (found := compiled([kernel], arch)[kernel]).spill_stores)
        bits = {operand_bits(instruction) for instruction in code.matrix}
        assert bits - ({16} if p.sum_group else set()) == {BITS[name]}, (kernels[0].symbol, code.matrix)
        wanted = architectures()[arch].precisions[name]
        assert any(instruction.startswith(wanted) for instruction in code.matrix), (kernels[0].symbol, code.matrix)


@pytest.mark.parametrize("arch", [pytest.param("sm_90a"), pytest.param("sm_89", marks=pytest.mark.slow),
                                  pytest.param("sm_100a", marks=pytest.mark.slow),
                                  pytest.param("sm_120a", marks=pytest.mark.slow)])
def test_scales_of_blocks(arch: str) -> None:
    kernels = []
    for m in (8, 2048):
        p = Problem(m, 4096, 4096, "fp8_block", "fp8", token_scales=True, residual=True)
        kernels += sample(tuple(c.launches[0].kernel for c in candidates(p, device(arch)).legal))
    for kernel, code in compiled(kernels, arch).items():
        assert {operand_bits(name) for name in code.matrix} == {8} and code.spill_stores == 0, kernel.symbol
