"""Native arithmetic is proven: the instructions that the compiler chose for each precision, on every target."""
from __future__ import annotations

import re
import shutil

import pytest

from ingot.compiler.cpu.isa import ISAS, host_isa
from ingot.compiler.cpu.toolchain import assembly
from ingot.plugins.expert_linear import cpu as expert_cpu
from ingot.plugins.kernel import INCLUDE_DIR, translation_unit
from ingot.plugins.linear.cpu import Problem, emit
from ingot.plugins.scheme import SCHEMES
from tests.plugins.native import AMX_ISA, require_scheme, schemes_of

# instruction set -> register prefix of its vectors, instruction for: float, int8, w4a8; pairs are "vdpbf16ps"
EXPECTED = {
    "x86-64-v3": ("%ymm", r"vfmadd\d+ps", "vpmaddwd", "vpmaddubsw"),
    "x86-64-v4": ("%zmm", r"vfmadd\d+ps", "vpmaddwd", "vpmaddubsw"),
    "x86-64-v4-vnni": ("%zmm", r"vfmadd\d+ps", "vpdpbusd", "vpdpbusd"),
    "x86-64-v4-bf16": ("%zmm", r"vfmadd\d+ps", "vpdpbusd", "vpdpbusd"),
    AMX_ISA: ("%zmm", r"vfmadd\d+ps", "vpdpbusd", "vpdpbusd"),
    "aarch64-dotprod": ("v", "fmla", "sdot", "sdot"),
}


@pytest.mark.parametrize("m", [1, 512])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("isa", EXPECTED)
def test_instructions(isa: str, scheme: str, m: int) -> None:
    require_scheme(isa, SCHEMES[scheme])
    register, of_floats, of_bytes, of_nibbles = EXPECTED[isa]
    instruction = {"int8": of_bytes, "int8g32": of_bytes, "w4a8": of_nibbles, "bf16_pairs": "vdpbf16ps"}.get(
        scheme, of_floats)
    if (isa, scheme) == (AMX_ISA, "bf16_pairs"):
        register, instruction = "%tmm", "tdpbf16ps"
    text = assembly(translation_unit([emit(Problem(192, 576, SCHEMES[scheme], m))]), ISAS[isa], [INCLUDE_DIR])
    found = re.findall(rf"^\s+{instruction}\s+.*{register}", text, re.MULTILINE)
    assert found, f"no {instruction} on {register} registers"
    calls = re.findall(r"^\s+(?:call\w*|bl)\s.*", text, re.MULTILINE)
    assert not calls, f"a kernel calls {calls}: something was not inlined"


@pytest.mark.parametrize(("scheme", "instruction"), [(s.name, "tdpbf16ps" if s.act_bits == 16 else "tdpbssd")
                                                     for s in SCHEMES.values() if s.rounds_inputs])
def test_tiles(scheme: str, instruction: str) -> None:
    """The loops that multiply tiles keep their sums in registers, where more than 8 tokens may come; the tiles are
    configured once and released."""
    text = assembly(translation_unit([emit(Problem(192, 576, SCHEMES[scheme], 512))]), ISAS[AMX_ISA], [INCLUDE_DIR])
    blocks = [block for block in re.split(r"^\.LBB\S+:", text, flags=re.MULTILINE) if f"\t{instruction}\t" in block]
    assert blocks and len(re.findall(r"\tldtilecfg|\ttilerelease", text)) == 2
    for block in blocks:
        spills = re.findall(r"64-byte (?:Folded )?(?:Spill|Reload)", block)
        assert len(spills) <= (0 if instruction == "tdpbf16ps" else 8), spills
    few = assembly(translation_unit([emit(Problem(192, 576, SCHEMES[scheme], 8))]), ISAS[AMX_ISA], [INCLUDE_DIR])
    assert (f"\t{instruction}\t" in few) == (instruction == "tdpbf16ps")


@pytest.mark.parametrize("isa", EXPECTED)
def test_experts_are_inlined(isa: str) -> None:
    problem = expert_cpu.Problem(8, 2, 192, 576, SCHEMES["w4a8"], 512, shared=True)
    text = assembly(translation_unit([expert_cpu.emit(problem)]), ISAS[isa], [INCLUDE_DIR])
    calls = set(re.findall(r"^\s+(?:call\w*|bl)\s+(\S+)", text, re.MULTILINE))
    assert all("mem" in call for call in calls), calls


@pytest.mark.skipif(shutil.which("cc") is None, reason="no host cc")
def test_the_host_compiler_takes_them_too() -> None:
    """Where somebody asks for it; among others, gcc has its own view of vector types."""
    kernels = [emit(Problem(192, 576, scheme, m)) for scheme in schemes_of(host_isa().name) for m in (1, 512)]
    assert "linear_w4a8_n192_k576_mx" in assembly(translation_unit(kernels), host_isa(), [INCLUDE_DIR], "cc")
