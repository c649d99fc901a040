"""Kernels from sm_90 on wait themselves for the launch before them, ahead of everything else that they do."""
from __future__ import annotations

from pathlib import Path

import pytest

from ingot.compiler.gpu.programmatic_launch import overlap_launches, waits_first
from ingot.compiler.gpu.triton_compile import PtxCompiler, compile_kernels
from ingot.compiler.targets import architectures
from ingot.plugins.gpu.kernel import GpuKernel

KERNEL = GpuKernel("scaled", "tests.compiler.gpu.kernels", "scaled",
                   (("x", "*fp32"), ("y", "*fp32"), ("factor", "fp32")), (("N", 1000), ("BLOCK", 256)))
PTX = """
.visible .entry f(
	.param .u64 .ptr .global f_param_0
)
.reqntid 128
{
	.reg .b32 	%r<2>;

// %bb.0:
	ld.param.b64 	%rd1, [f_param_0];
	ret;
}
"""


@pytest.mark.parametrize(("arch", "overlaps"), [("sm_80", False), ("sm_89", False), ("sm_90a", True),
                                                ("sm_100a", True), ("sm_120a", True)])
def test_compiled_code(arch: str, overlaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                       request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv("PYTHONPATH", str(request.config.rootpath))
    assert compile_kernels([KERNEL], architectures()[arch], tmp_path)[KERNEL].programmatic_launch is overlaps
    with PtxCompiler(architectures()[arch], tmp_path) as compiler:
        ptx = compiler(KERNEL).ptx
    assert ptx.count("griddepcontrol.wait") == ptx.count("griddepcontrol.launch_dependents") == overlaps


def test_the_first_instructions() -> None:
    lines = [line.strip() for line in overlap_launches(PTX).splitlines()]
    begin = lines.index("// %bb.0:")
    assert lines[begin + 1:begin + 4] == ["griddepcontrol.launch_dependents;", "griddepcontrol.wait;",
                                          "ld.param.b64 \t%rd1, [f_param_0];"]
    assert overlap_launches(overlap_launches(PTX)) == overlap_launches(PTX)
    with pytest.raises(ValueError, match="no kernel"):
        overlap_launches(".version 8.8\n")


def sass(*instructions: str) -> str:
    return "\n".join(f"        /*{16 * number:04x}*/                   {text} ;" for number, text in
                     enumerate(instructions))


@pytest.mark.parametrize(("code", "waits"), [
    (("LDC R1, c[0x0][0x28]", "PREEXIT", "ACQBULK", "LDG.E R2, [R4]"), True),
    (("S2R R0, SR_CTAID.X", "@!PT LDC R1, c[0x0][0x28]", "ACQBULK", "EXIT"), True),
    (("LDG.E R2, [R4]", "ACQBULK"), False),
    (("@P0 BRA `(.L_1)", "ACQBULK"), False),
    (("STS [R2], R3", "ACQBULK"), False),
    (("LDC R1, c[0x0][0x28]", "EXIT"), False),
], ids=["as compiled", "predicates", "load before", "branch before", "shared before", "no wait"])
def test_what_disassembled_code_tells(code: tuple[str, ...], waits: bool) -> None:
    assert waits_first(sass(*code)) is waits
