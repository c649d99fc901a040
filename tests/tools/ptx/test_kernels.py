"""Compiled kernels run on the machine: a few of each sort; python -m tools.ptx_check runs all.

What makes the machine worth running is tried too: kernels with an instruction left out must fail on it."""
from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from ingot.compiler.gpu.triton_compile import PtxCompiler, PtxKernel
from ingot.plugins.gpu.kernel import GpuKernel
from tools import ptx_check
from tools.gpu_check.cases import Case, list_cases
from tools.ptx.instruction import PtxError
from tools.ptx.machine import Options
from tools.ptx.runner import PtxRunner

SPLIT = ("Tile(features=32, tokens=16, channels=128, splits=2, warps=4, stages=3, tma=False, specialize=False, "
         "one_product=False)")
EVERYWHERE = (
    "linear.test_formats[bf16-bf16-False]", "linear.test_gates[silu]", f"linear.test_norm_inside[bf16-bf16-{SPLIT}]",
    "linear.test_groups_and_minimums[split-int8-int4_g32m]", "attention.test_generation[[100, 1, 33, 64]]",
    "attention.test_context_chunks_beside_generation[Tile(tokens=4, positions=16, splits=3, warps=4, stages=2)]",
    "attention.test_types_of_the_cache[int8-False]", "rope.test_types_of_the_cache[int8]",
    "rows.test_norms[rms_norm-int8_sum32-False-True]", "rows.test_quantize[int8_sum128-False-gelu_tanh]",
    "experts.test_routing[{'normalise': True}-12-3-6]", "experts.test_sum_over_choices[True]",
    f"experts.test_grouped_matrices[int4-int8-{SPLIT}-True-23-4]", "sampling.test_log_probabilities",
    "select.test_argmax[2-bf16]", "lora.test_equals_reference[mixed-fp16-")
E4M3 = ("linear.test_formats[fp8-fp8-False]", "linear.test_groups_and_minimums[split-fp8-int4_g128m]",
        "linear.test_scales_of_blocks", "attention.test_types_of_the_cache[fp8-True]",
        "rows.test_quantize[fp8-False-silu]", "rope.test_static_scales")
CASES = {"sm_80": EVERYWHERE, "sm_89": E4M3,
         "sm_120a": ("linear.test_formats[nvfp4-nvfp4-False]", "linear.test_descriptors[bf16-bf16]",
                     "rows.test_quantize[nvfp4-True-silu]"),
         "sm_103a": ("linear.test_groups_and_minimums[tiled-int8-int4_g32m]",)}


@cache
def cases() -> dict[str, Case]:
    return {case.name: case for case in list_cases(ptx_check.ALL_MODULES)}


@pytest.mark.parametrize("arch, name", [(arch, name) for arch, names in CASES.items() for name in names])
def test_compiled_kernels(arch: str, name: str, compilers: Callable[[str], PtxCompiler]) -> None:
    chosen = [case for label, case in cases().items() if label.startswith(name)]
    assert chosen, f"there is no case {name}"
    result = ptx_check.Result(arch)
    outcome = ptx_check.run_case(chosen[0], compilers(arch), Options(), result)
    assert outcome.status == "passed", outcome.detail
    assert result.kernels and sum(result.executed.values()) > 50


@pytest.mark.parametrize("name", ["linear.test_norm_inside[bf16-bf16-" + SPLIT + "]", "sampling.test_greedy",
                                  "experts.test_routing[{}-12-3-6]"])
@pytest.mark.parametrize("seed", [1, 2])
def test_in_any_order(name: str, seed: int, compilers: Callable[[str], PtxCompiler]) -> None:
    result = ptx_check.Result("sm_80")
    outcome = ptx_check.run_case(cases()[name], compilers("sm_80"), Options(seed, "warp"), result)
    assert outcome.status == "passed", outcome.detail


@pytest.mark.slow
@pytest.mark.parametrize("arch", ptx_check.ARCHES)
def test_all_cases(arch: str) -> None:
    result = ptx_check.check(arch, list(cases().values()), Options())
    assert not [outcome for outcome in result.outcomes if outcome.status == "failed"]


def without(text: str, pattern: str, which: int) -> str:
    """The program without the instruction that the pattern finds for the nth time."""
    found = list(re.finditer(pattern, text))[which]
    return text[: found.start()] + text[found.end() :]


@pytest.mark.parametrize("pattern, name", [
    (r"bar\.sync\s+0;", "linear.test_formats[bf16-bf16-False]"),
    (r"cp\.async\.wait_group\s+\d+;", "linear.test_formats[bf16-bf16-False]"),
    (r"mma\.sync[^;]*;", "linear.test_formats[bf16-bf16-False]"),
    (r"bar\.sync\s+0;", "attention.test_generation[[16, 17]]"),
    (r"shfl\.sync[^;]*;", "rows.test_norms[rms_norm-bf16-False-False]")])
def test_what_is_missing_shows(pattern: str, name: str, compilers: Callable[[str], PtxCompiler]) -> None:
    compiler, counts = compilers("sm_80"), []

    def broken(which: int) -> Callable[[GpuKernel], PtxKernel]:
        def compile_one(kernel: GpuKernel) -> PtxKernel:
            compiled = compiler(kernel)
            counts.append(len(re.findall(pattern, compiled.ptx)))
            return replace(compiled, ptx=without(compiled.ptx, pattern, which % counts[-1])) if counts[-1] else compiled
        return compile_one
    shown = 0
    for which in range(4):
        try:
            cases()[name].run(PtxRunner(broken(which)))
        except (PtxError, AssertionError):
            shown += 1
    assert max(counts), "the kernel has such an instruction"
    assert shown >= 2, f"{shown} of 4 were noticed"


@pytest.mark.parametrize("pattern, other, message", [
    (r"\.param \.u64 (.*_param_0,)", r".param .u32 \1", r"parameters of \[8, .*\] bytes are passed, the code has \[4,"),
    (r"\.reqntid \d+", ".reqntid 96", "the code is for 96")])
def test_code_that_is_not_launched_so(pattern: str, other: str, message: str,
                                      compilers: Callable[[str], PtxCompiler]) -> None:
    def changed(kernel: GpuKernel) -> PtxKernel:
        compiled = compilers("sm_80")(kernel)
        return replace(compiled, ptx=re.sub(pattern, other, compiled.ptx))
    with pytest.raises(PtxError, match=message):
        cases()["rope.test_types_of_the_cache[int8]"].run(PtxRunner(changed))


def test_table_of_what_was_executed(compilers: Callable[[str], PtxCompiler]) -> None:
    result = ptx_check.Result("sm_80")
    result.outcomes.append(ptx_check.run_case(cases()["rows.test_norms[rms_norm-fp8-False-False]"], compilers("sm_80"),
                                              Options(), result))
    result.outcomes.append(ptx_check.run_case(cases()["rows.test_norms[rms_norm-bf16-False-False]"],
                                              compilers("sm_80"), Options(), result))
    text = ptx_check.as_text([result])
    assert re.search(r"\| sm_80 \| 1 \| 0 \| 1 \| 1 \| \d+ \| \d+ \|", text)
    assert re.search(r"\| rsqrt \| \d+ \|", text) and "1 skipped: fp8 does not compile there" in text


@pytest.mark.parametrize("arguments, message", [
    (["--arch", "sm_75"], "there is no architecture 'sm_75'; there are: sm_80"),
    (["--filter", "absent"], "no case has 'absent' in its name")])
def test_wrong_requests(arguments: list[str], message: str, capsys: Any) -> None:
    assert ptx_check.main(arguments) == 2
    assert message in capsys.readouterr().err
