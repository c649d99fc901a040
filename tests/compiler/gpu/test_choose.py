"""Which candidates are taken: with kernels that are there already, and without those that spill or do not fit."""
from __future__ import annotations

from collections.abc import Iterable

import pytest

from ingot.compiler.errors import CannotCompile
from ingot.compiler.gpu import choose
from ingot.compiler.gpu.choose import Chooser
from ingot.compiler.gpu.lower import Request
from ingot.compiler.gpu.native import NotNative, require_native
from ingot.compiler.gpu.triton_compile import CompiledKernel, CompileError
from ingot.compiler.targets import Architecture
from ingot.plugins.gpu.kernel import Candidate, Cost, GpuKernel, GpuLaunch

from .conftest import uncompiled_kernel
from .programs import gpu

H200 = gpu("h200")


def candidate(name: str, megabytes: float) -> Candidate:
    kernel = GpuKernel(name, "ingot.plugins.linear.gpu", "linear", (), ())
    return Candidate(name, (GpuLaunch(kernel, (1000, 1, 1)),), Cost(megabytes * 1e6, 0), 1024)


def request(*candidates: Candidate, precision: str = "bf16") -> Request:
    return Request("linear", "model.layers.0", candidates, (), precision, True, {}, (), {})


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """symbol -> what is wrong with it: changed fields, or an error. "asked": the symbols in order."""
    faults: dict[str, object] = {"asked": []}

    def compiled(kernels: Iterable[GpuKernel], arch: Architecture, *rest: object,
                 ) -> dict[GpuKernel, CompiledKernel | CompileError]:
        found: dict[GpuKernel, CompiledKernel | CompileError] = {}
        for kernel in kernels:
            faults["asked"].append(kernel.symbol)  # type: ignore[attr-defined]
            fault = faults.get(kernel.symbol, {})
            found[kernel] = fault if isinstance(fault, CompileError) else uncompiled_kernel(
                kernel, arch, **fault)  # type: ignore[arg-type]
        return found

    monkeypatch.setattr(choose, "try_compile", compiled)
    return faults


def test_only_the_best_is_compiled(compiler: dict[str, object]) -> None:
    chosen, = Chooser(H200).choose([request(candidate("slow", 900), candidate("fast", 100))])
    assert chosen.candidate.name == "fast" and compiler["asked"] == ["fast"]


def test_what_spills_gives_way(compiler: dict[str, object]) -> None:
    compiler["fast"] = {"spill_stores": 7, "spill_loads": 9}
    compiler["middle"] = CompileError("middle needs 300000 bytes of shared memory")
    asked = request(candidate("slow", 900), candidate("fast", 100), candidate("middle", 300))
    chosen, = Chooser(H200).choose([asked])
    assert chosen.candidate.name == "slow" and compiler["asked"] == ["fast", "middle", "slow"]
    assert dict(chosen.refused) == {"fast": "spills registers (7 stores, 9 loads)",
                                    "middle": "middle needs 300000 bytes of shared memory"}


def test_the_least_spilling_one_where_all_spill(compiler: dict[str, object]) -> None:
    compiler["fast"], compiler["slow"] = {"spill_stores": 7}, {"spill_stores": 3}
    chosen, = Chooser(H200).choose([request(candidate("slow", 900), candidate("fast", 100))])
    assert chosen.candidate.name == "slow" and len(chosen.refused) == 2


def test_a_request_that_nothing_serves(compiler: dict[str, object]) -> None:
    compiler["only"] = CompileError("only does not compile for sm_90a:\n  because")
    with pytest.raises(CannotCompile, match="no kernel that fits sm_90a: only: only does not compile for sm_90a: bec"):
        Chooser(H200).choose([request(candidate("only", 1))])


def test_kernels_of_other_buckets_are_taken_where_they_do_as_well(compiler: dict[str, object]) -> None:
    first = request(candidate("shared", 100))
    near = request(candidate("shared", 102), candidate("own", 100))
    far = request(candidate("shared", 200), candidate("own", 100))
    names = [choice.candidate.name for choice in Chooser(H200).choose([first, near])]
    assert names == ["shared", "shared"] and compiler["asked"] == ["shared"]
    assert [choice.candidate.name for choice in Chooser(H200).choose([first, far])] == ["shared", "own"]


@pytest.mark.parametrize(("precision", "matrix", "wrong"), [
    ("fp8", {"QGMMA.64x16x32.F32.E4M3.E4M3": 4}, False), ("fp8", {"HGMMA.64x16x16.F32.BF16": 4}, True),
    ("fp8", {}, True), ("w4a8", {"IMMA.16832.S8.S8.SAT": 4}, False), ("int4", {"IMMA.16832.S8.S8.SAT": 4}, True),
    ("nvfp4", {"UTCOMMA.4X": 4}, False), ("nvfp4", {"UTCQMMA": 4}, True), ("fp32", {}, False),
    ("fp8", {"QGMMA.64x16x32": 1, "HMMA.16816.F32.BF16": 1}, True)])
def test_nativeness(compiler: dict[str, object], precision: str, matrix: dict[str, int], wrong: bool) -> None:
    compiler["k"] = {"matrix": matrix}
    asked, chooser = request(candidate("k", 1), precision=precision), Chooser(gpu("b200"))
    made = [(8, asked, *chooser.choose([asked]))]
    if not wrong:
        require_native(made, chooser.code)  # type: ignore[arg-type]
        return
    with pytest.raises(NotNative, match=r"model.layers.0: its kernel for 8 tokens, k, has to multiply operands of"):
        require_native(made, chooser.code)  # type: ignore[arg-type]
